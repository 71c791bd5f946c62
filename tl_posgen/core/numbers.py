"""Numbers of a result: labelled arrays become values with intervals and null models."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import in_ranges
from tl_posgen.core.measure import ENDS, HEAD, TOKENS
from tl_posgen.core.number import HeadNumber, Number, mean_of_nulls
from tl_posgen.errors import InputError
from tl_posgen.models.loading.null_kinds import NULL_KINDS, RANDOM_INIT, kind_and_seed
from tl_posgen.models.selection import named_heads
from tl_posgen.stats.correlations import fisher_interval, pearson, spearman
from tl_posgen.stats.intervals import FEWEST, Bounds, jackknife_interval, mean_interval

if TYPE_CHECKING:
    from tl_posgen.core.measure import Measure

TRAINED = "trained"  # label of the model itself along the dim "init"; random inits have their seeds there
ALL = "all"  # label of all prompts along the dim "group"; the others leave one group out
SAMPLE_DIMS = ("prompt", "item")  # dims over which a number is a mean of independent draws
NUMBER_DIMS = ("init", "group", "end", *SAMPLE_DIMS)
MOST_LABELS = 16  # along a dim of positions, distances, .. whose numbers go into summary.json; names all do
_MOST_PLACES = 128  # along all such dims together: no maps of short prompts
_MOST_SHOWN = 20  # labels that a message lists


class Numbers:
    """The numbers of a result: `numbers("r", tokens="all")` is the mean of a variable over all dims without a label.

    Labels that are not given are the measure's usual ones (tokens="all"); a label None averages over a dim;
    first_token=False stands for tokens="without first". Dims and labels that the variable lacks are refused, so that no
    number passes for its control.

    Args:
        measure: of the result.
        dataset: with the dim init, "trained" first, and the dim group where there are intervals.
        of: whose numbers these are: "trained", or the means over "random init" or "shuffled".

    Attributes:
        data: the model's own dataset, all prompts: for options, counts and attributes.
        attrs: its attributes.
    """

    measure: Any  # of a subclass of Measure, whose own methods claims call

    def __init__(self, measure: "Measure", dataset: xr.Dataset, *, of: str = TRAINED):
        self.measure, self.dataset, self.of = measure, dataset, of
        self.attrs = dataset.attrs
        self.data = one_side(dataset)

    def __call__(self, name: str, **labels: Any) -> Number:
        array = self.array(name, **labels)
        if "number" in array.dims:  # of a comparison
            quoted = [repr(str(number)) for number in array["number"].values]
            listed = ", ".join(quoted[:_MOST_SHOWN]) + ", .." * (len(quoted) > _MOST_SHOWN)
            raise InputError(
                f"{self.measure.name}.{name} is of numbers in different units; give number=, one of {listed}"
            )
        number = self.number(array, self.bounds_of(name))
        return replace(number, judged=name in self.measure.variables and self.measure.variables[name].judged)

    def __contains__(self, name: str) -> bool:
        return name in self.dataset

    def shown(self) -> pd.DataFrame:
        """Return a row for every headline and every number with an interval, at the usual labels: what it prints as; of
        a comparison, whose numbers have different units, the change of each."""
        if "mean_change" in self:
            changes = {label: self("mean_change", number=label) for label in map(str, self.data["number"].values)}
            return pd.DataFrame({"number": [*changes], "change of the mean": [*map(str, changes.values())]})
        declared = self.measure.variables.items()
        names = [name for name, variable in declared if name in self and (variable.headline or variable.interval)]
        names = [name for name in names or self.dataset if self.dataset[name].dtype.kind in "fiub"]
        return pd.DataFrame({"number": names, "mean": [str(self(name)) for name in map(str, names)]})

    def __repr__(self) -> str:
        return "\n".join([f"Numbers of {self.measure.name}", *map(": ".join, self.shown().itertuples(index=False))])

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return self.shown().to_html(index=False, border=0)

    def bounds_of(self, name: str) -> Bounds | None:
        """Return the range of a variable's values, declared or in its attribute `range`; None where it has none."""
        if name in self.measure.variables:
            return self.measure.variables[name].bounds
        return range_of(self.dataset[name])

    @property
    def metric(self) -> str:
        """Name of the metric in the place of the loss; "" for the loss itself."""
        return str(self.attrs.get("metric", ""))

    @property
    def nulls(self) -> list[str]:
        """Labels of all null models along init: random inits, then shuffled weights."""
        return [str(init) for init in self.dataset["init"].values if init != TRAINED] if "init" in self.dataset else []

    @property
    def labels_by_null(self) -> dict[str, list[str]]:
        """Labels of the null models by kind, of the kinds that there are."""
        by_kind = {kind: [label for label in self.nulls if kind_and_seed(label)[0].name == kind] for kind in NULL_KINDS}
        return {kind: labels for kind, labels in by_kind.items() if labels}

    @property
    def inits(self) -> list[str]:
        """Labels of the random inits."""
        return self.labels_by_null.get(RANDOM_INIT, [])

    @property
    def is_null(self) -> bool:
        """Whether these are numbers of null models."""
        return self.of != TRAINED

    @property
    def of_inits(self) -> "Numbers":
        """These numbers of the random inits: their means and standard deviations."""
        return Numbers(self.measure, self.dataset, of=RANDOM_INIT)

    @property
    def by_null(self) -> dict[str, "Numbers"]:
        """These numbers of the null models by kind, of the kinds that there are."""
        return {kind: Numbers(self.measure, self.dataset, of=kind) for kind in self.labels_by_null}

    @property
    def labels(self) -> list[str]:
        """Labels along init of the models that these are numbers of."""
        return self.labels_by_null.get(self.of, []) if self.is_null else [TRAINED]

    def array(self, name: str, **labels: Any) -> xr.DataArray:
        """Return a variable at these labels and the usual ones, with its dims init, group and prompt: expressions of
        such arrays are given to `number`.

        Raises:
            InputError: a variable that the result lacks, a dim or a label that the variable lacks.
        """
        if name not in self.dataset:
            raise InputError(f"{self.measure.name} has no {name!r}; it has {', '.join(map(str, self.dataset))}")
        array = self.dataset[name]
        usual = {"tokens": TOKENS[0], **self.measure.usual()}
        chosen = {dim: label for dim, label in usual.items() if dim in array.dims} | by_dim(labels)
        return at_labels(array, chosen, f"{self.measure.name}.{name}")

    def number(self, array: xr.DataArray, bounds: Bounds | None = None) -> Number:
        """Return the mean of an array over all its dims, as a `Number`: its interval from the dims prompt, item, group
        or end (of a single number), its random inits from the dim init.

        Args:
            bounds: the range of the quantity, where it has one.
        """
        (number,) = self._numbers(array, (), bounds)
        return number

    def _numbers(self, array: xr.DataArray, places: Sequence[Any], bounds: Bounds | None) -> list[Number]:
        """Return the `number` at each label of these dims, the last dim's labels fastest."""
        over = [dim for dim in array.dims if dim not in (*NUMBER_DIMS, *places)]
        if "end" in array.dims and any(array.sizes[dim] > 1 for dim in over):  # a mean has no such ends
            array = array.sel(end=ENDS[0], drop=True)
        array = mean_over(array.astype(float), over)
        inits = [init for init in self.nulls if init in array["init"].values] if "init" in array.dims else []
        intervals = intervals_of(array, bounds)
        columns = [*(intervals[end] for end in ENDS), *(mean_of(at_init(array, init)) for init in inits)]
        rows = zip(*(column.transpose(*places).values.ravel().tolist() for column in columns), strict=True)
        numbers = [Number(value, low, high, grouped(inits, null)) for value, low, high, *null in rows]
        return [mean_of_nulls(number.by_null.get(self.of, ())) for number in numbers] if self.is_null else numbers

    def along(self, array: xr.DataArray, dim: str, bounds: Bounds | None = None) -> dict[Any, Number]:
        """Return the `number` at each label of a dim, by the label as Python has it: a str, an int, a float; a tuple
        where dims are stacked; its place where the dim has no labels."""
        return dict(zip(array[dim].values.tolist(), self._numbers(array, (dim,), bounds), strict=True))

    def correlation(
        self, x: xr.DataArray, y: xr.DataArray, *, ranks: bool = False, over: Sequence[str] = HEAD
    ) -> Number:
        """Return Pearson's r over heads of two arrays [.., layer, head], or Spearman's of ranks, in each model over its
        own heads, with Fisher's 95 % interval of independent heads.

        Heads without one of the values are left out; NaN where either is constant. `over` other dims, places are heads.
        """

        def of_model(init: str) -> tuple[Tensor, int]:
            heads = [mean_of(at_init(array, init)).reset_coords(drop=True) for array in (x, y)]
            pairs = xr.Dataset(dict(zip("xy", heads, strict=True))).stack(place=over).dropna("place")
            values = [torch.from_numpy(pairs[name].values.astype(float)) for name in "xy"]
            return (spearman if ranks else pearson)(*values), pairs.sizes["place"]

        r, n = of_model(TRAINED)
        low, high = (float(end) for end in fisher_interval(r, n))
        number = Number(float(r), low, high, grouped(self.nulls, [float(of_model(init)[0]) for init in self.nulls]))
        return mean_of_nulls(number.by_null.get(self.of, ())) if self.is_null else number

    def layers_not_above(self, name: str, **labels: Any) -> str:
        """Return "; not above random init in layers 2 to 29" for each kind of null models where the answer changes with
        depth; "" where it does not."""
        array = self.array(name, **labels)
        numbers = self.along(array, "layer", self.bounds_of(name))
        clauses = []
        for kind in next(iter(numbers.values())).by_null if numbers else ():
            below = [
                layer
                for layer, number in numbers.items()
                if number and replace(number, by_null={kind: number.by_null[kind]}).not_above
            ]
            if 0 < len(below) < len(numbers):
                clauses.append(f"; not above {kind} in layer{'' if len(below) == 1 else 's'} {in_ranges(below)}")
        return "".join(clauses)

    def intervals(self, name: str, **labels: Any) -> xr.Dataset:
        """Return value, low and high of a variable of the model at every place, for figures and tables; means over
        prompts are taken, other dims stay."""
        return intervals_of(self.array(name, **labels), self.bounds_of(name))

    def extreme(self, name: str, largest: bool = True, **labels: Any) -> HeadNumber:
        """Return the head where a per-head variable of the model is largest, or smallest."""
        array = mean_of(at_init(self.array(name, **labels), TRAINED))
        series = array.transpose("layer", "head").to_series().dropna()
        if series.empty:
            return HeadNumber(-1, -1, Number(np.nan))
        layer, head = series.index[int(series.to_numpy().argmax() if largest else series.to_numpy().argmin())]
        return HeadNumber(int(layer), int(head), Number(float(series[layer, head])))

    def frame(self, columns: Mapping[str, xr.DataArray], *rows: str) -> pd.DataFrame:
        """Return a row for each label of these dims and a column an array: the value of `number` at each place."""
        averaged = {
            name: mean_of(self.of_side(array)).mean([dim for dim in array.dims if dim not in (*rows, *NUMBER_DIMS)])
            for name, array in columns.items()
        }
        data: Any = xr.Dataset({name: array.reset_coords(drop=True) for name, array in averaged.items()})
        return data.to_dataframe(dim_order=list(rows)).reset_index()[[*rows, *columns]]

    def of_side(self, array: xr.DataArray) -> xr.DataArray:
        """Return the model's part of an array, or the mean over these null models."""
        if self.is_null and "init" in array.dims:
            return array.sel(init=self.labels).mean("init")
        return at_init(array, TRAINED)

    def summary(self) -> list[dict[str, Any]]:
        """Return the numbers of summary.json: name, labels, value, interval, random inits; no long curves and maps."""
        summary = []
        for name, array in self.dataset.data_vars.items():
            over = [dim for dim in array.dims if dim not in (*NUMBER_DIMS, "layer", "head", "draw")]
            if array.dtype.kind not in "fiub":
                continue
            # names, such as conditions, are never too many
            sizes = [array.sizes[dim] for dim in over if dim not in array.coords or array[dim].dtype.kind not in "OU"]
            if max(sizes, default=1) > MOST_LABELS or math.prod(sizes) > _MOST_PLACES:
                continue
            labels = [array[dim].values.tolist() if dim in array.coords else range(array.sizes[dim]) for dim in over]
            places = (dict(zip(over, place, strict=True)) for place in itertools.product(*labels))
            numbers = self._numbers(array, over, self.bounds_of(str(name)))
            entries = zip(places, numbers, strict=True)
            summary += [{"name": name, **place, **number.as_dict()} for place, number in entries]
        return summary


def range_of(array: xr.DataArray) -> Bounds | None:
    """Return the range of an array's values as its attribute `range` has it; None where it has none."""
    low, high = [*map(float, np.atleast_1d(array.attrs.get("range", ()))), np.nan, np.nan][:2]
    return None if high != high else (low, high)


def grouped(labels: Sequence[str], values: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Return the values of null models by kind."""
    by_kind: dict[str, tuple[float, ...]] = {}
    for label, value in zip(labels, values, strict=True):
        kind = kind_and_seed(label)[0].name
        by_kind[kind] = (*by_kind.get(kind, ()), value)
    return by_kind


def by_dim(labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return labels by dim, where first_token=False stands for tokens="without first", and head="L3H1" for a layer and
    a head.

    Example:
        >>> by_dim({"first_token": False, "side": "q"}), by_dim({"head": "L3H1"})
        ({'side': 'q', 'tokens': 'without first'}, {'layer': 3, 'head': 1})
    """
    chosen = dict(labels)
    if isinstance(chosen.get("head"), str) and "layer" not in chosen:
        [(layer, head)] = named_heads(chosen.pop("head"))
        chosen |= {"layer": layer, "head": head}
    if (first := chosen.pop("first_token", None)) is None:
        return chosen
    if not isinstance(first, bool) or "tokens" in chosen:
        raise InputError(f"first_token={first!r}: give True or False, or tokens= instead, one of {', '.join(TOKENS)}")
    return chosen | {"tokens": TOKENS[0 if first else 1]}


def at_labels(data: Any, labels: Mapping[str, Any], of: str) -> Any:
    """Return the part of a dataset or array at these labels; None leaves a dim whole.

    Args:
        of: its name in messages.

    Raises:
        InputError: a dim or a label that it lacks.

    Example:
        >>> share = xr.DataArray([0.2, 0.8], {"part": ["q", "k"]})
        >>> at_labels(share, {"part": "k"}, "share").item(), at_labels(share, {"part": None}, "share").size
        (0.8, 2)
    """
    dims = data.dims
    for dim, label in labels.items():
        if dim not in dims:
            raise InputError(f"{of} has no dim {dim!r}; it has {', '.join(map(str, dims)) or 'none'}")
        try:
            data = data if label is None else data.sel({dim: label})
        except (LookupError, TypeError, ValueError) as error:
            existing = ", ".join(map(str, data[dim].values[:_MOST_SHOWN]))
            raise InputError(f"{of}: no {dim} {label!r}; it has {existing}") from error
    return data


def at_init(array: Any, init: str) -> Any:
    """Return the part of one init; an array without that dim as it is."""
    return array.sel(init=init, drop=True) if "init" in array.dims else array


def one_side(dataset: xr.Dataset, init: str = TRAINED) -> xr.Dataset:
    """Return the dataset of one init, all prompts."""
    data = at_init(dataset, init)
    return (data.sel(group=ALL, drop=True) if "group" in data.dims else data).drop_vars("prompt_share", errors="ignore")


def mean_over(array: xr.DataArray, over: Sequence[Any]) -> xr.DataArray:
    """Return the mean over dims of the places that have a value; NaN for a group whose removal leaves a place without
    one, as the mean without that group is then of other places."""
    if "group" not in array.dims or not over:
        return array.mean(over)
    lost = (array.isnull() & array.sel(group=ALL, drop=True).notnull()).any(over)
    if "init" in lost.dims:  # random inits have no groups
        lost = lost & (lost["init"] == TRAINED)
    return array.mean(over).where(~lost)


def mean_of(array: xr.DataArray) -> xr.DataArray:
    """Return the estimate of all prompts: the mean over prompts or items, or that of the group "all"."""
    if "end" in array.dims:  # which holds the ends of its intervals
        array = array.sel(end=ENDS[0], drop=True)
    if "group" in array.dims:
        array = array.sel(group=ALL, drop=True)
    return array.mean([dim for dim in SAMPLE_DIMS if dim in array.dims])


def intervals_of(array: xr.DataArray, bounds: Bounds | None = None) -> xr.Dataset:
    """Return value, low and high of the model [*place]: the estimate and the ends of its 95 % interval, which are those
    along the dim end, else Student's over prompts or items, the delete-a-group jackknife's over groups of prompts; NaN
    ends where there are fewer than four, or neither."""
    array = at_init(array, TRAINED)
    of_share = array.coords["prompt_share"].dims if "prompt_share" in array.coords else ()
    if dim := next((dim for dim in of_share if dim != "group"), None):  # of two reports each has groups of its own
        return xr.concat([intervals_of(array.isel({dim: at}), bounds) for at in range(array.sizes[dim])], dim)
    value = mean_of(array)
    if "end" in array.dims:
        return xr.Dataset({"value": value} | {end: array.sel(end=end, drop=True) for end in ENDS[1:]})
    low, high = (xr.full_like(value, np.nan, dtype=float) for _ in range(2))
    sampled = next((dim for dim in SAMPLE_DIMS if dim in array.dims), None)
    if sampled is not None:
        low.values, high.values = mean_interval(array.transpose(sampled, ...).values.astype(float), bounds)
    elif "group" in array.dims and array.sizes["group"] > FEWEST:
        without = array.drop_sel(group=ALL).transpose("group", ...)
        defined = without["prompt_share"].notnull().values  # of two reports, one may have fewer groups
        without, shares = without[defined], without["prompt_share"].values[defined]
        low.values, high.values = jackknife_interval(value.values, without.values, shares, bounds)
    return xr.Dataset({"value": value, "low": low, "high": high})


def is_above(array: xr.DataArray, least: int | float) -> xr.DataArray:
    """Return whether the mean over prompts is above `least` [..]: the low end of its interval, or where there is none
    the mean itself. Parts of what is not above zero are no shares.

    Args:
        array: with the dim prompt, or group.

    Example:
        >>> worth = xr.DataArray([[0.2, 0.3, 0.2, 0.3], [0.9, 0.0, 0.0, 0.1]], dims=("init", "prompt"))
        >>> is_above(worth, 0.01).values.tolist(), is_above(worth[:, :2], 0.01).values.tolist()
        ([True, False], [True, True])
    """
    array = array.rename(init="model") if "init" in array.dims else array  # each as if it were the model itself
    intervals = intervals_of(array)
    above = intervals["low"].fillna(intervals["value"]) > least
    return above.rename(model="init") if "model" in above.dims else above


def leave_one_out(array: xr.DataArray) -> xr.DataArray:
    """Return the mean over prompts and the means without each, along the dim group: functions of means over prompts
    have an interval by these."""
    n = array.sizes["prompt"]
    mean = array.mean("prompt")
    without = (n * mean - array) / (n - 1)
    groups = without.rename(prompt="group").assign_coords(group=[str(index) for index in range(n)])
    joined = xr.concat([mean.assign_coords(group=ALL), groups], "group")
    return joined.assign_coords(prompt_share=("group", [np.nan, *[1 / n] * n]))
