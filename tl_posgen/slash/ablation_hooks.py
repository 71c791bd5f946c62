"""Hooks that drop, freeze or keep frequency bands of RoPE in a running model."""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, RowByRow, replace_scores
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import session_of
from tl_posgen.rope.frequency_bands import Band, band_of
from tl_posgen.slash.numbers.ablations import OF_THE_PROMPT, Ablation, ablate


def ablate_bands(
    model: Model, kind: Ablation | str, band: Band | None = None, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- scale <q'_i, k'_j> with q' and k' rotated after an ablation; see `slash.ablations.ablate`.

    Args:
        kind: "drop", "freeze" or "keep" a band; "rank_one", "no_rope", "means", "means_no_rope"; "none".
        band: boolean per plane (`tl_posgen.rope.frequency_bands.bands_by_thirds`) or plane numbers, for the first
            three; or a function from a layer's `Rope` to one, where layers have frequencies of their own (Gemma 3).
            "drop", "freeze", "keep", "no_rope" and "none" work with a KV cache too.
        layers, heads: chosen layers and heads; all if left out. Heads are indices, (layer, head) pairs or a frame with
            these columns.

    Raises:
        InputError: an unknown kind, no model, no band for a kind that needs one, a band that is none of the above or
            does not fit the planes of a chosen layer.
        UnsupportedModelError: see `replace_scores`.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=ablate_bands(model, "none"))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    session_of(model)
    for geometry in geometry_of(model, list(select_heads(model, layers, heads))):
        vectors = torch.ones(1, 2, geometry.d_head)
        try:
            ablate(vectors, vectors, geometry.rope, kind, band_of(band, geometry.rope))
        except InputError as error:
            raise InputError(f"layer {geometry.layer}: {error}") from error

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        rope = capture.geometry.rope
        q, k = ablate(capture.q, capture.k, rope, kind, band_of(band, rope))
        return scores_from(q, k, capture.geometry, capture.heads, capture.query_positions)

    return replace_scores(model, scores_of if kind in OF_THE_PROMPT else RowByRow(scores_of), layers, heads)
