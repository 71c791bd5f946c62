"""From what a layer's hooks carried to a LayerCapture; padding and KV caches refused."""

from collections.abc import Container, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.probe_layers import Probed
from tl_posgen.models.proof import without_row_offsets
from tl_posgen.models.sites import plain_scores
from tl_posgen.rope.rotation import at_least_float32


def layer_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
) -> LayerCapture:
    """One prompt's parts, each [head, pos, d] or as it should be, made into what measures are handed."""
    geometry = probed.geometry

    def of_heads(x: Tensor) -> Tensor:
        group = geometry.n_heads // len(x)  # 1 where keys are already one per query head
        rows = [head // group for head in heads]
        # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
        return at_least_float32(x if rows == list(range(len(x))) else x[rows])

    capture = LayerCapture(
        geometry,
        heads,
        prompt,
        tokens,
        of_heads(parts["q"]),
        of_heads(parts["k"]),
        v=of_heads(parts["v"]) if "v" in needs else None,
        pattern=of_heads(parts["pattern"]) if "pattern" in needs else None,
        resid=at_least_float32(parts["resid"]) if "resid" in needs else None,
        inputs=at_least_float32(parts["inputs"]) if "inputs" in needs else None,
    )
    if "attn_scores" in needs:
        capture.attn_scores = plain_scores(parts["attn_scores"][list(heads)], parts["q"].dtype)
        if geometry.alibi_slopes is not None:
            capture.attn_scores = without_row_offsets(capture.attn_scores, capture.q, capture.k, geometry.scale)
    return capture


def refuse_padding(probed: Probed, attn_scores: Float[Tensor, "batch query key"]) -> None:
    """Positions must be 0 .. n - 1 and all keys tokens: no KV cache, no padding, no other window than was probed.

    Args:
        attn_scores: of any one head, because masks are alike in all.
    """
    layer, (n_queries, n_keys) = f"layer {probed.geometry.layer}", attn_scores.shape[1:]
    if n_queries != n_keys:
        raise InputError(
            f"{layer}: {n_queries} queries see {n_keys} keys, so a KV cache is in use; "
            "capture a forward pass over the whole prompt instead"
        )
    if (attn_scores.amax(1) == -torch.inf).any():
        raise InputError(
            f"{layer}: some tokens are masked for every query, so the prompt is padded; "
            "run prompts of one length together, or each by itself"
        )
    visible: Bool[Tensor, "batch query key"] = attn_scores != -torch.inf
    if (visible > probed.geometry.visible(n_keys, visible.device)).any():
        raise UnsupportedModelError(
            f"{layer}: queries see keys that the causal mask, or the window that was probed "
            f"(window {probed.geometry.window}), should hide from them"
        )
