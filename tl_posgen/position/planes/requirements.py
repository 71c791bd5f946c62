"""What the measures of RoPE's planes need: layers that rotate, and distances that memory holds."""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from tl_posgen.core.options import Within
from tl_posgen.core.sums import Sums
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import encoding_of
from tl_posgen.position.decomposition.numbers.option_checks import MOST_DISTANCES

Distances = Annotated[int, Within(1, MOST_DISTANCES, f"a whole number, 1 to {MOST_DISTANCES}")]


def require_rope(model: Model) -> None:
    """Refuse a model none of whose layers rotates; one whose layers are not understood is refused when it runs."""
    encoding = encoding_of(model)
    if encoding and "rotary" not in encoding:
        raise UnsupportedModelError(
            f"no layer of this model has RoPE (its positions: {encoding}), so it has no planes; leave planes, "
            "plane_sufficiency, plane_interaction, plane_perturbation and any_distance out "
            "(three_axis and variance work)"
        )


def require_planes(measure: str, sums: Sums, name: str) -> None:
    """Refuse layers none of which rotates, so that there are no sums of this name."""
    if name not in sums:
        raise UnsupportedModelError(
            f"layers {', '.join(map(str, sums.layers))}: none of them has RoPE, so there are no planes; "
            f"choose other layers, or leave {measure} out"
        )


def as_array(x: Tensor) -> np.ndarray:
    """Return an array of numbers; of a mask 0 and 1, so that NaN can stand for a layer without planes."""
    return x.detach().to("cpu", torch.float64).numpy()
