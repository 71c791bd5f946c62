"""The capture of one layer on one prompt, which every measure is given."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Complex, Float, Int, Real
from torch import Tensor

from tl_posgen.arithmetic import query_ranges
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layers.fused import masked_softmax
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.layers.projections import Projections
from tl_posgen.rope.rotation import rotate_by, turns_at

PER_HEAD = ("q", "k", "v", "attn_scores", "pattern")
PARTS = ("resid", *PER_HEAD)  # that hooks carry
NEEDED = ("v", "attn_scores", "pattern", "resid", "inputs")  # that are None unless a measure needs them
QUERIES_AND_KEYS = ("q", "k", "q_normed", "k_normed", "rot_q", "rot_k")  # hook points that these pass
FORMED = ("attn_scores", "pattern")  # [query, key], which a streamed pass does not form


@dataclass
class LayerCapture:
    """Queries, keys and what else was asked for of one layer's chosen heads on one prompt, float32 at least.

    Attributes:
        geometry: what the layer does with positions.
        heads: indices of this layer's chosen query heads in the model; axis `head` below follows this order.
        prompt: running number of the prompt within this analysis.
        tokens: token ids of the prompt, or None where the forward pass was not given any (embeddings as input).
        q, k: queries and keys BEFORE RoPE and after qk-norm; k is repeated for grouped heads, one row a query head.
            Where scores are replaced with a KV cache (`tl_posgen.hooks.RowByRow`), q holds the last
            tokens only.
        v: values, repeated likewise; None unless needed.
        attn_scores: scaled pre-softmax scores as the model has them, -inf where invisible; with ALiBi in the gauge
            where distance 0 carries no bias (models differ by constants per row, which softmax cannot tell). None
            unless needed.
        pattern: post-softmax; None unless needed.
        resid: the residual stream entering the layer; None unless needed.
        inputs: what enters W_Q and W_K: the residual stream after the attention's norm; None unless needed.
        sinks: logits of the heads that join each row's softmax and carry no value; None of a layer without, and where
            its module does not hold them.
        projections: how q and k are made from `inputs`, for all heads of the layer, proved; None unless `inputs` are
            needed.
    """

    geometry: LayerGeometry
    heads: Sequence[int]
    prompt: int
    tokens: Int[Tensor, " pos"] | None
    q: Float[Tensor, "head query d_head"]
    k: Float[Tensor, "head pos d_head"]
    v: Float[Tensor, "head pos d_value"] | None = None
    attn_scores: Float[Tensor, "head query key"] | None = None
    pattern: Float[Tensor, "head query key"] | None = None
    resid: Float[Tensor, "pos d_model"] | None = None
    inputs: Float[Tensor, "pos d_model"] | None = None
    sinks: Float[Tensor, " head"] | None = None
    projections: Projections | None = None
    edited_pattern: bool = False  # whether a hook made the pattern something else than the softmax of the scores
    finite: bool = False  # whether every score is known to be a finite number
    proved: bool = True  # whether the scores were compared with those that the pass used; a cache may not hold them

    _positions: Real[Tensor, " pos"] | None = field(default=None, repr=False)  # of tokens that stand elsewhere

    _rotated: dict[str, Tensor] = field(init=False, default_factory=dict, repr=False)  # "q" and "k", when asked for
    _shared: dict[tuple[Any, ...], Any] = field(init=False, default_factory=dict, repr=False)

    def shared(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(this capture, *arguments), computed once for all measures that ask for it of this layer and
        prompt."""
        if (key := (function, *arguments)) not in self._shared:
            self._shared[key] = function(self, *arguments)
        return self._shared[key]

    @property
    def layer(self) -> int:
        return self.geometry.layer

    def of_heads(self, part: slice) -> "LayerCapture":
        """Return the capture of some of its heads."""
        held = {name: vars(self).get(name) for name in (*PER_HEAD, "sinks", "used")}
        chosen = copy.copy(self)
        vars(chosen).update({name: x[part] for name, x in held.items() if x is not None}, heads=list(self.heads)[part])
        chosen._rotated, chosen._shared = {name: x[part] for name, x in self._rotated.items()}, {}
        return chosen

    def of_rows(self, start: int, stop: int) -> "LayerCapture":
        """Return q of the queries start .. stop - 1 and k of the keys that the last of them may see, as a step with a
        KV cache has them."""
        n_queries = self.q.shape[1]
        if (start, stop) == (0, n_queries):
            return self
        keys = self.length - n_queries + stop
        rotated = {"q": self.rotated_q[:, start:stop], "k": self.rotated_k[:, :keys]}
        q, k = self.q[:, start:stop], self.k[:, :keys]
        rows = LayerCapture(self.geometry, self.heads, self.prompt, None, q, k, _positions=self.positions[:keys])
        rows.sinks = self.sinks
        rows._rotated = rotated
        return rows

    def with_qk(
        self, q: Float[Tensor, "head query d_head"] | None = None, k: Float[Tensor, "head pos d_head"] | None = None
    ) -> "LayerCapture":
        """Return the capture with other queries or keys before RoPE, from which its scores then follow; it holds
        neither scores nor pattern of the pass.

        Example:
            >>> import tl_posgen
            >>> from tl_posgen.models import run_capture
            >>> layers, tokens = [], torch.arange(5, 25)[None]
            >>> _ = run_capture(tl_posgen.load_model("mini"), tokens, layers.append)
            >>> halved = layers[1].with_qk(k=layers[1].k / 2).scores()
            >>> torch.allclose(halved, layers[1].scores() / 2, atol=1e-5)
            True
        """
        changed = copy.copy(self)
        vars(changed).update(q=self.q if q is None else q, k=self.k if k is None else k, _rotated={}, _shared={})
        changed.finite = changed.proved = False
        for name in (*FORMED, "_in_order"):  # a streamed capture makes scores and pattern of q and k
            vars(changed).pop(name, None)
        return changed

    def at(self, positions: Real[Tensor, " pos"]) -> "LayerCapture":
        """Return the capture with its tokens at other positions, increasing from each to the next: what is rotated, the
        scores, and the keys that are seen follow from the distances between these."""
        moved = copy.copy(self)
        vars(moved).pop("_turns", None)
        moved._rotated, moved._shared, moved._positions = {}, {}, positions.to(self.device)
        return moved

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def bilinear(self) -> bool:
        """Tell whether the scores are scale <R_i q_i, R_j k_j> and nothing else, so that no L x L matrix is needed."""
        return self.geometry.bilinear

    @property
    def positions(self) -> Real[Tensor, " pos"]:
        return self._in_order if self._positions is None else self._positions

    @cached_property
    def _in_order(self) -> Int[Tensor, " pos"]:
        return torch.arange(self.length, device=self.device)

    @property
    def query_positions(self) -> Real[Tensor, " query"]:
        return self.positions[-self.q.shape[1] :]

    @cached_property
    def _turns(self) -> Complex[Tensor, "pos plane"]:
        return turns_at(self.positions, self.geometry.rope)

    @property
    def rotated_q(self) -> Float[Tensor, "head query d_head"]:
        if "q" not in self._rotated:
            self._rotated["q"] = rotate_by(self.q, self._turns[-self.q.shape[1] :], self.geometry.rope)
        return self._rotated["q"]

    @property
    def rotated_k(self) -> Float[Tensor, "head pos d_head"]:
        if "k" not in self._rotated:
            self._rotated["k"] = rotate_by(self.k, self._turns, self.geometry.rope)
        return self._rotated["k"]

    def scores(self, n: int | None = None) -> Float[Tensor, "head query key"]:
        """Return the scores that the pass used among the first n tokens (all if left out), -inf where invisible.

        Recomputed from q and k through the geometry, which every pass proves (`tl_posgen.models.geometry.proof`).
        """
        q, k, at = self.rotated_q[:, :n], self.rotated_k[:, :n], self.positions[:n]
        return scores_from(q, k, self.geometry, self.heads, self.query_positions[:n], at)

    def attention(self, scores: Float[Tensor, "head row key"]) -> Float[Tensor, "head row key"]:
        """Return the attention that these scores give in this layer: their softmax, which its sinks join.

        Raises:
            UnsupportedModelError: sinks that the layer's module does not hold.
        """
        sinks = self.sink_logits()
        return scores.softmax(-1) if sinks is None else masked_softmax(scores, None, sinks)

    def sink_logits(self) -> Float[Tensor, " head"] | None:
        """Return `sinks` for attention that is made anew of scores, None where nothing joins the layer's softmax.

        Raises:
            UnsupportedModelError: sinks that the layer's module does not hold.
        """
        if self.geometry.sinks and self.sinks is None:
            raise UnsupportedModelError(
                f"layer {self.layer}: something of its own joins the softmax, and its logits are not known, so that no "
                "attention can be made of scores"
            )
        return self.sinks if self.geometry.sinks else None

    def query_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of blocks of queries for `pattern_rows`, `attn_score_rows` and `score_rows`, so that no
        [query, key] matrix of all heads is formed."""
        return query_ranges(len(self.heads), self.length, self.device)

    def pattern_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        """Return the pattern of queries start .. stop - 1 over keys before `stop`; a streamed pass forms no more."""
        assert self.pattern is not None, "the pattern was not asked for"
        return self.pattern[:, start:stop, :stop]

    def attn_score_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        """Return `attn_scores` of queries start .. stop - 1 over keys before `stop`; a streamed pass forms no more."""
        assert self.attn_scores is not None, "the scores were not asked for"
        return self.attn_scores[:, start:stop, :stop]

    def score_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        """Return the scores that the pass used of queries start .. stop - 1 over keys before `stop`, -inf where
        invisible."""
        q, k, at = self.rotated_q[:, start:stop], self.rotated_k[:, :stop], self.positions[:stop]
        return scores_from(q, k, self.geometry, self.heads, at[start:stop], at)


class StreamedCapture(LayerCapture):
    """A layer whose pass formed neither scores nor pattern: each is computed when it is asked for, whole or by rows."""

    attn_scores: Any = cached_property(lambda self: self.scores())
    pattern: Any = cached_property(lambda self: self.pattern_rows(0, self.length))

    def __init__(self, capture: LayerCapture, sinks: Float[Tensor, " head"] | None):
        """
        Args:
            sinks: logits of the chosen heads that join each row's softmax and carry no value.
        """
        vars(self).update({**vars(capture), "_shared": {}, "sinks": sinks})
        for name in ("attn_scores", "pattern"):  # the properties stand in for them
            vars(self).pop(name, None)

    def attn_score_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return self.score_rows(start, stop)

    def pattern_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return self.attention(self.score_rows(start, stop))


class EditedCapture(LayerCapture):
    """A layer whose pass used other scores than its queries and keys give: a hook edits them, or its geometry is not
    what was proved before.

    `scores()`, `attn_scores` and `pattern` are those of the pass. What would need q and k is refused.
    """

    why: str
    used: Float[Tensor, "head query key"] | None

    def __init__(self, capture: LayerCapture, used: Float[Tensor, "head query key"] | None, why: str):
        """
        Args:
            used: the pass's scores of the chosen heads, if they are known over the layer's mask.
            why: what differs, and the likely cause.
        """
        vars(self).update({**vars(capture), "_shared": {}, "why": why, "used": used})

    def _refuse(self) -> Any:
        raise UnsupportedModelError(f"{self.why} What follows from queries and keys says nothing of these scores.")

    def with_qk(self, q: Any = None, k: Any = None) -> Any:
        return self._refuse()

    q: Any = property(_refuse)  # the tensors stay in vars(self)
    k: Any = property(_refuse)
    rotated_q: Any = property(_refuse)
    rotated_k: Any = property(_refuse)

    @property
    def bilinear(self) -> bool:
        return False

    @property
    def length(self) -> int:
        return vars(self)["k"].shape[1]

    @property
    def device(self) -> torch.device:
        return vars(self)["k"].device

    def scores(self, n: int | None = None) -> Float[Tensor, "head query key"]:
        if self.used is None:
            raise UnsupportedModelError(f"{self.why} The scores over its causal mask are not known.")
        return self.used[:, :n, :n]

    def score_rows(self, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return self.scores()[:, start:stop, :stop]


def scores_from(
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head pos d_head"],
    geometry: LayerGeometry,
    heads: Sequence[int],
    rows: Real[Tensor, " query"] | None = None,
    keys: Real[Tensor, " pos"] | None = None,
) -> Float[Tensor, "head query pos"]:
    """score_ij = cap(scale <R_i q_i, R_j k_j>) + slope (j - i), -inf where key j is invisible to query i.

    Args:
        rows: the positions of these queries; those of the keys if left out.
        keys: the positions of the keys; 0 .. pos - 1 if left out.
    """
    keys = torch.arange(rotated_k.shape[1], device=rotated_k.device) if keys is None else keys
    away = (keys if rows is None else rows)[:, None] - keys
    scores = geometry.finish(geometry.scale * rotated_q @ rotated_k.mT, away, heads)
    return scores.masked_fill_(~geometry.sees(away), -torch.inf)  # made here
