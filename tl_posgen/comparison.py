"""Two reports side by side: what changes per head, between two models, two texts, or under an intervention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.options import fits
from tl_posgen.prompt_groups import GROUP
from tl_posgen.report.figures import DIVERGING, Panels, colour_axis, equality, head_names, heat, sides
from tl_posgen.report.intervals import mean_and_ends, with_ends
from tl_posgen.report.sentences import at_head, extremes, null_of, with_interval
from tl_posgen.result import Report, Result, load
from tl_posgen.stats.intervals import Bounds, difference_interval, jackknife_interval
from tl_posgen.summary import NullSummary, Summary

SIDES = ("first", "second")
DRAWN = 6  # maps of differences: those that change most
SAME_PROMPTS = ("tokens_sha256", "heads")


def compare(first: Any, second: Any, *, names: Sequence[str] | None = None) -> Report:
    """difference = second - first, of every per-head number that two reports share, beside that of their random inits.

    Between a model and what was made of it (fine-tuned, ablated), or between two texts; layers and heads are matched by
    their indices. Where both reports are of the same prompts the 95 % intervals are paired: the same groups of prompts
    are left out of both. Elsewhere they are those of two independent numbers.

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
        >>> found = tl_posgen.compare(whole, whole)["comparison"].dataset
        >>> float(abs(found["difference"]).max()), float(found["difference_high"].max())
        (0.0, 0.0)
    """
    first, second = (load(one) if not isinstance(one, Report) else one for one in (first, second))
    before, after = named(first, second, names)
    paired = all(first.provenance.get(key) == second.provenance.get(key) for key in SAME_PROMPTS)
    pairs = [(first[name], second[name]) for name in first if name in second and name != MEASURE.name]
    own = differences([(one.dataset, other.dataset, one.measure) for one, other in pairs], paired)
    if own is None:
        raise InputError(
            f"no per-head number is in both reports: the first has {', '.join(first)}, the second {', '.join(second)}"
        )
    own = own.assign(change_of_loss(first, second, paired))
    nulls = []
    for seed in range(max(len(one.nulls) for one, _ in pairs)):
        both = [(one, other) for one, other in pairs if seed < min(len(one.nulls), len(other.nulls))]
        nulls.append(differences([(one.nulls[seed], other.nulls[seed], one.measure) for one, other in both], paired))
    said = {"first": before, "second": after, "paired": int(paired), "rows": list(PER_HEAD)}
    own = MEASURE.describe(own.assign_attrs(said, model=f"{after} - {before}"))
    random = [MEASURE.describe(one.assign_attrs(said, model="random init")) for one in nulls if one is not None]
    provenance = {"model": f"{after} beside {before}", "first": first.provenance, "second": second.provenance}
    return Report({MEASURE.name: Result(MEASURE.name, own, tuple(random), provenance)}, provenance)


def change_of_loss(first: Report, second: Report, paired: bool) -> dict[str, Any]:
    """The mean loss of both and its change with an interval over prompts, where both measured it on the same ones."""
    if not paired or not all("loss" in one for one in (first, second)):
        return {}
    before, after = (one["loss"].dataset["loss"].values for one in (first, second))
    return {"loss_first": ((), before.mean())} | mean_and_ends("loss_change", after - before, ())


def named(first: Report, second: Report, names: Any) -> tuple[str, str]:
    """What the two are called: two names that differ."""
    if names is None:
        found = [str(one.provenance.get("model", "model")) for one in (first, second)]
        names = found if found[0] != found[1] else [f"{name} ({side})" for name, side in zip(found, SIDES, strict=True)]
    if not fits(names, Sequence[str]) or len(set(names)) != 2 or len(names) != 2:
        raise InputError(f"names={names!r}: give two that differ, such as ('intact', 'ablated')")
    return names[0], names[1]


def differences(pairs: Sequence[tuple[xr.Dataset, xr.Dataset, Measure]], paired: bool) -> xr.Dataset | None:
    """Every number a head that both of a pair have, over `number`; None where there is none."""
    found = {}
    for first, second, measure in pairs:
        for name, variable in measure.variables.items():
            shown = variable.dims == ("layer", "head") and (variable.headline or variable.interval)
            if shown and name in first and name in second:
                one = difference((first, second), name, paired, variable.bounds)
                if one["difference"].size:
                    found[f"{measure.name}.{name}"] = one.assign(label=variable.label)
    if not found:
        return None
    joined = xr.concat(list(found.values()), pd.Index(list(found), name="number"), join="outer")
    assert isinstance(joined, xr.Dataset)
    return joined


def difference(given: tuple[xr.Dataset, xr.Dataset], name: str, paired: bool, bounds: Bounds | None) -> xr.Dataset:
    """One number of both sides, the difference, and its interval where both have one."""
    both = xr.align(*(one[name].astype(float) for one in given), join="inner")
    change = both[1] - both[0]
    data = {"first": both[0], "second": both[1], "difference": change, "mean_difference": change.mean()}
    each, mean = np.full((2, *change.shape), np.nan), np.full(2, np.nan)
    if all(f"{name}_left_out" in one for one in given):
        without = [one[f"{name}_left_out"].reindex_like(change).transpose(GROUP, ...) for one in given]
        shares = [one["prompt_share"].values for one in given]
        paired = paired and shares[0].tolist() == shares[1].tolist()
        of = interval_of_pairs if paired else independent_interval
        each, mean = (
            of(both, without, shares, over, bounds) for over in (lambda x: x, lambda x: x.mean(("layer", "head")))
        )
    for number, end in enumerate(("low", "high")):
        data[f"difference_{end}"] = (change.dims, each[number])
        data[f"mean_difference_{end}"] = ((), mean[number])
    return xr.Dataset(data)


def interval_of_pairs(both: Any, without: Any, shares: Any, over: Any, bounds: Bounds | None) -> np.ndarray:
    """The interval of a difference of two numbers of the same prompts: each group is left out of both."""
    change, moved = (np.asarray(over(second - first)) for first, second in (both, without))
    most = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    return np.stack(jackknife_interval(change, moved, shares[0], most))


def independent_interval(both: Any, without: Any, shares: Any, over: Any, bounds: Bounds | None) -> np.ndarray:
    """The interval of a difference of two numbers, each of its own prompts."""
    sides = []
    for value, rest, share in zip(both, without, shares, strict=True):
        own = np.asarray(over(value))
        sides.append((own, *jackknife_interval(own, np.asarray(over(rest)), share, bounds)))
    return np.stack(difference_interval(*sides))


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    found: dict[str, Any] = {"first": data.attrs["first"], "second": data.attrs["second"]}
    found |= {"paired": bool(data.attrs["paired"]), "numbers": data["number"].values.tolist()}
    for number in found["numbers"]:
        one = data.sel(number=number)
        key = number.replace(".", "_")
        known = one["difference_low"].notnull()
        changed = known & ((one["difference_low"] > 0) | (one["difference_high"] < 0))
        found |= {f"{key}{end}": float(one[f"mean_difference{end}"]) for end in ("", "_low", "_high")}
        found |= {f"{key}_label": str(one["label"].values), f"{key}_n_changed": int(changed.sum())}
        found |= {f"{key}_n_heads": int(known.sum()), f"{key}_largest": float(abs(one["difference"]).max())}
        at = abs(one["difference"]).to_dataset(name="size")
        found[f"{key}_head"] = extremes(at, "size")["size_highest_head"]
    losses = ("loss_first", "loss_change", "loss_change_low", "loss_change_high")
    return found | {name: float(data[name]) for name in losses if name in data}


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    kind = "paired by prompt" if own["paired"] else "of two sets of prompts"
    lines = [f"What changes from {own['first']} to {own['second']}; intervals {kind}."]
    if "loss_change" in own:
        lines.append(f"Loss: {with_interval(own, 'loss_change', '+.3f')} nats a token, from {own['loss_first']:.3f}.")
    for number in own["numbers"]:
        key = number.replace(".", "_")
        heads = f"; beyond its interval in {own[f'{key}_n_changed']} of {own[f'{key}_n_heads']} heads"
        lines.append(
            f"{own[f'{key}_label']}: {with_interval(own, key, '+.3f')} on average ({null_of(null, key, '+.3f')})"
            f"{heads if own[f'{key}_n_heads'] else ''}; most in {at_head(own[f'{key}_head'], own[f'{key}_largest'])}."
        )
    return lines


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row a number: means over heads on both sides, the mean difference and its interval."""
    frame = pd.DataFrame({"number": data["number"].values, "what": data["label"].values})
    for side in SIDES:
        frame[data.attrs[side]] = data[side].mean(("layer", "head")).values
    for name, column in (
        ("mean_difference", "difference"),
        ("mean_difference_low", "from"),
        ("mean_difference_high", "to"),
    ):
        frame[column] = data[name].values
    return frame


def maps(result: Any) -> go.Figure:
    """Layer x head maps of the differences that are largest beside the spread of their number."""
    data = result.dataset
    size = abs(data["difference"]).mean(("layer", "head")) / data["first"].std(("layer", "head"))
    chosen = data.isel(number=np.argsort(-size.fillna(0).values, kind="stable")[:DRAWN])
    labels = [str(label) for label in chosen["label"].values]
    panels = Panels(labels, columns=3, row_height=max(170, min(28 * data.sizes["layer"], 700)))
    limit = float(abs(chosen["difference"]).max()) or 1.0
    for panel, number in enumerate(chosen["number"].values):
        array = chosen["difference"].sel(number=number, drop=True).transpose("layer", "head")
        panels.add(panel, heat(array, texttemplate="%{z:.2f}" if array.size <= 128 else None))
    panels.axes("head", "layer").figure.update_xaxes(type="category").update_yaxes(type="category")
    panels.figure.update_layout(coloraxis=colour_axis(-limit, limit, DIVERGING))
    return panels.finish(
        f"Difference per head · {data.attrs['model']}", "second less first; the numbers that change most"
    )


def scatter(result: Any) -> go.Figure:
    """Every head of one side against the other, a panel a number; the random inits' in grey."""
    data = result.dataset
    panels = Panels([str(label) for label in data["label"].values], columns=4, row_height=260)
    for side, whole, colour in reversed(sides(result)):
        name = "heads" if whole is data else side
        for panel, number in enumerate(data["number"].values):
            if number in whole["number"]:
                one = whole.sel(number=number).stack(place=("layer", "head"))
                x, y = one["first"].values, one["second"].values
                style = {"size": 6, "opacity": 0.7, "color": colour}
                text = head_names(one["place"].values)
                panels.add(panel, go.Scatter(x=x, y=y, mode="markers", text=text, name=name, marker=style))
    for panel, number in enumerate(data["number"].values):
        both = data[list(SIDES)].sel(number=number).to_array()
        ends = [float(both.min()), float(both.max())]
        panels.add(panel, equality(ends[1]).update(x=ends, y=ends))
    panels.axes(data.attrs["first"], data.attrs["second"])
    return panels.finish(f"Heads on both sides · {data.attrs['model']}", "the dotted line: nothing changes")


PER_HEAD = ("number", "layer", "head")
INTERVAL = "of the 95 % interval over prompts"
MEASURE = Measure(
    name="comparison",
    question="What changes?",
    explanation=(
        "Every per-head number that both reports have, head by head: the second less the first. Intervals over prompts "
        "are paired where both are of the same prompts. One head in twenty lies beyond its own interval by chance."
    ),
    source="ours",
    variables={
        "first": Variable("first", dims=PER_HEAD),
        "second": Variable("second", dims=PER_HEAD),
        "difference": Variable("difference", "", "second - first", PER_HEAD),
        "difference_low": Variable("difference, lower end", "", INTERVAL, PER_HEAD),
        "difference_high": Variable("difference, upper end", "", INTERVAL, PER_HEAD),
        "mean_difference": Variable("mean difference", "", "over heads", ("number",)),
        "mean_difference_low": Variable("mean difference, lower end", "", INTERVAL, ("number",)),
        "mean_difference_high": Variable("mean difference, upper end", "", INTERVAL, ("number",)),
        "loss_first": Variable("loss of the first", "nats", "mean over prompts and tokens", ()),
        **with_ends("loss_change", "change of the loss", "nats", "second - first, prompt by prompt", ()),
        "label": Variable("what the number is called", dims=("number",)),
    },
    summarise=summarise,
    findings=findings,
    figures={"maps": maps, "heads": scatter},
    table=table,
    legend="means over heads of both sides; from, to: 95% interval of the mean difference.",
)
