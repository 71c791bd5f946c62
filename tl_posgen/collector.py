"""What measures gather from captured layers: named variables, an array a head, prompt by prompt."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry

KEPT = {"options", "seed", "rows", "_variables"}  # what every collector has


@dataclass(frozen=True)
class Variable:
    """One variable of a measure's dataset; written into it as CF attributes.

    Attributes:
        label: what axes and tables call it (`long_name`).
        unit: such as "nats", "logits", "tokens" (`units`); "" for a pure number.
        description: its formula or meaning, one line.
        dims: its dimensions; (layer, head) makes it a column of `Result.frame()`.
        headline: its column in the per-head table of a report and in summary.json; "" for none.
        short: its heading in the terminal's table, which has room for few letters; a legend says the label.
        interval: whether a collector's number stands with its 95 % interval over prompts, `<name>_low` and
            `<name>_high`, and its mean over everything with `mean_<name>_low` and `_high`. For smooth functions of
            what is summed over prompts, see `tl_posgen.stats.intervals`.
        bounds: the lowest and highest value that it can have, at which its interval is cut: (0, 1) of a share; None
            for none.
    """

    label: str
    unit: str = ""
    description: str = ""
    dims: tuple[str, ...] = ("layer", "head")
    headline: str = ""
    short: str = ""
    interval: bool = False
    bounds: tuple[float, float] | None = None


class Collector:
    """Takes in one layer of one prompt at a time, and says at the end what was found; made anew for every model.

    Attributes:
        options: the measure's options, or None where it has none.
        rows: what `add` took in.
        seed: of draws.
    """

    def __init__(self, options: Any = None, variables: Mapping[str, Variable] | None = None, seed: int = 0):
        self.options, self.seed = options, seed
        self.rows = HeadRows()
        self._variables = variables or {}

    def update(self, layer: LayerCapture) -> None:
        """Take in one layer of one prompt. Called in the order of the layers, prompt after prompt."""
        raise NotImplementedError

    def finish(self, tokens: Tensor, logits: Tensor) -> None:
        """Take in the logits [pos, vocabulary] of a whole prompt; called where the measure needs "logits"."""
        raise NotImplementedError

    def add(self, layer: LayerCapture, **values: Tensor) -> None:
        """Keep per-head values of this layer and prompt: [head] or [head, *dims]."""
        self.rows.add(layer, **values)

    def joined(self, other: Any) -> Any:
        """One that has taken in what both took in, of different prompts: what intervals over prompts are made of.

        A collector that keeps anything besides `rows` overrides it.
        """
        more = sorted(vars(self).keys() - KEPT)
        if more and type(self).joined is Collector.joined:
            raise InputError(
                f"{type(self).__name__} keeps {', '.join(more)} besides rows, so it must override `joined`"
            )
        both = copy(self)
        both.rows = self.rows.joined(other.rows)
        return both

    def dataset(self) -> xr.Dataset:
        """What was found: unless overridden, the mean over prompts of everything that was added."""
        dims = {name: self._variables[name].dims[2:] if name in self._variables else () for name in self.rows.names}
        return xr.Dataset({name: self.rows.array(name, *dims[name]).mean("prompt") for name in self.rows.names})


class MomentsCollector(Collector):
    """One that sums over tokens, layer by layer: memory does not grow with the prompts.

    Attributes:
        longest: tokens of the longest prompt.
        layers: geometry and heads of every layer.
        moments: what `take` summed.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.longest = 0
        self.layers: dict[int, tuple[LayerGeometry, list[int]]] = {}
        self.moments: dict[Any, Any] = {}

    def take(self, layer: LayerCapture, moments: Mapping[Any, Any]) -> None:
        """Add what this layer and prompt has under each key."""
        self.layers[layer.layer] = (layer.geometry, list(layer.heads))
        self.longest = max(self.longest, layer.length)
        self.moments = added(self.moments, moments)

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both.longest, both.layers = max(self.longest, other.longest), self.layers | other.layers
        both.moments = added(self.moments, other.moments)
        return both

    def over_layers(self, found: Iterable[xr.Dataset]) -> xr.Dataset:
        """Datasets of layers as one, over all layers and heads that were asked for: NaN where nothing was found."""
        heads = sorted({head for _, of_layer in self.layers.values() for head in of_layer})
        whole = xr.concat(list(found), "layer", data_vars="all", join="outer")
        return whole.reindex(layer=sorted(self.layers), head=heads)


def added(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """The sums of what both hold under a key, and what only one holds.

    Example:
        >>> added({"a": 1, "b": 2}, {"b": 3})
        {'a': 1, 'b': 5}
    """
    return {**one, **{key: one[key] + value if key in one else value for key, value in other.items()}}


class HeadRows:
    """Per-head arrays gathered layer by layer and prompt by prompt.

    `add(layer, r=[head], a=[head distance], ...)` takes them in; `array(name, *dims)` gives one array
    [prompt, layer, head, *dims], shorter prompts, and heads that a layer was not asked for, filled with NaN.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        self._heads: dict[int, tuple[int, ...]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._rows)

    def add(self, layer: LayerCapture, **values: Tensor) -> None:
        self._heads[layer.layer] = tuple(layer.heads)
        for name, value in values.items():
            rows = self._rows.setdefault(name, {})
            rows[layer.prompt, layer.layer] = value.detach().to("cpu", torch.float64).numpy()

    def joined(self, other: "HeadRows") -> "HeadRows":
        """The rows of both, of different prompts."""
        both = HeadRows()
        both._heads = self._heads | other._heads
        for rows in (self._rows, other._rows):
            for name, values in rows.items():
                both._rows[name] = both._rows.get(name, {}) | values
        return both

    def array(self, name: str, *dims: str) -> xr.DataArray:
        rows = self._rows[name]
        prompts, layers = (sorted({key[axis] for key in rows}) for axis in (0, 1))
        heads = sorted(set().union(*self._heads.values()))
        shape = np.max([row.shape[1:] for row in rows.values()], axis=0).astype(int)
        values = np.full((len(prompts), len(layers), len(heads), *shape), np.nan)
        for (prompt, layer), row in rows.items():
            of_heads = [heads.index(head) for head in self._heads[layer]]
            inside = tuple(slice(n) for n in row.shape[1:])
            values[prompts.index(prompt), layers.index(layer)][(of_heads, *inside)] = row
        coords = {"prompt": prompts, "layer": layers, "head": heads}
        coords |= {dim: np.arange(n) for dim, n in zip(dims, shape, strict=True)}
        return xr.DataArray(values, coords, ("prompt", "layer", "head", *dims))
