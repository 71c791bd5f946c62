"""Two reports side by side: the change of every number a head, between two models, two texts, or under hooks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import AtHead, Number, mean_of_nulls
from tl_posgen.core.numbers import (
    ALL,
    KEPT,
    SAMPLED,
    TRAINED,
    Numbers,
    at_init,
    interval_of,
    leave_one_out,
    mean_of,
    mean_over,
)
from tl_posgen.core.options import fits
from tl_posgen.core.report import Report, load
from tl_posgen.core.result import Result, columns_of
from tl_posgen.errors import InputError
from tl_posgen.models.provenance import null_label
from tl_posgen.report.figures import DIVERGING, Panels, equality, model_label, plain, sides
from tl_posgen.report.head_figures import head_points, map_panels
from tl_posgen.stats.intervals import FEWEST, difference_interval

SIDES = ("first", "second")
DRAWN = 6  # maps of differences: the first in the order of `by_size`
TOLD_APART = ("revision", "length", "prompts", "dtype")  # of two reports of one model, the first in which they differ
ROUNDING = 0.0005  # a smaller change is said as 0.000
SAME_PROMPTS = ("tokens_sha256", "heads")


def compare(first: Any, second: Any, *, names: Sequence[str] | None = None) -> Report:
    """difference = second - first, of every per-head number of two reports, beside that of their random inits.

    Between a model and what was made of it (fine-tuned, ablated), or between two texts; layers and heads are matched by
    their indices. Of models of different shape the means over each one's own heads are compared. Where both reports are
    of the same prompts the 95 % intervals are paired: the same groups of prompts are left out of both. Elsewhere they
    are those of two independent numbers.

    Args:
        first, second: a `Report`, or the path of a saved one.
        names: of the two in sentences and pictures; those of their models, if left out.

    Returns:
        A `Report` with one result, "comparison".

    Raises:
        InputError: something that is no report; no number that both have for the same heads.

    Source: ours.

    Example:
        >>> import tl_posgen
        >>> text = "Down, down, down. Would the fall never come to an end? " * 4
        >>> quick = {"measures": "variance", "length": 16, "n_prompts": 4, "null_seeds": (), "progress": False}
        >>> whole = tl_posgen.analyze("mini", text, **quick)
        >>> result = tl_posgen.compare(whole, whole)["comparison"]
        >>> float(abs(result.measure.difference(result.dataset)).max())
        0.0
    """
    first, second = (load(one) if not isinstance(one, Report) else one for one in (first, second))
    before, after = named(first, second, names)
    measure = Comparison()
    metrics = [one.provenance.get("metric", "the loss") for one in (first, second)]
    if metrics[0] != metrics[1]:
        raise InputError(f"the reports judge by {metrics[0]} and by {metrics[1]}; compare reports of one metric")
    paired = all(first.provenance.get(key) == second.provenance.get(key) for key in SAME_PROMPTS)
    values = [per_head(one) for one in (first, second)]
    apart = {
        name: " and ".join(str(one[name].measure.usual()[option]) for one in (first, second))
        for name in first
        if name in second
        for option, value in first[name].measure.usual().items()
        if second[name].measure.usual().get(option, value) != value
    }  # of other options, such as mean_key's distance
    values = [{name: one for name, one in side.items() if name.split(".")[0] not in apart} for side in values]
    shared = [[side[name] for side in values] for name in values[0] if name in values[1]]
    chosen = any("heads" in one.provenance for one in (first, second))  # of which those that both have are compared
    one_shape = chosen or all(one[dim].equals(other[dim]) for one, other in shared for dim in HEAD)
    if not one_shape:
        values = [{name: mean_over_heads(array) for name, array in side.items()} for side in values]
    both = {name: side_by_side(one, values[1][name]) for name, one in values[0].items() if name in values[1]}
    both = {name: one for name, one in both.items() if one.size}
    if not both:
        raise InputError(
            f"no per-head number is in both reports: the first has {', '.join(first)}, the second {', '.join(second)}"
        )
    groups = max((one["group"].values for one in both.values()), key=len)
    value = xr.concat(
        [one.reindex(group=groups) for one in both.values()],  # each with the shares of its own groups
        xr.Variable("number", np.array(list(both))),
        join="outer",
        coords="different",
        compat="equals",
    )
    headline = [int(values[0][name].attrs["headline"]) for name in both]
    labels = labels_of(values[0], both)
    data = xr.Dataset({"value": value, "label": ("number", labels), "headline": ("number", headline)})
    if paired and "loss" in first and "loss" in second:
        losses = [one["loss"].own["loss"].reset_coords(drop=True) for one in (first, second)]
        data["loss"] = xr.concat(losses, xr.Variable("report", np.array(SIDES)))
    inits = [f"{after} - {before}", *(null_label(str(one)) for one in data["init"].values[1:])]
    data = data.assign_coords(init_label=("init", inits))
    data = measure.describe(data.assign_attrs(first=before, second=after, paired=int(paired)))
    counts = [one.provenance.get("prompts") for one in (first, second)]
    if counts[0] != counts[1] and any(name.startswith("variance.") for name in both):
        data = data.assign_attrs(unequal_prompts=" and ".join(map(str, counts)))
    if apart:
        data = data.assign_attrs(apart="; ".join(f"{name} ({options})" for name, options in apart.items()))
    if not one_shape:
        n_first, n_second = (max(counted_heads(one[at]) for one in shared) for at in range(2))
        data = data.assign_attrs(n_first=n_first, n_second=n_second)
    provenance = {"model": f"{after} beside {before}", "first": first.provenance, "second": second.provenance}
    return Report({measure.name: Result(measure, data, provenance)}, provenance)


def mean_over_heads(array: xr.DataArray) -> xr.DataArray:
    """Return the mean over heads of a number; itself where it has none."""
    return mean_over(array.astype(float), heads_in(array)).assign_attrs(array.attrs)


def heads_in(array: xr.DataArray) -> list[str]:
    """Return its dims layer and head, which numbers of models of different shape lack."""
    return [dim for dim in HEAD if dim in array.dims]


def counted_heads(array: xr.DataArray) -> int:
    """Return how many heads a number is known of."""
    return int(mean_of(at_init(array, TRAINED)).notnull().sum())


def named(first: Report, second: Report, names: Any) -> tuple[str, str]:
    """Return two different names for the reports: those given; or the models', where alike with what differs."""
    if names is None:
        both = [one.provenance for one in (first, second)]
        names = [str(one.get("model", "model")) for one in both]
        if names[0] == names[1]:
            apart = next((key for key in TOLD_APART if both[0].get(key) != both[1].get(key)), "")
            marks = [f"{apart} {one.get(apart) or 'none'}" for one in both] if apart else SIDES
            names = [f"{name} ({mark})" for name, mark in zip(names, marks, strict=True)]
    if not fits(names, Sequence[str]) or len(set(names)) != 2 or len(names) != 2 or not all(names):
        raise InputError(f"names={names!r}: give two that differ, such as ('intact', 'ablated')")
    return names[0], names[1]


def per_head(report: Report) -> dict[str, xr.DataArray]:
    """Return every number a head that is a headline or has an interval, by "measure.variable, label"; of a headline at
    each label of its other dims, means over prompts; no yardsticks."""
    found: dict[str, xr.DataArray] = {}
    for result in report.values():
        for name, variable in result.measure.variables.items():
            few = {"tokens", "side", "part", *result.measure.usual()}  # dims of which each label is a number of its own
            few |= set(variable.dims) if variable.headline else set()
            of_heads = set(HEAD) <= set(variable.dims) <= few | set(HEAD)
            shown = of_heads and variable.compared and (variable.headline or variable.interval)
            if shown and name in result.dataset:
                array = result.dataset[name].drop_vars("init_label", errors="ignore")
                sampled = variable.interval or bool(set(SAMPLED) & set(variable.dims))  # an argmax has no interval
                attributes = {"label": variable.label, "headline": bool(variable.headline) and sampled}
                columns = columns_of(array, f"{result.name}.{name}", (*KEPT, *HEAD), result.measure.usual())
                found |= {one: in_groups(column).assign_attrs(attributes) for one, column in columns.items()}
    return found


def labels_of(numbers: Mapping[str, xr.DataArray], names: Iterable[str]) -> list[str]:
    """Return labels in words of numbers such as "slash.best_score, q"; with the measure where two would be alike."""
    labels = {name: ", ".join([numbers[name].attrs["label"], *name.split(", ")[1:]]) for name in names}
    counts = Counter(labels.values())
    measures = {name: name.split(".")[0].replace("_", " ") for name in labels}
    return [label if counts[label] == 1 else f"{measures[name]}: {label}" for name, label in labels.items()]


def in_groups(array: xr.DataArray) -> xr.DataArray:
    """Return the mean over prompts or items, each of them a group; an array without these dims as it is."""
    sampled = next((dim for dim in SAMPLED if dim in array.dims), None)
    if sampled is None:
        return array
    array = array.dropna(sampled, how="all")  # prompts that are too short for a number
    if array.sizes[sampled] < FEWEST:
        return array.mean(sampled).expand_dims(group=[ALL])
    return leave_one_out(array, sampled)


def side_by_side(first: xr.DataArray, second: xr.DataArray) -> xr.DataArray:
    """Return two arrays [init, group, layer, head] as one along `report`, for the heads and inits that both have."""
    one, other = (array.astype(float) for array in (first, second))
    one, other = xr.align(one, other, join="inner", exclude=["group"])
    shares = [array.coords.get("prompt_share") for array in (one, other)]
    both: Any = xr.concat(
        [array.drop_vars("prompt_share", errors="ignore") for array in (one, other)],
        xr.Variable("report", np.array(SIDES)),
        join="outer",
        combine_attrs="drop",
    )
    if any(share is None for share in shares):
        whole = both.sel(group=[ALL]) if "group" in both.dims else both.expand_dims(group=[ALL])
        return whole.assign_coords(prompt_share=(("report", "group"), np.full((2, 1), np.nan)))
    groups = [ALL, *(str(label) for label in both["group"].values if label != ALL)]
    share = np.stack([one.reindex(group=groups).values for one in shares if one is not None])
    return both.reindex(group=groups).assign_coords(prompt_share=(("report", "group"), share))


@dataclass(frozen=True)
class Comparison(Measure):
    """difference = second - first.

    Every per-head number that both reports have, head by head: the second less the first; of models of different shape,
    the mean over the second's heads less that over the first's. Intervals over prompts are
    paired where both are of the same prompts. Of heads that do not change, one in twenty has an interval that leaves
    out zero.

    Source: ours
    """

    question = "What changes?"
    rows = ("number", *HEAD)
    variables = {
        "value": Variable("value", "", "of both reports", ("report", "number", *HEAD), interval=True),
        "loss": Variable("loss", "nats", "of both reports, prompt by prompt", ("report", "prompt")),
        "label": Variable("name of the number", "", "", ("number",)),
        "headline": Variable("whether it is a headline with an interval", "", "", ("number",)),
    }
    legend = "means over heads; interval from, to: of the mean difference, 95%."

    def difference(self, data: xr.Dataset) -> xr.DataArray:
        """Return second - first of the model, all prompts."""
        value = mean_of(at_init(data["value"], TRAINED))
        return value.sel(report="second", drop=True) - value.sel(report="first", drop=True)

    def change(self, own: Numbers, array: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
        """Return the difference and the ends of its interval, at every place of an array [report, ...]."""
        first, second = (array.sel(report=side, drop=True) for side in SIDES)
        if own.attrs["paired"]:
            return interval_of(second - first)
        ends = [interval_of(one) for one in (first, second)]
        low, high = difference_interval(*([end.values for end in one] for one in ends))
        value = ends[1][0] - ends[0][0]
        return value, value.copy(data=low), value.copy(data=high)

    def mean_change(self, own: Numbers, number: str) -> Number:
        """Return the mean difference over heads."""
        array = own.dataset["value"].sel(number=number)
        array = array.mean(heads_in(array))
        value, low, high = self.change(own, at_init(array, TRAINED))
        differences = mean_of(array).sel(report="second") - mean_of(array).sel(report="first")
        inits, shuffled = (
            tuple(one for label in labels if (one := float(differences.sel(init=label))) == one)
            for labels in (own.inits, own.shuffled)
        )
        found = Number(float(value), float(low), float(high), inits, shuffled=shuffled)
        return mean_of_nulls(found.by_null.get(own.of, ())) if own.is_null else found

    def findings(self, own: Numbers) -> list[str]:
        kind = "paired by prompt" if own.attrs["paired"] else "of two sets of prompts"
        lines = []
        if "loss" in own:
            loss = own.dataset["loss"]
            change = own.number(loss.sel(report="second") - loss.sel(report="first"))
            lines.append(
                f"Loss: {change.with_interval:+.3f} nats a token, from {own('loss', report='first').plain:.3f}."
            )
        changes, labels = abs(self.difference(own.dataset)), own.data["label"].values
        largest = changes.max(heads_in(changes))
        changed = [number for number in by_size(self, own.data) if float(largest.sel(number=number)) >= ROUNDING]
        lines += [self.sentence(own, number) for number in changed]
        same, unknown = ([str(label) for label in labels[of.values]] for of in (largest < ROUNDING, largest.isnull()))
        if same:
            size = f" by {ROUNDING:g} or more" if float(largest.where(largest < ROUNDING).max()) else ""
            what = "head" if "n_first" not in own.attrs else "mean over heads"
            lines.append(f"No {what} changes{size}{' in ' + ', '.join(same) if changed or unknown else ''}.")
        if unknown:
            lines.append(f"Not defined for any head on both sides: {', '.join(unknown)}.")
        heads = ""
        if "n_first" in own.attrs:
            n_first, n_second = (counted(int(own.attrs[name]), "head") for name in ("n_first", "n_second"))
            heads = f"means over the {n_first} of the one and the {n_second} of the other, "
        if counts := own.attrs.get("unequal_prompts"):
            lines.append(
                f"The reports are of {counts} prompts, and a share of position holds more chance where prompts are "
                "fewer: compare shares at equal numbers only."
            )
        if apart := own.attrs.get("apart"):
            lines.append(f"Left out, as measured with other options: {apart}.")
        names = f"From {own.attrs['first']} to {own.attrs['second']}"
        return [f"{names}, {heads}intervals {kind}: {lines[0]}", *lines[1:]]

    def sentence(self, own: Numbers, number: str) -> str:
        """Return the change of one number."""
        one = at_init(own.dataset["value"], TRAINED).sel(number=number)
        mean, label = self.mean_change(own, number), str(own.data["label"].sel(number=number).values)
        average = f"{label}: {mean.with_interval:+.3f} on average{mean.null_in_brackets:+.3f}"
        if not heads_in(one):
            first = mean_of(one).sel(report="first")
            return f"{average}, from {Number(float(first)).plain:.3f}."
        value, low, high = self.change(own, one)
        n_known, n_changed = int(low.notnull().sum()), int(((low > 0) | (high < 0)).sum())
        changes = value.transpose(*HEAD).to_series().dropna()
        heads = f"; in {n_changed} of {counted(n_known, 'head')} the interval leaves out zero" if n_known else ""
        layer, head = changes.abs().idxmax()
        largest = AtHead(int(layer), int(head), Number(float(changes[layer, head])))
        lost = int(mean_of(one).notnull().any("report").sum()) - len(changes)
        left_out = f"; {counted(lost, 'head')} defined on one side only, left out" if lost else ""
        return f"{average}{heads}; most in {largest:+.3f}{left_out}."

    def table(self, own: Numbers) -> pd.DataFrame:
        numbers = by_size(self, own.data)
        frame = pd.DataFrame({"number": own.data["label"].sel(number=numbers).values})
        for side in SIDES:
            value = mean_of(own.of_side(own.dataset["value"])).sel(report=side, number=numbers)
            frame[own.attrs[side]] = value.mean(heads_in(value)).values
        changes = [self.mean_change(own, number) for number in numbers]
        for column, name in (("difference", "value"), ("interval from", "low"), ("to", "high")):
            frame[column] = [getattr(change, name) for change in changes]
        return frame

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return list(self.figures) if heads_in(data["value"]) else []

    figures = {"maps": lambda result: draw_maps(result), "heads": lambda result: draw_heads(result)}


def relative_size(measure: Comparison, data: xr.Dataset) -> xr.DataArray:
    """Return mean |difference| over heads / the spread of the first report's heads, of every number, or / the size of
    its mean where only means are compared; 0 for none."""
    first = mean_of(at_init(data["value"], TRAINED)).sel(report="first", drop=True)
    heads, change = heads_in(first), abs(measure.difference(data))
    return (change.mean(heads) / (first.std(heads) if heads else abs(first))).fillna(0)


def by_size(measure: Comparison, data: xr.Dataset) -> list[str]:
    """Return the numbers in the order in which they are told: headlines first, the largest relative size first."""
    numbers = data["number"].values[np.lexsort((-relative_size(measure, data).values, -data["headline"].values))]
    return [str(number) for number in numbers]


def draw_maps(result: Any) -> go.Figure:
    """Draw layer x head maps of differences, the first in the order of `by_size`."""
    data, change = result.own, result.measure.difference(result.dataset)
    chosen = by_size(result.measure, data)[:DRAWN]
    labels = [str(label) for label in data["label"].sel(number=chosen).values]
    shown = [change.sel(number=number).reset_coords(drop=True) for number in chosen]
    panels = map_panels(labels, shown, {}, columns=3)
    panels.figure.update_traces(coloraxis=None, colorscale=DIVERGING, zmid=0, showscale=False)
    subtitle = "second less first, each map on its own scale of colours; headlines first, the largest changes first"
    return panels.finish(f"Difference per head · {model_label(data)}", subtitle)


def draw_heads(result: Any) -> go.Figure:
    """Draw every head of one side against the other, a panel a number; the random inits' in grey."""
    data = result.own
    panels = Panels([str(label) for label in data["label"].values], columns=4, row_height=260)
    for side, whole, colour in reversed(sides(result)):
        name = "heads" if whole is data else side
        for panel, number in enumerate(data["number"].values):
            one = whole["value"].sel(number=number).stack(place=HEAD)
            style = {"size": 6, "opacity": 0.7, "color": colour}
            before, after = (one.sel(report=report) for report in SIDES)
            panels.add(panel, head_points(before, after, name=name, marker=style))
    for panel, number in enumerate(data["number"].values):
        both = data["value"].sel(number=number)
        ends = [float(both.min()), float(both.max())]
        panels.add(panel, equality(ends[1]).update(x=ends, y=ends))
    attrs = result.dataset.attrs
    panels.axes(plain(attrs["first"]), plain(attrs["second"]))
    return panels.finish(f"Heads on both sides · {model_label(data)}", "the dotted line: nothing changes")
