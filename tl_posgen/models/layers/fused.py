"""Attention without a [query, key] matrix: torch's fused kernel where it can, else blocks of query rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tl_posgen.arithmetic import elements_at_once, row_ranges
from tl_posgen.errors import PosgenError
from tl_posgen.models.layers.geometry import LayerGeometry, in_window
from tl_posgen.rope.rotation import at_least_float32

FAILURES = (PosgenError, RuntimeError, TypeError, AttributeError, ValueError, IndexError)  # of attention so replaced
SCORES_AT_ONCE = 2**21  # entries of a block of rows, all heads of a batch together

Rows: TypeAlias = Callable[[int, int], Bool[Tensor, "#batch 1 row key"]]
Finish: TypeAlias = Callable[[Float[Tensor, "batch head row key"], Int[Tensor, "row key"]], Tensor]
# (scores, stop) -> scores of some consecutive queries, the last of which has its own key at stop - 1
RowEdit: TypeAlias = Callable[[Float[Tensor, "batch head row key"], int], Tensor]
# (q, k, v, mask, scale, finish=None, sinks=None) -> z, in the place of one layer's attention; q, k rotated, mask is a
# `Mask` or what transformers hands over
Attention: TypeAlias = Callable[..., Float[Tensor, "batch head pos d_value"]]


@dataclass(frozen=True)
class Mask:
    """Keys that every query sees: `rows(start, stop)` gives them for some queries.

    Attributes:
        causal: whether that is every key up to their own, and nothing else.
        padding: True for text; None where all of the batch is text, or keys of earlier passes stand before it.
    """

    rows: Rows
    causal: bool = False
    padding: Bool[Tensor, "batch pos"] | None = None

    def to(self, *_: Any, **__: Any) -> "Mask":
        """Return the mask itself: bridges move what they take for a tensor."""
        return self

    def __getitem__(self, index: Any) -> "Mask":
        """Return the mask itself: Gemma 4 takes the last rows of a mask, all of them where all logits are wanted."""
        if any(axis_index not in (slice(None), slice(0, None)) for axis_index in index):
            raise IndexError("a part of a mask is not streamed")
        return self

    @classmethod
    def of_window(
        cls,
        n: int,
        window: int | None = None,
        padding: Bool[Tensor, "batch pos"] | None = None,
        *,
        before: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Mask":
        """Return the causal mask of n queries, or the `window` last keys of it, without keys that are padding.

        Args:
            before: how many keys stand before the first query.

        Example:
            >>> Mask.of_window(3, window=2).rows(1, 3)[0, 0].int().tolist()
            [[1, 1, 0], [0, 1, 1]]
        """
        keys = torch.arange(before + n, device=device)

        def rows(start: int, stop: int) -> Bool[Tensor, "#batch 1 row key"]:
            seen = in_window(keys[before + start : before + stop, None] - keys, window)
            return seen[None, None] if padding is None else seen & padding[:, None, None]

        return cls(rows, window is None and padding is None and before == 0, padding)


@dataclass(frozen=True)
class Beyond:
    """Queries and keys, rotated, that stand in for those of a layer in pairs more than `limit` tokens apart."""

    limit: int | float
    q: Float[Tensor, "batch head pos d_head"]
    k: Float[Tensor, "batch key_head key d_head"]


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention as a forward pass computed it.

    Attributes:
        q, k: rotated.
        z: sum_j pattern_ij v_j.
        sinks: logits that join each row's softmax and carry no value, or None.
        scores, pattern: as hooks left them, where hooks had them formed; else None.
    """

    q: Float[Tensor, "batch head pos d_head"]
    k: Float[Tensor, "batch key_head key d_head"]
    v: Float[Tensor, "batch key_head key d_value"]
    z: Float[Tensor, "batch head pos d_value"]
    mask: Mask
    sinks: Float[Tensor, " head"] | None = None
    scores: Float[Tensor, "batch head pos key"] | None = None
    pattern: Float[Tensor, "batch head pos key"] | None = None


def attend(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch key_head key d_head"],
    v: Float[Tensor, "batch key_head key d_value"],
    scale: float,
    mask: Mask,
    finish: Finish | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    edits: Sequence[RowEdit] = (),
    beyond: Sequence[Beyond] = (),
) -> Float[Tensor, "batch head pos d_value"]:
    """z_i = sum_j softmax_j(finish(scale <q_i, k_j>)) v_j over the keys j that query i sees; 0 where it sees none.

    Memory is linear in the number of tokens: blocks of rows have as many scores as `elements_at_once`, or one row.

    Args:
        q, k: after RoPE; a head of k and v serves as many consecutive heads of q as there are.
        finish: what becomes of a block of scores, given the distance of each pair: soft cap, ALiBi.
        sinks: logits that join each row's softmax and carry no value.
        edits: what then becomes of a block of scores, -inf where a key is not seen.
        beyond: other q and k for pairs further apart than a limit, and not than the next one's; by rising limits.

    Example:
        >>> q = k = torch.zeros(1, 1, 3, 2)
        >>> v = torch.tensor([0.0, 1.0, 2.0])[None, None, :, None]
        >>> attend(q, k, v, 1.0, Mask.of_window(3)).flatten().tolist()
        [0.0, 0.5, 1.0]
    """
    group, before = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]  # keys of earlier passes
    plain = finish is None and sinks is None and not edits and not beyond
    if mask.causal and plain and q.shape[-1] == v.shape[-1]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
    blocks, row = [], q.shape[0] * q.shape[1] * k.shape[2]
    for start, stop in row_ranges(q.shape[2], row, elements_at_once(q.device, SCORES_AT_ONCE)):
        seen = mask.rows(start, stop).to(q.device)
        keys = slice(int(seen.flatten(0, 2).any(0).int().argmax()), before + stop)  # from the first that is seen on
        scores, seen = _block_of_scores(q, k, scale, start, keys, finish, beyond), seen[..., keys]
        for edit in edits:
            scores = edit(scores.masked_fill(~seen, -torch.inf), keys.stop)
        if mask.causal and sinks is None and not edits:  # every query of the block sees all keys before the block
            scores[..., start:] = scores[..., start:].masked_fill(~seen[..., start:], -torch.inf)
            pattern = at_least_float32(scores).softmax(-1)
        else:
            pattern = masked_softmax(scores, seen, sinks)
        blocks.append(_per_key_head(pattern.to(v.dtype), group, v[:, :, keys]))
    return torch.cat(blocks, 2)


def score_rows(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch key_head pos d_head"],
    scale: float,
    mask: Mask,
    finish: Finish | None,
    start: int,
    stop: int,
) -> Float[Tensor, "batch head row key"]:
    """finish(scale <q_i, k_j>) of the queries start .. stop - 1 and the keys before `stop`, -inf where not seen."""
    scores = _block_of_scores(q, k, scale, start, slice(0, stop), finish)
    return scores.masked_fill(~mask.rows(start, stop).to(q.device)[..., :stop], -torch.inf)


def _block_of_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    start: int,
    keys: slice,
    finish: Finish | None,
    beyond: Sequence[Beyond] = (),
) -> Float[Tensor, "batch head row key"]:
    """finish(scale <q_i, k_j>) of the queries from `start` on that see the last of these keys, and of these keys."""
    position = torch.arange(k.shape[2], device=q.device)
    before = k.shape[2] - q.shape[2]
    rows, away = slice(start, keys.stop - before), position[before + start : keys.stop, None] - position[keys]

    def products(q: Tensor, k: Tensor, first: int, last: int) -> Tensor:
        return _per_key_head(q[:, :, rows] * scale, q.shape[1] // k.shape[1], k[:, :, first:last].mT)

    # the first key that has some of the queries no further away than each limit
    firsts = [min(max(keys.start, math.ceil(before + start - part.limit)), keys.stop) for part in beyond]
    near, *firsts = [*firsts, keys.start]
    scores = pad(products(q, k, near, keys.stop), (near - keys.start, 0))
    for part, first in zip(beyond, firsts, strict=True):
        last = math.ceil(keys.stop - 1 - part.limit)  # the first key that has none of them further away
        if first < last:
            place = slice(first - keys.start, last - keys.start)
            far = products(part.q, part.k, first, last)
            scores[..., place] = torch.where(away[:, place] > part.limit, far, scores[..., place])
    return scores if finish is None else finish(scores, away)


def form(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, finish: Any = None, sinks: Any = None
) -> dict[str, Tensor]:
    """Compute z by way of scores and pattern, each as its hooks leave it; arguments as in `Attention`."""
    scores = _block_of_scores(q, k, scale_of(q, scale), 0, slice(0, k.shape[2]), finish)
    seen = as_mask(mask, q, k).rows(0, q.shape[2]).to(q.device)
    hidden = float(getattr(attn, "IGNORE", torch.finfo(scores.dtype).min))  # -inf in a HookedTransformer
    scores = attn.hook_attn_scores(scores.masked_fill(~seen, hidden))
    pattern = attn.hook_pattern(masked_softmax(scores, None, sinks).to(v.dtype))
    return {"z": _per_key_head(pattern, q.shape[1] // k.shape[1], v), "scores": scores, "pattern": pattern}


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the scale, 1 / sqrt(d_head) where an architecture gives none."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def as_mask(mask: Any, q: Tensor, k: Tensor) -> Mask:
    """Return the `Mask` of what transformers hands over: nothing, a `Mask`, or a tensor of the architecture's own."""
    if isinstance(mask, Mask):
        return mask
    n, n_keys = q.shape[2], k.shape[2]
    if mask is None:
        return Mask.of_window(n, before=n_keys - n, device=q.device)
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    padding = None if n < n_keys else seen[:, 0, :, :n].any(1).expand(len(q), -1)  # what no query sees is none of text
    unpadded = padding is None or bool(padding.all())
    return Mask(lambda start, stop: seen[:, :, start:stop, :n_keys], padding=None if unpadded else padding)


def finish_of(geometry: LayerGeometry) -> Finish | None:
    """Return what makes a layer's scores of scale <q, k>; None where these are its scores."""
    return None if geometry.bilinear else geometry.finish


def masked_softmax(
    scores: Tensor, seen: Tensor | None, sinks: Tensor | None = None
) -> Float[Tensor, "*batch head row key"]:
    """Softmax over the keys that are seen (None: all), in float32 at least; 0 in rows that see none."""
    scores = at_least_float32(scores)
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).nan_to_num(0)
    with_sink = pad(scores, (0, 1))
    with_sink[..., -1] = sinks.to(scores)[:, None]
    return with_sink.softmax(-1)[..., :-1]


def _per_key_head(x: Tensor, group: int, y: Tensor) -> Tensor:
    """x @ y with a head of y for each `group` consecutive heads of x, none of them copied."""
    return x @ y if group == 1 else (x.unflatten(1, (-1, group)) @ y[:, :, None]).flatten(1, 2)
