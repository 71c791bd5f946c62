"""Sums over prompts of what a measure computed layer by layer, of all and of all but one group of them: memory does not
grow with the number of prompts."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.core.measure import LABELS, Measure, Variable, with_token_variants
from tl_posgen.core.numbers import ALL
from tl_posgen.stats.intervals import FEWEST, prompts_per_group


@dataclass
class Total:
    """Sum over prompts, and number of prompts with a value, at each place; padded to the longest prompt."""

    sums_and_counts: Float[np.ndarray, "2 *place"]

    @classmethod
    def from_values(cls, values: Float[np.ndarray, "*place"]) -> "Total":
        defined = ~np.isnan(values)
        return cls(np.stack([np.where(defined, values, 0.0), defined]))

    def __add__(self, other: "Total") -> "Total":
        first, second = self.sums_and_counts, other.sums_and_counts
        if first.shape != second.shape:
            shape = np.maximum(first.shape, second.shape)
            first, second = (np.pad(x, np.array([0 * shape, shape - x.shape]).T) for x in (first, second))
        return Total(first + second)

    @property
    def sum(self) -> Float[np.ndarray, "*place"]:
        """NaN where no prompt has a value."""
        return np.where(self.sums_and_counts[1] > 0, self.sums_and_counts[0], np.nan)

    @property
    def mean(self) -> Float[np.ndarray, "*place"]:
        """NaN where no prompt has a value."""
        return np.where(
            self.sums_and_counts[1] > 0, self.sums_and_counts[0] / np.maximum(self.sums_and_counts[1], 1), np.nan
        )


@dataclass
class ByPrompt:
    """The values of every prompt, kept as they are."""

    of_prompt: dict[int, Float[np.ndarray, "*place"]]

    def __add__(self, other: "ByPrompt") -> "ByPrompt":
        return ByPrompt(self.of_prompt | other.of_prompt)


@dataclass
class OfFirstPrompt:
    """A value that only the first prompt gives, such as an example: one + other = one."""

    value: Any

    def __add__(self, other: "OfFirstPrompt") -> "OfFirstPrompt":
        return self


class Sums:
    """Values by name and layer, added up over prompts; `one + other` adds those of two groups of prompts.

    Tensors add up to means, or are kept prompt by prompt where their variable has the dim "prompt"; other objects are
    added by their own `+`. Values without a layer (of logits) stand under layer -1.

    Args:
        variables: of the measure; the axes of a tensor are its variable's dims, "layer" and "prompt" left out.
        labels: of these dims.
        seed: of draws that the measure makes when it finishes.

    Attributes:
        layers: geometry and heads of every layer.
        lengths: tokens of every prompt.
    """

    def __init__(
        self, variables: Mapping[str, Variable], labels: Mapping[str, Sequence[Any]] | None = None, seed: int = 0
    ):
        self.seed = seed
        self.dims = {name: variable.dims for name, variable in variables.items()}
        self.labels = {**LABELS, **(labels or {})}
        self.layers: dict[int, tuple[Any, list[int]]] = {}
        self.lengths: dict[int, int] = {}
        self._sums: dict[tuple[str, int], Any] = {}

    def add_layer(self, layer: Any, values: Mapping[str, Any]) -> None:
        """Add the values of one layer of one prompt."""
        self.layers[layer.layer] = (layer.geometry, list(layer.heads))
        self.add(layer.prompt, layer.length, values, layer.layer)

    def add(self, prompt: int, length: int, values: Mapping[str, Any], layer: int = -1) -> None:
        """Add values of one prompt."""
        self.lengths[prompt] = length
        for name, value in values.items():
            place = name, layer
            if isinstance(value, Tensor):
                array = value.detach().to("cpu", DOUBLE).numpy()
                is_row = "prompt" in self.dims.get(name, ())
                value = ByPrompt({prompt: array}) if is_row else Total.from_values(array)
            self._sums[place] = self._sums[place] + value if place in self._sums else value

    def __add__(self, other: "Sums") -> "Sums":
        sums = Sums({}, seed=self.seed)
        sums.dims, sums.labels = self.dims, self.labels
        sums.layers = self.layers | other.layers
        sums.lengths = self.lengths | other.lengths
        sums._sums = dict(self._sums)
        for place, value in other._sums.items():
            sums._sums[place] = sums._sums[place] + value if place in sums._sums else value
        return sums

    def without_rows(self) -> "Sums":
        """Return the sums without what is kept prompt by prompt, which has no value of a group of prompts."""
        fewer = copy(self)
        fewer._sums = {place: value for place, value in self._sums.items() if not isinstance(value, ByPrompt)}
        return fewer

    def __contains__(self, name: str) -> bool:
        return any(stored == name for stored, _ in self._sums)

    # Datasets

    def by_layer(self, name: str) -> dict[int, Any]:
        """Return the sum of each layer."""
        return {
            layer: value for (stored, layer), value in sorted(self._sums.items(), key=lambda x: x[0]) if stored == name
        }

    def means(self) -> xr.Dataset:
        """Return the means over prompts of all arrays that are variables, and the rows of those kept by prompt."""
        arrays = {name for (name, _), value in self._sums.items() if isinstance(value, Total | ByPrompt)}
        return xr.Dataset({name: self.mean(name) for name in self.dims if name in arrays})

    def mean(self, name: str, dims: tuple[str, ...] = ()) -> xr.DataArray:
        """Return the mean over prompts (or its rows, where it is kept by prompt), NaN where no prompt has a value.

        Args:
            dims: of the array, "layer" included, where the measure declares no variable of this name.
        """
        sums = self.by_layer(name).items()
        if not any(isinstance(value, ByPrompt) for _, value in sums):
            return self.over_layers(name, {layer: value.mean for layer, value in sums}, dims)
        prompts, dims = sorted(self.lengths), dims or self.dims[name]
        without = tuple(dim for dim in dims if dim != "prompt")
        rows = [self.over_layers(name, {layer: value.of_prompt[n] for layer, value in sums}, without) for n in prompts]
        return xr.concat(rows, "prompt", join="outer").assign_coords(prompt=prompts).transpose(*dims)

    def sum(self, name: str, dims: tuple[str, ...] = ()) -> xr.DataArray:
        """Return the sum over prompts; NaN where no prompt has a value."""
        return self.over_layers(name, {layer: value.sum for layer, value in self.by_layer(name).items()}, dims)

    def over_layers(self, name: str, arrays: Mapping[int, np.ndarray], dims: tuple[str, ...] = ()) -> xr.DataArray:
        """Return arrays of layers as one over all layers and heads, NaN where a layer lacks a head or a place."""
        dims = dims or self.dims[name]
        inner = [dim for dim in dims if dim != "layer"]
        heads = sorted({head for _, of_layer in self.layers.values() for head in of_layer})
        shape = [max(array.shape[axis] for array in arrays.values()) for axis in range(len(inner))]
        if "head" in inner:
            shape[inner.index("head")] = len(heads)
        joined = np.full((len(arrays), *shape), np.nan)
        for row, (layer, values) in enumerate(arrays.items()):
            places = [np.arange(n) for n in values.shape]
            if "head" in inner:
                places[inner.index("head")] = np.array([heads.index(head) for head in self.layers[layer][1]])
            joined[(row, *np.ix_(*places))] = values
        labels = {**self.labels, "head": heads}
        coords = {dim: np.asarray(labels.get(dim, np.arange(n))) for dim, n in zip(inner, shape, strict=True)}
        if "layer" not in dims:
            return xr.DataArray(joined[0], coords, tuple(inner)).transpose(*dims)
        return xr.DataArray(joined, {"layer": list(arrays), **coords}, ("layer", *inner)).transpose(*dims)

    def variables_of(self, by_layer: Mapping[int, Any], dims: tuple[str, ...] = ()) -> xr.Dataset:
        """Return the variables among tensors by layer and name as one dataset, see `over_layers`.

        Args:
            by_layer: by layer, what `Measure.of_layer` may return.
            dims: of all of them, "layer" included, where these are not those that the measure declares.
        """
        by_name = {layer: with_token_variants(values) for layer, values in by_layer.items()}
        by_variable = {
            name: {layer: values[name] for layer, values in by_name.items() if name in values} for name in self.dims
        }
        arrays = {
            name: {layer: tensor.detach().to("cpu", DOUBLE).numpy() for layer, tensor in tensors.items()}
            for name, tensors in by_variable.items()
            if tensors
        }
        return xr.Dataset({name: self.over_layers(name, values, dims) for name, values in arrays.items()})

    def join_layers(self, datasets: Iterable[xr.Dataset]) -> xr.Dataset:
        """Return datasets of layers, each with the coordinate `layer`, as one over all layers and heads; else NaN."""
        heads = sorted({head for _, of_layer in self.layers.values() for head in of_layer})
        joined: Any = xr.concat(list(datasets), "layer", data_vars="all", join="outer")
        return joined.reindex(layer=sorted(self.layers), **({"head": heads} if "head" in joined.dims else {}))


def total(groups: Sequence[Sums]) -> Sums:
    """Return the sums over all groups."""
    return reduce(Sums.__add__, groups)


class PromptGroups:
    """Sums of neighbouring prompts: memory grows to `MOST_GROUPS` times that of one group, however many prompts come.

    Prompts come in their order: whenever there would be more groups, each is joined with its neighbour.

    Args:
        measure: of the sums.
        grouped: whether to keep groups at all, for intervals.
        seed: of draws.
    """

    def __init__(self, measure: Measure, grouped: bool = True, seed: int = 0):
        self.measure, self.seed = measure, seed
        self.grouped = grouped and any(variable.interval for variable in measure.variables.values())
        self.size = 1  # prompts in a group
        self._sums: dict[int, Sums] = {}

    def sums_of(self, prompt: int) -> Sums:
        """Return the sums of the group that a prompt belongs to."""
        while self.grouped and self.size < prompts_per_group(prompt + 1):
            pairs = groupby(sorted(self._sums), lambda group: group // 2)
            self._sums = {pair: total([self._sums[number] for number in numbers]) for pair, numbers in pairs}
            self.size *= 2
        group = prompt // self.size if self.grouped else 0
        if group not in self._sums:
            self._sums[group] = Sums(self.measure.variables, self.measure.labels(), self.seed)
        return self._sums[group]

    @property
    def parts(self) -> list[Sums]:
        """The sums of every group."""
        return [self._sums[group] for group in sorted(self._sums)]

    def dataset(self) -> xr.Dataset:
        """Return `measure.of_sums` of all groups of prompts; variables with an interval without each group too.

        These have the dim `group`: "all", then the number of the group left out, and each group's share of the prompts
        as its coordinate `prompt_share`. Of fewer than four groups there is "all" alone.
        """
        parts = self.parts
        data = self.measure.describe(self.measure.of_sums(total(parts)))
        names = [name for name, variable in self.measure.variables.items() if variable.interval and name in data]
        if not names:
            return data
        if len(parts) < FEWEST:
            return data.assign({name: data[name].expand_dims(group=[ALL]) for name in names})
        without = [self.measure.of_sums(total([*parts[:n], *parts[n + 1 :]]).without_rows()) for n in range(len(parts))]
        undefined = xr.full_like(data[names], np.nan, float)  # what only the prompts of the group left out have
        without = [undefined.assign(dataset[[name for name in names if name in dataset]]) for dataset in without]
        without = [dataset[names].reindex_like(data[names]) for dataset in without]
        groups = xr.concat([data[names], *without], "group", data_vars="all", combine_attrs="override")
        sizes = np.array([len(part.lengths) for part in parts])
        shares = ("group", [np.nan, *sizes / sizes.sum()])
        labels = [ALL, *map(str, range(len(parts)))]
        grouped = groups.assign_coords(group=labels, prompt_share=shares)
        return data.drop_vars(names).merge(grouped, combine_attrs="override")[list(data.data_vars)]
