"""Making a LayerCapture of what a layer's hooks carried, and proving it."""

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_posgen.arithmetic import summable
from tl_posgen.models.backends.sites import FORMED, plain_scores
from tl_posgen.models.geometry.pass_proof import verify_capture
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import without_row_offsets
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rope.rotation import at_least_float32


def layer_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
    span: slice = slice(None),
) -> LayerCapture:
    """Make a LayerCapture of one prompt's parts, each [head, pos, d] as `Sites.read` gives it, cut to its text.

    Its tensors lie where sums can be formed in float64, see `tl_posgen.arithmetic`.
    """
    geometry, parts = probed.geometry, {part: cut(part, value, span) for part, value in parts.items()}
    of_heads = partial(chosen_heads, heads, geometry.n_heads)
    capture = LayerCapture(
        geometry,
        heads,
        prompt,
        None if tokens is None else summable(tokens[span]),
        of_heads(parts["q"]),
        of_heads(parts["k"]),
        v=of_heads(parts["v"]) if "v" in needs else None,
        pattern=of_heads(parts["pattern"]) if "pattern" in needs else None,
        resid=at_least_float32(summable(parts["resid"])) if "resid" in needs else None,
        inputs=at_least_float32(summable(parts["inputs"])) if "inputs" in needs else None,
    )
    if "attn_scores" in needs:
        plain = plain_scores(summable(parts["attn_scores"][list(heads)]), parts["q"].dtype)
        capture.attn_scores = without_row_offsets(plain, capture.q, capture.k, geometry)
    return capture


def proved_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
    span: slice,
    **compared: Any,
) -> LayerCapture:
    """Make a `layer_capture`, held against the scores and the pattern among its parts as `compared` says to
    `verify_capture`."""
    capture = layer_capture(probed, parts, heads, needs, prompt, tokens, span)
    used, pattern = (cut(part, parts[part], span) if part in parts else None for part in FORMED)
    return verify_capture(capture, used, pattern, parts["q"].dtype, **compared)


def chosen_heads(heads: Sequence[int], n_heads: int, x: Tensor) -> Tensor:
    """Return the rows of some of `n_heads` query heads, in float32 at least, where sums can be formed."""
    group = n_heads // len(x)  # 1 where keys are already one per query head
    rows = [head // group for head in heads]
    # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
    return at_least_float32(summable(x if rows == list(range(len(x))) else x[rows]))


def cut(part: str, value: Tensor, span: slice) -> Tensor:
    """Return a part of one prompt without its padding."""
    if span == slice(None) or span == slice(0, value.shape[-2]):
        return value
    return value[..., span, span] if part in FORMED else value[..., span, :]
