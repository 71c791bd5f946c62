"""Residual streams of a prompt, and residual Jacobians J = d f^l(X)_t2 / d x_t1 of its blocks X + f^l(X)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_posgen.arithmetic import DOUBLE, double_device, row_ranges
from tl_posgen.core.options import require
from tl_posgen.coupling.numbers.lanczos import SingularTriplets, dense_triplets, lanczos_triplets
from tl_posgen.coupling.numbers.linearised_attention import LinearisedAttention, vector_jacobian_products
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backends.backend import KeyValueContext
from tl_posgen.models.model import Model
from tl_posgen.models.selection import check_indices
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.tokens import check_ids, given_ids
from tl_posgen.progress import count_pass

DENSE_UP_TO = 2048
"""d_model up to which the d x d matrix is built and decomposed; larger Jacobians are only multiplied by vectors."""

_SCORES_AT_ONCE = 2**18  # query-key pairs per head while the context is read


@dataclass
class ResidualJacobian:
    r"""J = d f^l(X)_target / d x_source with f^l(X) = X^l - X^{l-1}: an operator and, on request, a matrix.

    All other tokens are held fixed. The identity of the residual path, which enters only at source == target, is
    subtracted exactly.

    Attributes:
        layer, source, target: block l, input token t1, output token t2 >= t1.
        touched: number of tokens that a product involves: source and target if the attention was replaced by its
            derivative, else the whole context.
        home: the device of its matrix and triplets, one for all layers of a model spread over devices.

    Source: the definition is that of Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810. J v is computed as the
    derivative of u -> J' u, a backward pass through the backward pass, so no forward-mode rules are needed.
    """

    layer: int
    source: int
    target: int
    touched: int
    home: torch.device
    _leaf: Tensor = field(repr=False)
    _output: Tensor = field(repr=False)
    _adjoint: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _matrix: Tensor | None = field(default=None, repr=False)
    _triplets: dict[tuple[int, int], SingularTriplets] = field(default_factory=dict, repr=False)

    @property
    def d_model(self) -> int:
        return self._leaf.shape[-1]

    def matvec(self, v: Float[Tensor, "d_model k"]) -> Float[Tensor, "d_model k"]:
        """J V, all columns at once; on the device of V."""
        if self._matrix is not None:
            return (self._matrix @ v.to(self._matrix)).to(v.device)
        if self._adjoint is None:
            u = torch.zeros_like(self._output, requires_grad=True)
            with torch.enable_grad():
                (image,) = torch.autograd.grad(self._output, self._leaf, u, create_graph=True)
            self._adjoint = (u, image)
        return self._product(self._adjoint[1], self._adjoint[0], v)

    def rmatvec(self, u: Float[Tensor, "d_model k"]) -> Float[Tensor, "d_model k"]:
        """J' U, all columns at once; on the device of U."""
        if self._matrix is not None:
            return (self._matrix.mT @ u.to(self._matrix)).to(u.device)
        return self._product(self._output, self._leaf, u)

    def dense(self) -> Float[Tensor, "d_model d_model"]:
        """Return the matrix, row i for output coordinate i; built once from J' e_i, then kept instead of the graph."""
        if self._matrix is None:
            self._matrix = self.rmatvec(torch.eye(self.d_model, dtype=self._leaf.dtype, device=self.home)).mT
            self._leaf, self._output, self._adjoint = self._leaf.detach(), self._output.detach().clone(), None
        return self._matrix

    def triplets(self, k: int, dense_up_to: int = DENSE_UP_TO) -> SingularTriplets:
        """Return the k largest singular triplets: of the matrix if d_model <= dense_up_to, else by block Lanczos."""
        if not 1 <= k <= self.d_model:
            raise InputError(f"k = {k} singular vectors of a Jacobian of d_model {self.d_model}; choose 1 to d_model")
        if (k, dense_up_to) not in self._triplets:
            if self.d_model <= dense_up_to:
                triplets = dense_triplets(self.dense(), k)
            else:
                shape, dtype = (self.d_model, self.d_model), self._leaf.dtype
                triplets = lanczos_triplets(self.matvec, self.rmatvec, shape, k, dtype=dtype, device=self.home)
            self._triplets[k, dense_up_to] = triplets
        return self._triplets[k, dense_up_to]

    def _product(self, output: Tensor, argument: Tensor, columns: Tensor) -> Tensor:
        rows = columns.to(output).mT.reshape(-1, *output.shape)
        (images,) = vector_jacobian_products(output, [argument], rows, self.touched * self.d_model)
        image = images.reshape(len(rows), -1).mT.to(columns.device)
        return image - columns if self.source == self.target else image


def residual_streams(model: Model | Session, tokens: Int[Tensor, " pos"]) -> Float[Tensor, "state pos d_model"]:
    """x_i^l, l = 0 .. n_layers: the residual stream entering block 0, then leaving every block (before the final norm);
    on the device of the first block, or the host where that has no float64.

    Long prompts are read in pieces with a KV cache, so that no score matrix of the whole prompt is formed.

    Raises:
        InputError: the model's writing weights are centred, its dtype is below float32, or values are not finite;
            active dropout, or another thread that measures the model.
    """
    session = session_of(model)
    session.require_evaluation()
    model = session.model
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(model.cfg.n_layers))]
    states: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(x: Tensor, hook: Any, name: str) -> None:
        states[name].append(x[0].detach())

    tokens, backend = tokens.to(model.cfg.device), session.backend
    hooks = [(name, partial(keep, name=name)) for name in names]
    with session.exclusive(session.owner), torch.no_grad(), model.hooks(fwd_hooks=hooks):
        if len(_pieces(len(tokens))) == 1:
            count_pass(1)
            model(tokens[None], return_type=None, **backend.options(tokens[None]))
        else:
            _read(backend.context(), tokens)
    home = double_device(tokens.device)
    streams = torch.stack([torch.cat(pieces).to(home) for pieces in states.values()])
    if streams.dtype not in (torch.float32, DOUBLE):
        raise InputError(f'{streams.dtype} is too coarse for Jacobians; load the model with dtype="float32"')
    if not streams.isfinite().all():
        raise InputError("the residual stream holds NaN or infinite values; the model's weights are not sound")
    if (streams.mean(dim=-1).abs() <= 1e-4 * streams.norm(dim=-1) / streams.shape[-1] ** 0.5).all():
        raise InputError(
            "the residual stream has zero mean at every token and layer: the writing weights were centred, which "
            "changes norms, trajectories and Jacobians. Load with center_writing_weights=False (tl_posgen.load_model, "
            "HookedTransformer.from_pretrained_no_processing, a TransformerBridge without enable_compatibility_mode)"
        )
    return streams


def residual_jacobians(
    model: Model | Session,
    tokens: Int[Tensor, " pos"],
    source: int,
    target: int | None = None,
    layers: Sequence[int] | None = None,
    *,
    streams: Float[Tensor, "state pos d_model"] | None = None,
    linearise: bool = True,
    dense_up_to: int = 0,
) -> list[ResidualJacobian]:
    r"""d f^l(X)_target / d x_source for every layer, from one forward pass of the source and one of the target.

    All other tokens enter only through their keys and values, which are computed once. Where a layer's attention can be
    replaced by its derivative, a product involves only the tokens source and target: about 24 d_model^2 operations, for
    every prompt length and distance.

    Args:
        model: HookedTransformer or TransformerBridge, float32 at least, weights not centred.
        tokens: one prompt; tokens after target are ignored.
        source, target: input and output token, counted from 0, negative from the end; target = source if not given.
        layers: all if not given.
        streams: `residual_streams` of the same tokens; computed if not given. The pass with cached keys and values
            must reproduce them.
        linearise: False computes every product through the attention over the whole context.
        dense_up_to: d_model up to which each layer's matrix is built as soon as the layer has run, which frees its
            graph: memory of one layer's graph instead of all.

    Memory grows with the prompt only by keys and values: those of later layers (2 d_key floats per token and layer),
    and those of the current layer with their gradients. Scores do not grow, as the context is read in pieces.

    Raises:
        InputError: a layer or token that does not exist, source after target, centred weights, fused attention
            kernels, half precision; active dropout, or another thread that measures the model.
        UnsupportedModelError: with cached keys and values the model computes another output than without.
    """
    require("streams", streams, Tensor | None)
    require("dense_up_to", dense_up_to, int)
    session = session_of(model)
    session.require_evaluation()
    model = session.model
    kernel, [ids, *surplus] = session.backend.attention_kernel(), [row for batch in given_ids(tokens) for row in batch]
    if surplus:
        raise InputError(f"tokens of {1 + len(surplus)} prompts: give the token ids [pos] of one")
    check_ids(session, ids)
    n_tokens, target = len(ids), source if target is None else target
    for name, token in (("source", source), ("target", target)):
        require(name, token, int)
        if not -n_tokens <= token < n_tokens:
            raise InputError(f"token {token} of a prompt of {n_tokens} tokens; choose {-n_tokens} to {n_tokens - 1}")
    source, target, layers = source % n_tokens, target % n_tokens, check_indices(layers, model.cfg.n_layers, "layer")
    if source > target:
        raise InputError(f"input token {source} comes after output token {target}; a causal block has no such Jacobian")
    if kernel not in (None, "eager", "sdpa"):
        raise InputError(
            f"attention kernel {kernel!r} has no second derivative; load the model with attn_implementation='eager'"
        )
    tokens = torch.tensor(ids)
    streams = residual_streams(session, tokens) if streams is None else streams
    home, tokens, context = streams.device, tokens.to(model.cfg.device), session.backend.context()
    jacobians: dict[int, ResidualJacobian] = {}
    cut: list[tuple[str, Any]] = []  # hooks of the tokens between, of the source's pass, and of the target's
    at_source: list[tuple[str, Any]] = []
    at_target: list[tuple[str, Any]] = []
    for layer in range(model.cfg.n_layers):
        attention = LinearisedAttention(layer, target + 1)
        ends = [f"blocks.{layer}.hook_resid_{end}" for end in ("pre", "post")]
        inside = linearise and layer in layers

        def enter(x: Tensor, hook: Any, attention: LinearisedAttention = attention) -> Tensor:
            attention.leaf = x.detach().clone().requires_grad_()  # x_source; the graph is cut before the block
            return attention.leaf

        def leave(x: Tensor, hook: Any, layer: int = layer, attention: LinearisedAttention = attention) -> None:
            assert attention.leaf is not None
            # a target that does not see the source does not depend on it
            output = x[0, -1] if x.requires_grad else x[0, -1] + 0 * attention.leaf.sum().to(x.device)
            touched = len({source, target}) if attention.active else target + 1
            jacobians[layer] = ResidualJacobian(layer, source, target, touched, home, attention.leaf, output)
            if model.cfg.d_model <= dense_up_to:
                jacobians[layer].dense()
                attention.leaf = None

        def forget(x: Tensor, hook: Any, layer: int = layer) -> None:
            context.forget(layer)  # keys and values of a layer, as soon as it has used them

        cut.append((ends[0], lambda x, hook: x.detach()))
        at_source += [(ends[0], enter), *(attention.hooks(model.hook_dict, "kv") if inside else [])]
        at_target += attention.hooks(model.hook_dict, "qz" if source == target else "z") if inside else []
        at_target += [*([(ends[1], leave)] if layer in layers else []), (ends[1], forget)]
    with session.exclusive(session.owner):
        _read(context, tokens[:source])
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if source < target:
                with model.hooks(fwd_hooks=at_source):
                    context.extend(tokens[source : source + 1])
                with model.hooks(fwd_hooks=cut):
                    for start, stop in _pieces(target - source - 1, target):
                        context.extend(tokens[source + 1 :][start:stop])
            with model.hooks(fwd_hooks=[*(cut if source < target else at_source), *at_target]):
                context.extend(tokens[target : target + 1])
    for layer, jacobian in jacobians.items():
        expected = streams[layer + 1, target]
        error = (jacobian._output.detach().to(home) - expected).norm() / expected.norm()
        if not error <= 1e-3:
            raise UnsupportedModelError(
                f"layer {layer}: with cached keys and values the block's output differs by {float(error):.1e} of its "
                "norm from the pass over the whole prompt, so the model does not keep its context in keys and values "
                "alone"
            )
    return [jacobians[layer] for layer in layers]


def _pieces(n_tokens: int, n_keys: int | None = None) -> Sequence[tuple[int, int]]:
    """Return (start, stop) of pieces whose scores with all keys need the same memory for every length."""
    return list(row_ranges(n_tokens, n_keys or n_tokens, _SCORES_AT_ONCE))


def _read(context: KeyValueContext, tokens: Tensor) -> None:
    """Fill the context with the keys and values of the tokens, piece by piece."""
    with torch.no_grad():
        for start, stop in _pieces(len(tokens)):
            context.extend(tokens[start:stop])
