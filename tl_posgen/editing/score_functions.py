"""Scores of a layer as functions of its q, k and geometry: what may stand in the place of the model's own scores."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.fused import Beyond, Mask
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.scores_at import limit_of_planes, rotated_beyond, scores_at_positions, scores_frozen_beyond

ScoresOf = Callable[[LayerCapture], Float[Tensor, "head query key"] | Bool[Tensor, "head query key"]]


@dataclass(frozen=True)
class RowByRow:
    """Function whose scores w_ij depend only on query i and on the keys up to i.

    Such a function also works with a KV cache under `replace_scores`: it gets a capture whose `q` holds the last tokens
    only, at `capture.query_positions`, and whose `k` holds all tokens. Under `tl_posgen.streaming` no [query, key]
    matrix is formed for it: it is called for one block of consecutive queries after the other, with the keys up to the
    last of these (for the whole prompt where the pass is also captured).

    Attributes:
        with_own: whether scores_of also gets the scores of the pass, those that it replaces, as a second argument.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.hooks import replace_scores
        >>> model, prompt = load_model("mini"), torch.arange(9)[None]
        >>> hooks = replace_scores(model, RowByRow(lambda capture: 0.5 * capture.scores()))
        >>> with model.hooks(fwd_hooks=hooks):
        ...     written = [
        ...         model.generate(prompt, max_new_tokens=4, do_sample=False, verbose=False, use_past_kv_cache=cached)
        ...         for cached in (True, False)
        ...     ]
        >>> torch.equal(*written)
        True
    """

    scores_of: Callable[..., Float[Tensor, "head query key"] | Bool[Tensor, "head query key"]]
    with_own: bool = False

    def __call__(
        self, capture: LayerCapture, own_scores: Float[Tensor, "head query key"] | None = None
    ) -> Float[Tensor, "head query key"] | Bool[Tensor, "head query key"]:
        return self.scores_of(capture, own_scores) if self.with_own else self.scores_of(capture)


def _scores_of_tokens_at(capture: LayerCapture) -> Float[Tensor, "head query key"]:
    """Return the scores that the layer itself gives, wherever its tokens stand."""
    return capture.scores()


OWN_SCORES = RowByRow(_scores_of_tokens_at)


@dataclass(frozen=True)
class FrozenBeyond:
    """score_ij = cap(scale Re sum_m z^q_im conj(z^k_jm) e^{i theta_m min(i - j, limit_m)}), for `RowByRow`: planes of
    RoPE that turn up to a limit. ALiBi, added behind the cap, grows up to it where there is one limit for all planes.

    Where it edits all heads of a layer, and nothing else does, a streamed pass takes near pairs from the model's own q
    and k, far ones from others, and forms each score once.

    Attributes:
        limit_of: from a layer's geometry to the distance beyond which no plane turns (nor ALiBi grows), or to one a
            plane, inf where it turns on.
        sees: from positions of queries [query, 1] and of keys to what is attended; all keys if left out.
    """

    limit_of: Callable[[LayerGeometry], int | float | Float[Tensor, " plane"]]
    sees: Callable[[Tensor, Tensor], Bool[Tensor, "query key"]] | None = None

    def __call__(self, capture: LayerCapture) -> Float[Tensor, "head query key"]:
        geometry, queries, keys = capture.geometry, capture.query_positions, capture.positions
        limit, away = self.limit_of(geometry), queries[:, None] - keys
        products = scores_frozen_beyond(capture.q, capture.k, geometry.rope, geometry.scale, limit, queries, keys)
        away = away if isinstance(limit, Tensor) else away.clamp(max=min(limit, 2**53))  # more is no int64
        scores = finished(products, capture, away)
        return scores if self.sees is None else scores.masked_fill(~self.sees(queries[:, None], keys), -torch.inf)

    def beyond(
        self, geometry: LayerGeometry, q: Float[Tensor, "batch head pos d"], k: Float[Tensor, "batch key_head pos d"]
    ) -> list[Beyond]:
        """Return the queries and keys of far pairs, given those before RoPE."""
        rope, n = geometry.rope, q.shape[2]
        limits, positions = limit_of_planes(self.limit_of(geometry), rope), torch.arange(n, device=q.device)
        return [
            Beyond(limit, *(x.to(q) for x in rotated_beyond(q, k, rope, limits, limit, positions, positions)))
            for limit in limits.unique().tolist()
            if limit < n - 1
        ]

    def mask(self, mask: Mask) -> Mask:
        """Return those keys of a mask that are attended."""
        if (sees := self.sees) is None:
            return mask

        def rows(start: int, stop: int) -> Bool[Tensor, "#batch 1 row key"]:
            seen = mask.rows(start, stop)
            positions = torch.arange(seen.shape[-1], device=seen.device)
            return seen & sees(positions[start:stop, None], positions)

        return Mask(rows, padding=mask.padding)


def finished(
    products: Float[Tensor, "head query key"],
    capture: LayerCapture,
    distance: int | float | Real[Tensor, "query key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """cap(products_ij) - slope d_ij, d_ij = i - j if left out; see `LayerGeometry.finish`."""
    if capture.geometry.bilinear:
        return products
    away = capture.query_positions[:, None] - capture.positions if distance is None else distance
    return capture.geometry.finish(products, away, capture.heads)


def scores_with(
    capture: LayerCapture,
    q: Float[Tensor, "head query d_head"] | None = None,
    k: Float[Tensor, "head pos d_head"] | None = None,
) -> Float[Tensor, "head query key"]:
    """cap(scale <R_i q_i, R_j k_j>) - slope d_ij: the layer's scores with other queries or keys before RoPE."""
    rope = capture.geometry.rope
    rotated_q = capture.rotated_q if q is None else rotate(q, capture.query_positions, rope)
    rotated_k = capture.rotated_k if k is None else rotate(k, capture.positions, rope)
    return finished(capture.geometry.scale * rotated_q @ rotated_k.mT, capture)


def at_positions(
    capture: LayerCapture, query_positions: Real[Tensor, " query"], key_positions: Real[Tensor, " key"]
) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with query i at query_positions[i] and key j at key_positions[j]."""
    geometry = capture.geometry
    query_positions, key_positions = (p.to(capture.q.device) for p in (query_positions, key_positions))
    products = scores_at_positions(capture.q, capture.k, geometry.rope, geometry.scale, query_positions, key_positions)
    return finished(products, capture, query_positions[:, None] - key_positions)
