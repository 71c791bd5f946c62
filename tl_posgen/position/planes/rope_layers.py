"""Layers with RoPE, which measures of planes need: models without any refused, their arrays as one dataset."""

from collections.abc import Mapping

import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.measure import Measure
from tl_posgen.core.sums import Sums
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import encoding_of
from tl_posgen.rope.rotation import complex_frequencies


def require_rope(self: Measure, model: Model) -> None:
    """Refuse a model none of whose layers rotates, as `Measure.requires`; layers that are not understood are refused
    when they run."""
    encoding = encoding_of(model)
    if encoding and "rotary" not in encoding:
        raise UnsupportedModelError(
            f"no layer of this model has RoPE (its positions: {encoding}), so it has no planes; leave planes, "
            "plane_sufficiency and plane_perturbation out (three_axis and variance work)"
        )


def over_layers(measure: Measure, sums: Sums, found: Mapping[int, Mapping[str, Tensor]]) -> xr.Dataset:
    """Return arrays of layers with RoPE, and the wavelengths of their planes, as one dataset; other layers are NaN.

    Raises:
        UnsupportedModelError: no layer has RoPE.
    """
    if not found:
        raise UnsupportedModelError(
            f"layers {', '.join(map(str, sums.layers))}: none of them has RoPE, so there are no planes; "
            f"choose other layers, or leave {measure.name} out"
        )
    geometries = {layer: sums.layers[layer][0] for layer in found}
    wavelengths = {at: 2 * torch.pi / complex_frequencies(one.rope, one.d_head) for at, one in geometries.items()}
    whole = {layer: {**values, "wavelength": wavelengths[layer]} for layer, values in found.items()}
    return sums.variables_of(whole).reindex(layer=sorted(sums.layers))
