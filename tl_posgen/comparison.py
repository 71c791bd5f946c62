"""Two reports side by side: the change of every number a head, between two models, two texts, or under hooks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import ENDS, HEAD, Measure, Variable
from tl_posgen.core.number import HeadNumber, Number
from tl_posgen.core.numbers import NUMBER_DIMS, SAMPLE_DIMS, TRAINED, Numbers, at_init, intervals_of, mean_of, mean_over
from tl_posgen.core.options import fits
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result, columns_of
from tl_posgen.core.saved import load
from tl_posgen.errors import InputError
from tl_posgen.models.loading.null_kinds import null_label
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import DIVERGING, model_label
from tl_posgen.report.head_figures import Map, map_panels
from tl_posgen.stats.intervals import Bounds, bounds_of_difference, difference_interval

SIDES = ("first", "second")
DRAWN = 6  # maps of differences: the first numbers
# of two reports of one model, the first in which they differ
_TOLD_APART = ("revision", "text", "length", "prompts", "dtype", "first")
_OF_TEXT = ("text", "prompts", "length", "first_token")  # told of both where they agree
_COLUMNS = ("number", "difference", "interval from", "to")  # of the table, before those of the sides
ROUNDING = 0.0005  # a smaller change is said as 0.000


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
        A `Report` with one result, "comparison"; `.heads(by="three_axis_r")` are the heads that rise most, with
        lowest=True those that fall most.

    Raises:
        InputError: something that is no report; no number that both have for the same heads.

    Source: ours.

    Example:
        >>> import tl_posgen
        >>> text = "Down, down, down. Would the fall never come to an end? " * 4
        >>> quick = {"measures": "variance", "length": 16, "n_prompts": 4, "nulls": 0, "progress": False}
        >>> whole = tl_posgen.analyze("mini", text, **quick)
        >>> result = tl_posgen.compare(whole, whole)["comparison"]
        >>> float(abs(result.trained["change"]).max())
        0.0
    """
    reports = first, second = [load(report) if not isinstance(report, Report) else report for report in (first, second)]
    before, after = _named(first, second, names)
    metrics = [report.provenance.get("metric", "the loss") for report in reports]
    if metrics[0] != metrics[1]:
        raise InputError(f"the reports judge by {metrics[0]} and by {metrics[1]}; compare reports of one metric")
    prompts = [report.provenance.get("tokens_sha256") for report in reports]
    paired = prompts[0] == prompts[1] and prompts[0] is not None  # of a pass without token ids nothing is known
    usual = {name: [report[name].measure.usual() for report in reports] for name in first if name in second}
    apart = {
        name: {dim: at for dim, at in before_and_after[0].items() if before_and_after[1].get(dim, at) != at}
        for name, before_and_after in usual.items()
    }  # dims along which the two have other usual labels, such as mean_key's distance
    left_out = "; ".join(
        f"{name} ({' and '.join(str(labels[dim]) for labels in usual[name])})" for name in apart for dim in apart[name]
    )
    values = [_per_head(report, apart) for report in reports]
    shared = {name: (array, values[1][name]) for name, array in values[0].items() if name in values[1]}
    shared = dict(sorted(shared.items(), key=lambda item: not item[1][0].attrs["headline"]))
    chosen = [set(report.provenance["heads"]) for report in reports if "heads" in report.provenance]
    one_shape = bool(chosen) or all(left[dim].equals(right[dim]) for left, right in shared.values() for dim in HEAD)
    compared = {
        name: _side_by_side(left.drop_attrs(), right.drop_attrs(), paired, one_shape, left.attrs["bounds"])
        for name, (left, right) in shared.items()
    }
    compared = {
        name: dataset for name, dataset in compared.items() if all(array.size for array in dataset.data_vars.values())
    }
    if not compared:
        unknown = [name for report in reports for name in report if report[name].measure.source == "unknown"]
        raise InputError(
            f"no per-head number is in both reports: the first has {', '.join(first)}, the second {', '.join(second)}; "
            "measure heads in both as well, such as measures=['variance', 'loss']: the loss is then compared too"
            + (f"; left out, as measured with other options: {left_out}" if left_out else "")
            + (f"; import the class of {unknown[0]} before it is loaded" if unknown else "")
        )
    numbers: Any = xr.Variable("number", np.array(list(compared)))
    data: Any = xr.concat(list(compared.values()), numbers, data_vars="all", join="outer")
    if chosen:  # those that both have are compared
        compared_heads = set.intersection(*chosen)
        places = [
            [head_name(layer, head) in compared_heads for head in data["head"].values] for layer in data["layer"].values
        ]
        data["value"] = data["value"].where(xr.DataArray(places, dims=HEAD))
    labels = {name: ", ".join([shared[name][0].attrs["label"], *name.split(", ")[1:]]) for name in compared}
    times = Counter(labels.values())  # with the measure where two would be alike
    of_measure = {name: f"{shared[name][0].attrs['measure'].replace('_', ' ')}: " for name in compared}
    full_labels = [label if times[label] == 1 else of_measure[name] + label for name, label in labels.items()]
    quantities = [", ".join([shared[name][0].attrs["variable"], *name.split(", ")[1:]]) for name in compared]
    data = data.assign(label=("number", full_labels), quantity=("number", quantities))
    if paired and "loss" in first and "loss" in second:
        losses = [report["loss"].trained["loss"].reset_coords(drop=True) for report in reports]
        data["loss"] = xr.concat(losses, xr.Variable("report", np.array(SIDES)))
    inits = [f"{after} - {before}", *(null_label(str(init)) for init in data["init"].values[1:])]
    attrs: dict[str, Any] = {"first": before, "second": after, "paired": int(paired)}
    cuts = [[report.provenance.get(key) or 0 for key in ("prompts", "length")] for report in reports]
    if cuts[0] != cuts[1]:
        attrs["cuts"] = " and ".join(f"{counted(n, 'prompt')} of {length} tokens" for n, length in cuts)
    if left_out:
        attrs["apart"] = left_out
    if one_shape and (options := _options_apart(first, second)):
        attrs["options"] = options
    if not one_shape:
        n_heads = [max(int(_of_model(pair[at]).notnull().sum()) for pair in shared.values()) for at in (0, 1)]
        attrs |= {"n_first": n_heads[0], "n_second": n_heads[1]}
    data = Comparison().describe(data.assign_coords(init_label=("init", inits)).assign_attrs(attrs))
    cut_of_both = [{name: report.provenance.get(name) for name in _OF_TEXT} for report in (first, second)]
    shared_cut = {name: cut for name, cut in cut_of_both[0].items() if paired and cut and cut == cut_of_both[1][name]}
    provenance = {"model": f"{after} beside {before}", **shared_cut}
    provenance |= {"metric": metrics[0]} if "metric" in first.provenance else {}
    provenance |= {"first": first.provenance, "second": second.provenance}
    return Report({"comparison": Result(Comparison(), data, provenance)}, provenance)


def _options_apart(first: Report, second: Report) -> str:
    """Return "three_axis ridge 0.0 and 5.0; seed 0 and 1": the options in which measures of both differ, and seeds."""
    options = {
        f"{name} {option}": (value, second[name].measure.options().get(option))
        for name in first
        if name in second
        for option, value in first[name].measure.options().items()
    }
    options["seed"] = (first.provenance.get("seed"), second.provenance.get("seed"))
    return "; ".join(f"{name} {mine} and {other}" for name, (mine, other) in options.items() if mine != other)


def _named(first: Report, second: Report, names: Any) -> tuple[str, str]:
    """Return two different names for the reports: those given; or the models', where alike with what differs."""
    if names is None:
        provenances = [report.provenance for report in (first, second)]
        names = [str(provenance.get("model", "model")) for provenance in provenances]
        if names[0] == names[1]:
            apart = next((key for key in _TOLD_APART if provenances[0].get(key) != provenances[1].get(key)), "")
            marks = [f"{apart} {provenance.get(apart) or 'none'}" for provenance in provenances] if apart else SIDES
            names = [f"{name} ({mark})" for name, mark in zip(names, marks, strict=True)]
    if not fits(names, Sequence[str]) or len(set(names)) != 2 or len(names) != 2 or not all(names):
        raise InputError(f"names={names!r}: give two that differ, such as ('intact', 'ablated')")
    if taken := set(names) & set(_COLUMNS):
        raise InputError(f"names={names!r}: {min(taken)!r} is another column of the table; give two other names")
    return names[0], names[1]


def _per_head(report: Report, apart: Mapping[str, Mapping[str, Any]]) -> dict[str, xr.DataArray]:
    """Return every number a head that is a headline or has an interval, by its name in `Report.frame`, or else
    "measure.variable", and its labels; of a headline at each label of its other dims; no yardsticks, nothing along
    dims of a measure that are apart."""
    numbers: dict[str, xr.DataArray] = {}
    for result in report.values():
        for name, variable in result.measure.variables.items():
            few = {"tokens", "side", "part", *result.measure.usual()}  # dims of which each label is a number of its own
            few |= set(variable.dims) if variable.headline else set()
            of_heads = set(HEAD) <= set(variable.dims) <= few | set(HEAD)
            is_apart = bool(set(variable.dims) & set(apart.get(result.name, ())))
            is_compared = of_heads and not is_apart and variable.compared and (variable.headline or variable.interval)
            if is_compared and name in result.dataset:
                array = result.dataset[name].drop_vars("init_label", errors="ignore").astype(float)
                sampled = variable.interval or bool(set(SAMPLE_DIMS) & set(variable.dims))  # an argmax has no interval
                attrs = {
                    "label": variable.label,
                    "headline": bool(variable.headline) and sampled,
                    "measure": result.name,
                    "variable": name,
                    "bounds": variable.bounds,
                }
                title = variable.headline or f"{result.name}.{name}"  # as in the report's frame
                for at, column in columns_of(array, (*NUMBER_DIMS, *HEAD), result.measure.usual()):
                    numbers[", ".join([title, *at])] = column.assign_attrs(attrs)
    return numbers


def _of_model(array: xr.DataArray) -> xr.DataArray:
    return mean_of(at_init(array, TRAINED))


def _side_by_side(
    first: xr.DataArray, second: xr.DataArray, paired: bool, one_shape: bool, bounds: Bounds | None
) -> xr.Dataset:
    """Return the mean of each side over heads, and the change of this mean; with one shape of the heads that both have,
    with the values of every head, and the change of each."""
    left, right = xr.align(first, second, join="inner", exclude=(*NUMBER_DIMS[1:], *(() if one_shape else HEAD)))
    sides, variables = xr.Variable("report", np.array(SIDES)), dict[str, Any]()
    if one_shape:
        variables["value"] = xr.concat([_of_model(left), _of_model(right)], sides)
        defined = mean_of(left).notnull() & mean_of(right).notnull()
        left, right = left.where(defined), right.where(defined)
        variables["change"] = _change(left, right, paired, bounds)
    variables["mean"] = xr.concat([mean_of(mean_over(side, HEAD)) for side in (left, right)], sides)
    variables["mean_change"] = _change(mean_over(left, HEAD), mean_over(right, HEAD), paired, bounds)
    return xr.Dataset(variables)


def _change(first: xr.DataArray, second: xr.DataArray, paired: bool, bounds: Bounds | None) -> xr.DataArray:
    """Return second - first [end, init, *place]: its value, and in the model the ends of its interval; `bounds` are
    those of either."""
    value = mean_of(second) - mean_of(first)
    of_model = [at_init(side, TRAINED) for side in (first, second)]
    if paired:
        intervals = intervals_of(of_model[1] - of_model[0], bounds_of_difference(bounds))
        low, high = intervals["low"], intervals["high"]
    else:
        like = _of_model(value)
        before, after = (
            [intervals_of(side, bounds)[end].transpose(*like.dims).values for end in ENDS] for side in of_model
        )
        low, high = (like.copy(data=end) for end in difference_interval(before, after))
    ends: Any = [value, *(end.expand_dims(init=[TRAINED]).reindex(init=value["init"]) for end in (low, high))]
    return xr.concat(ends, xr.Variable("end", np.array(ENDS)), coords="minimal", compat="override")


def _maps_of_changes(result: Any) -> go.Figure:
    """Draw layer x head maps of the changes of the first numbers."""
    change = result.trained["change"].sel(end=ENDS[0], drop=True).isel(number=slice(DRAWN)).transpose("number", *HEAD)
    labels = [str(label) for label in result.trained["label"].values[:DRAWN]]
    maps = [Map(n, "", label, change[n].reset_coords(drop=True)) for n, label in enumerate(labels)]
    panels = map_panels(maps, columns=3)
    panels.figure.update_traces(coloraxis=None, colorscale=DIVERGING, zmid=0, showscale=False)
    panels.figure.layout.coloraxis = None
    subtitle = "second less first, each map on its own scale of colours; headlines first"
    return panels.titled(f"Difference per head · {model_label(result.trained)}", subtitle)


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
        "mean": Variable("mean over heads", "", "of both reports", ("report", "number")),
        "mean_change": Variable("change of the mean", "", "over heads that both have", ("end", "number")),
        "change": Variable("change", "", "second - first", ("end", "number", *HEAD)),
        "value": Variable("value", "", "of both reports", ("report", "number", *HEAD)),
        "loss": Variable("loss", "nats", "of both reports, prompt by prompt", ("report", "prompt")),
        "label": Variable("name of the number", "", "", ("number",)),
        "quantity": Variable("variable of its measure, and labels", "", "", ("number",)),
    }
    figures = {"maps": _maps_of_changes}
    legend = "means over heads; interval from, to: of the mean difference, 95%."

    def of_heads(self, data: xr.Dataset) -> xr.Dataset:
        """Return means over the chosen heads; their intervals cannot be made of what is kept."""
        change = mean_over(data["change"], HEAD).where(data["end"] == ENDS[0])
        mean = mean_over(data["value"].where(data["value"].notnull().all("report")), HEAD)
        return data.assign(mean=mean, mean_change=change)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return list(self.figures) if "change" in data else []

    def findings(self, numbers: Numbers) -> list[str]:
        lines = []
        if "loss" in numbers:
            loss = numbers.dataset["loss"]
            change = numbers.number(loss.sel(report="second") - loss.sel(report="first"))
            lines.append(
                f"Loss: {change.with_interval:+.3f} nats a token, from {numbers('loss', report='first').plain:.3f}."
            )
        largest, labels = abs(numbers.data["mean_change"].sel(end=ENDS[0])), numbers.data["label"].values
        if "change" in numbers:
            largest = abs(numbers.data["change"].sel(end=ENDS[0])).max(HEAD)
        changed = numbers.data["number"].values[(largest >= ROUNDING).values]
        lines += [self._sentence(numbers, str(number)) for number in changed]
        same, unknown = ([str(label) for label in labels[of.values]] for of in (largest < ROUNDING, largest.isnull()))
        if same:
            size = f" by {ROUNDING:g} or more" if float(largest.where(largest < ROUNDING).max()) else ""
            what = "head" if "change" in numbers else "mean over heads"
            lines.append(f"No {what} changes{size}{' in ' + ', '.join(same) if changed.size or unknown else ''}.")
        if unknown:
            lines.append(f"Not defined for any head on both sides: {', '.join(unknown)}.")
        if apart := numbers.attrs.get("apart"):
            lines.append(f"Left out, as measured with other options: {apart}.")
        heads = ""
        if "n_first" in numbers.attrs:
            n_first, n_second = (counted(int(numbers.attrs[name]), "head") for name in ("n_first", "n_second"))
            heads = f"means over the {n_first} of the one and the {n_second} of the other, "
        kind = "intervals paired by prompt" if numbers.attrs["paired"] else "intervals of two sets of prompts"
        if numbers.data["mean_change"].sel(end=ENDS[1]).isnull().all():
            kind = "too few prompts for intervals"
        names = f"From {numbers.attrs['first']} to {numbers.attrs['second']}"
        moved = []
        if cuts := numbers.attrs.get("cuts"):
            moved.append(f"The reports are of {cuts}: that alone makes numbers differ, those of null models too.")
        if options := numbers.attrs.get("options"):
            moved.append(f"The reports were measured with other options, which alone make numbers differ: {options}.")
        return [f"{names}, {heads}{kind}: {lines[0]}", *moved, *lines[1:]]

    def _sentence(self, numbers: Numbers, number: str) -> str:
        """Return the change of one number."""
        mean, label = numbers("mean_change", number=number), str(numbers.data["label"].sel(number=number).values)
        defined = {kind: tuple(null for null in nulls if null == null) for kind, nulls in mean.by_null.items()}
        mean = replace(mean, by_null={kind: nulls for kind, nulls in defined.items() if nulls})
        average = f"{label}: {mean.with_interval:+.3f} on average{mean.null_in_brackets:+.3f}"
        if "change" not in numbers:
            return f"{average}, from {numbers('mean', report='first', number=number).plain:.3f}."
        value, low, high = (numbers.data["change"].sel(number=number, end=end) for end in ENDS)
        is_sure, n_known = (low > 0) | (high < 0), int(low.notnull().sum())
        heads = f"; in {int(is_sure.sum())} of {counted(n_known, 'head')} the interval leaves out zero"
        changes = value.where(is_sure if n_known else True).transpose(*HEAD).to_series().dropna()
        most = ""
        if len(changes):
            layer, head = changes.abs().idxmax()
            most = f"{', the largest change' if n_known else '; most'} in "
            most += f"{HeadNumber(int(layer), int(head), Number(float(changes[layer, head]))):+.3f}"
        lost = int((numbers.data["value"].sel(number=number).notnull().sum("report") == 1).sum())
        left_out = f"; {counted(lost, 'head')} defined on one side only, left out" if lost else ""
        return f"{average}{heads if n_known else ''}{most}{left_out}."

    def table(self, numbers: Numbers) -> pd.DataFrame:
        changes = numbers.along(numbers.array("mean_change"), "number")
        ends = [[getattr(change, end) for change in changes.values()] for end in ENDS]
        rows: dict[str, Any] = dict(zip(_COLUMNS, [numbers.data["label"].values, *ends], strict=True))
        for side in SIDES:
            rows[numbers.attrs[side]] = [numbers("mean", report=side, number=number).value for number in changes]
        return pd.DataFrame(rows)
