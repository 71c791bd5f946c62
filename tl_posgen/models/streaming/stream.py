"""Streaming: forward passes whose attention forms no [query, key] matrix, proved against those that do.

    with tl_posgen.streaming(model):
        model(tokens)                      # and run_with_hooks, run_with_cache, attach, analyze, ...

Every hook goes on firing. A layer whose scores or pattern are hooked forms them, as always, unless all its hooks
edit row by row (`tl_posgen.hooks.RowByRow`); the others do not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit
from tl_posgen.errors import InputError, PosgenError, UnsupportedModelError
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import UNITS, allowed_error, checked_rows
from tl_posgen.models.layers.capture import scores_from
from tl_posgen.models.layers.fused import (
    FAILURES,
    LayerAttention,
    as_mask,
    attend,
    form,
    masked_softmax,
    scale_of,
    score_rows,
)
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.memory import require_pass_fits
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import centred, how_they_differ, rounding_remedy, without_hooks
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session, session_of

LONG = 1024  # tokens: longer prompts are streamed unless told otherwise
BATCH = 8  # prompts of a forward pass, of shorter ones
ROWS = 4  # query rows of every pass whose output is proved, the last among them
# under which TransformerLens computes attention in other steps
_OTHER_STEPS = ("use_attn_result", "use_split_qkv_input", "use_attn_in", "ungroup_grouped_query_attention")


@contextmanager
def streaming(model: Model | Session) -> Iterator[None]:
    """While the block runs, every forward pass of the model computes attention without a [query, key] matrix.

    Attention is torch's fused kernel under a causal mask, and blocks of query rows under anything else: windows,
    padding, soft cap, ALiBi, sinks. Interventions that edit row by row (`tl_posgen.hooks.RowByRow`) edit
    these blocks, unless the pass is captured too. A layer whose hook_attn_scores or hook_pattern has other hooks forms
    its scores, so interventions work as they do without. Gradients flow. The model is as it was afterwards, whatever
    happens.

    It is proved before it is used: the logits of 48 random tokens are those of the model as it is, up to rounding. And
    in every pass: in each layer the output of some rows, the last one always, is what that layer's geometry gives.

    Raises:
        UnsupportedModelError: attention that cannot be replaced, or does something else then; later, in a pass: a layer
            whose output is not what its geometry gives, by how much and where.

    Source: asked for by users of TransformerLens since 2023 (issue 378); the proofs are ours.

    Example:
        >>> import tl_posgen, torch
        >>> model, tokens = tl_posgen.load_model("mini"), torch.arange(40)[None]
        >>> with tl_posgen.streaming(model):
        ...     streamed = model(tokens)
        >>> torch.allclose(streamed, model(tokens), atol=1e-4)
        True
    """
    session = session_of(model)
    streamed = session.streamed
    if streamed.by is not None:
        yield
        return
    if settings := [name for name in _OTHER_STEPS if getattr(session.model.cfg, name, False)]:
        raise UnsupportedModelError(f"attention cannot be streamed: cfg.{settings[0]} is set; unset it")
    stream = _Stream(session)
    if not stream.geometries:
        session.layer(0)  # says why
    if streamed.refusal is None:
        streamed.refusal = _difference(session, stream)
    if streamed.refusal:
        raise UnsupportedModelError(streamed.refusal)
    with stream.at_work():
        yield


@contextmanager
def streaming_by_policy(session: Session, n: int) -> Iterator[None]:
    """Stream passes over n tokens as the session chose; long ones run as they are where that is impossible."""
    choice, needed = session.choices.streaming, session.needs_streaming
    if choice is False and needed:
        raise InputError(
            "this model's scores show only while its attention is streamed (TransformerBridge leaves it to Hugging "
            "Face); leave streaming to be chosen"
        )
    with ExitStack() as stack:
        if choice or needed or (choice is None and n > LONG):
            with nullcontext() if choice or needed else suppress(PosgenError):
                stack.enter_context(streaming(session))
        yield


def require_fits(session: Session, n: int) -> None:
    """Refuse prompts of n tokens that the model does not take, or that no memory holds: their forward pass, or what
    the session chose to measure of it."""
    session.require_length(n)
    if n > LONG:
        with streaming_by_policy(session, n):
            streamed = session.streamed.by is not None
        require_pass_fits(session, n, is_streamed=streamed, matrices=session.choices.matrices)


def prompts_at_once(session: Session, n: int, most: int = BATCH) -> int:
    """Return how many prompts of n tokens share a forward pass: `most`, or one where `require_fits` asks for the memory
    of one, and under hooks of the user's, as they may be written for a single prompt."""
    return 1 if session.choices.one_by_one or n > LONG else most


class _Stream:
    """Replacement of a model's attention, layer by layer.

    Attributes:
        listeners: are given each layer and its `LayerAttention`.
        row_edits: by layer, what edits its scores a block of rows at a time in this pass, in order, in the place of the
            hooks that offered it; forgotten when a pass begins, as a hook may have ended the one before.
    """

    def __init__(self, session: Session):
        self.session = session
        self.geometries = {
            layer: probed.geometry for layer, probed in enumerate(session.layers()) if isinstance(probed, Probed)
        }
        self.listeners: list[Callable[[int, LayerAttention], None]] = []
        self.row_edits: defaultdict[int, dict[Any, None]] = defaultdict(dict)
        self.replaced = ExitStack()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        handle = self.session.embedding.register_forward_pre_hook(lambda *_: self.row_edits.clear())
        try:
            self.begin()
            yield
        finally:
            self.end()
            handle.remove()

    def begin(self) -> None:
        fused = self.session.backend.fused(self.geometries, lambda layer: partial(self.attention, layer))
        self.replaced.enter_context(fused)
        self.session.streamed.by = self

    def end(self) -> None:
        self.session.streamed.by = None
        self.row_edits.clear()
        self.replaced.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, the model is as it is: what probes and proves it needs that."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def is_hooked(self, layer: int) -> bool:
        """Tell whether any hook other than row edits sees or edits the scores or the pattern of a layer, so that these
        are formed."""
        attn = self.session.attention(layer)
        scores, pattern = attn.hook_attn_scores, attn.hook_pattern
        if len(scores._forward_hooks) != len(self.row_edits[layer]) or pattern._forward_hooks:
            return True
        return any(point._forward_pre_hooks or point._backward_hooks for point in (scores, pattern))

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        scale: float | None,
        finish: Any = None,
        sinks: Tensor | None = None,
    ) -> Float[Tensor, "batch head pos d_value"]:
        """Compute one layer's attention, see `tl_posgen.models.layers.fused.Attention`."""
        by, mask, geometry = scale_of(q, scale), as_mask(mask, q, k), self.geometries.get(layer)
        if geometry is not None and by != geometry.scale:  # OPT scales its queries, and not its scores
            q, by = q * (by / geometry.scale), geometry.scale
        attn = self.session.attention(layer)
        formed = form(attn, q, k, v, mask, by, finish, sinks) if self.is_hooked(layer) else {}
        edits = self.row_edits.pop(layer, {})
        if formed:
            done = LayerAttention(q, k, v, mask=mask, sinks=sinks, **formed)
        else:
            queries_and_keys = [(edit.parts["q"], edit.parts["k"]) for edit in edits]  # before RoPE
            of_rows = [edit.of_rows(mask, q.shape[2], k.shape[2]) for edit in edits]
            frozen = next(iter(edits)).frozen(mask) if len(edits) == 1 and q.shape[2] == k.shape[2] else None
            if frozen is None:
                z = attend(q, k, v, by, mask, finish=finish, sinks=sinks, edits=of_rows)
            else:
                of_rows[0].prove_last_row(partial(score_rows, q, k, by, mask, finish))
                beyond = frozen.beyond(geometry, *queries_and_keys[0])
                z = attend(q, k, v, by, frozen.mask(mask), finish=finish, sinks=sinks, beyond=beyond)
            done = LayerAttention(q, k, v, z, mask, sinks)
            if geometry is not None and not edits:
                prove_rows(geometry, done)
        for listener in self.listeners:
            listener(layer, done)
        return done.z


# Proofs


@torch.no_grad()
def prove_rows(geometry: LayerGeometry, done: LayerAttention) -> None:
    """Refuse a pass whose output at some rows is not what the layer's geometry gives of its q, k and v.

    |z_i - sum_j softmax_j(w_ij) v_j| <= (2 max_j d_ij + 2 UNITS eps) max_j |v_j|, d_ij what rounding may do to a score.
    """
    n, n_keys = done.q.shape[2], done.k.shape[2]
    if n != n_keys:
        return  # positions of keys in a cache are its own affair
    rows = checked_rows(n, ROWS).to(done.q.device)
    group = done.q.shape[1] // done.k.shape[1]
    eps = rounding_unit(done.q.dtype, done.q.device)
    for prompt in range(len(done.q)):
        text = None if done.mask.padding is None else done.mask.padding[prompt].to(rows.device)
        checked = rows if text is None else torch.arange(n, device=rows.device)[text][-1:]
        q = done.q[prompt][:, checked].float()
        k, v = (x[prompt].float().repeat_interleave(group, 0) for x in (done.k, done.v))
        scores = scores_from(q, k, geometry, range(len(q)), checked)
        if text is not None:
            scores = scores.masked_fill(~text, -torch.inf)
        expected = masked_softmax(scores, None, done.sinks) @ v
        off = (done.z[prompt][:, checked].float() - expected).abs().amax(-1)
        slack = 2 * allowed_error(q, k, geometry, done.q.dtype).amax(-1) + 2 * UNITS * eps
        wrong = ~(off <= slack * v.abs().amax((1, 2))[:, None])  # also when it is not a number
        if wrong.any():
            head, row = wrong.nonzero()[0].tolist()
            raise UnsupportedModelError(
                f"{head_name(geometry.layer, head)}, query {int(checked[row])} of {n}: its output is not what its "
                f"scores and values give: off by {float(off[head, row]):.2g}, the largest being "
                f"{float(expected[head, row].abs().max()):.2g}. Likely cause: a geometry that changes at some length "
                f"below {n} tokens (windows, scaled queries), or attention that changed after the model was probed; "
                "tl_posgen.check(model) probes it again, and where streaming=False is possible, the pass's own scores "
                "are measured." + rounding_remedy(done.q.dtype)
            )


def _difference(session: Session, stream: _Stream) -> str:
    """Say how streamed logits of a few random tokens differ from the model's own; "" if they do not.

    They are compared by `how_they_differ`.
    """
    model = session.backend.model
    tokens = session.backend.some_tokens()
    counts = {n for geometry in stream.geometries.values() for n in (geometry.n_heads, geometry.n_key_value_heads)}
    if tokens.shape[1] in counts:  # see `fire_normed`
        tokens = tokens[:, 1:]
    options, seen = session.backend.options(tokens), set[int]()
    with torch.no_grad(), without_hooks(model), session.exclusive("streaming"):
        expected = centred(model(tokens, **options))
        stream.listeners.append(lambda layer, _done: seen.add(layer))
        try:
            with stream.at_work():
                actual = centred(model(tokens, **options))
        except FAILURES as error:
            return f"attention of this model cannot be streamed: {first_line(error)}"
        finally:
            stream.listeners.clear()
    if unseen := sorted(set(stream.geometries) - seen):
        return f"layer {unseen[0]}: its architecture computes attention in a way of its own, which cannot be streamed"
    differ = how_they_differ(actual, expected, session.dtype)
    return differ and f"attention of this model cannot be streamed: logits {differ}"
