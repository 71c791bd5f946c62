"""Position interpolation: a long prompt squeezed into the positions that a model was trained on."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.interventions.scores import HookList, at_positions, replace_scores
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture


def interpolate_positions(
    model: Model, factor: int | float, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> HookList:
    """score_ij <- the score with token p at position factor * p: factor = training length / length of the prompt.

    Raises:
        InputError: a factor outside (0, 1].
        UnsupportedModelError: see `replace_scores`; also learned absolute positions.

    Source: Chen et al. 2023 (arXiv 2306.15595), who also fine-tune afterwards; here nothing is trained.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=interpolate_positions(model, 1.0))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    if not 0 < factor <= 1:
        raise InputError(f"interpolation factor {factor} is outside (0, 1]; it is training length / prompt length")

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        positions = factor * capture.positions.double()
        return at_positions(capture, positions, positions)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)
