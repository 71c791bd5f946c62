"""What analyzers share: rows gathered over layers and prompts, laid out as labelled arrays."""

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.models.capture import LayerCapture


class HeadRows:
    """Per-head arrays gathered layer by layer and prompt by prompt.

    `add(capture, r=[head], a=[head distance], ...)` takes them in; `array(name, *dims)` gives one array
    [prompt, layer, head, *dims], shorter prompts padded with NaN.
    """

    def __init__(self):
        self._rows: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        self._heads: tuple[int, ...] = ()

    def add(self, capture: LayerCapture, **values: Tensor) -> None:
        self._heads = tuple(capture.heads)
        for name, value in values.items():
            rows = self._rows.setdefault(name, {})
            rows[capture.prompt, capture.layer] = value.detach().to("cpu", torch.float64).numpy()

    def array(self, name: str, *dims: str) -> xr.DataArray:
        rows = self._rows[name]
        prompts, layers = (sorted({key[axis] for key in rows}) for axis in (0, 1))
        shape = np.max([row.shape for row in rows.values()], axis=0)
        values = np.full((len(prompts), len(layers), *shape), np.nan)
        for (prompt, layer), row in rows.items():
            place = (prompts.index(prompt), layers.index(layer), *(slice(n) for n in row.shape))
            values[place] = row
        coords = {"prompt": prompts, "layer": layers, "head": list(self._heads)}
        coords |= {dim: np.arange(n) for dim, n in zip(dims, shape[1:], strict=True)}
        return xr.DataArray(values, coords, ("prompt", "layer", "head", *dims))
