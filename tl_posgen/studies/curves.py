"""Numbers of many models: which are kept of a result, and which are followed over checkpoints and models."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import ALL, MOST_LABELS, NUMBER_DIMS, TRAINED, Numbers, at_init, mean_of, mean_over
from tl_posgen.core.result import Result
from tl_posgen.interventions import UNTOUCHED, Interventions
from tl_posgen.report.figures import evenly

_MOST_OTHERS = 3  # numbers followed of a measure that is not named here
RECOVERED = "recovered"
_MOST_CONDITIONS = 6  # followed of a measure that has conditions


@dataclass(frozen=True)
class Followed:
    """A number that is followed over checkpoints or models: the mean over heads, or over what else it ranges.

    Attributes:
        name: of the variable, "<measure>_<its name there>".
        label: above its panel and its column.
        sentence: how a sentence on it begins; "" for none.
        form: of the number there.
        at: labels of the variable's dims.
        effect: of a number by condition, what it is: "share of the loss recovered".
        condition: which one, in words.
    """

    name: str
    label: str
    sentence: str = ""
    form: str = ".3f"
    at: Mapping[str, Any] = field(default_factory=dict)
    effect: str = ""
    condition: str = ""

    @property
    def title(self) -> str:
        """The label above a panel, a condition on a line of its own."""
        return self.label.replace(": ", "<br>")

    def array(self, numbers: Numbers) -> xr.DataArray:
        """Return its array, with the dims init, group or prompt, of heads, and those of the study."""
        return numbers.array(self.name, **self.at)


ALIGNED = {"version": "absolute", "bases": "aligned"}
_LATER = {"tokens": "without first"}
FOLLOWED = {
    "three_axis": (
        Followed("three_axis_r", "r"),
        Followed(
            "three_axis_r_within_rows", "r within rows", "The correlation within rows with position + query + key"
        ),
    ),
    "variance": (
        Followed(
            "variance_position", "position", "The share of position in the variance that softmax can see", ".0%", _LATER
        ),
        Followed("variance_content", "content", form=".0%", at=_LATER),
        Followed("variance_interaction", "interaction", "The share of interaction", ".0%", _LATER),
    ),
    "loss": (Followed("loss_loss", "loss", "The loss in nats per token"),),
    "mean_key": (),  # follows three_axis
    "slash": (Followed("slash_score", "slash"),),
    "coupling": (
        Followed("coupling_coupling", "coupling", "Coupling", at=ALIGNED),
        Followed("coupling_chance", "random bases", "Coupling of random bases", at={"version": "absolute"}),
        Followed("coupling_line_shape_score", "line-shape score", "The line-shape score"),
        Followed("coupling_growth_r2", "R² of growth", "R² of exponential growth"),
        Followed("coupling_expodistance", "expodistance", "Expodistance"),
    ),
}


def numbers_of(results: Iterable[Result]) -> xr.Dataset:
    """Return the numbers of one model's results as "<measure>_<variable>", or the variable alone where it begins with
    its measure's name: of every head, or means over all but heads.

    Dims are init, group or prompt, tokens, side, layer and head, condition, and dims whose labels are words; along
    others a variable is taken at its measure's usual label, or averaged. A variable that has a curve for every head is
    left out. Of a measure with conditions there is also what they do: "<measure>_recovered" where it has a control,
    else "<measure>_rise" of the loss, or "<measure>_<variable>_change", over the unchanged model.
    """
    headlines: dict[str, xr.DataArray] = {}
    other_variables: dict[str, xr.DataArray] = {}
    for result in results:
        usual, of_result = {**result.measure.usual(), "end": "value"}, dict[str, str]()
        for name, array in result.dataset.data_vars.items():
            if array.dtype.kind not in "fiub":
                continue
            worded = [dim for dim in array.dims if _is_worded(array, dim)]
            places = _places(array, usual)
            array = array.drop_vars("init_label", errors="ignore").astype(float)
            array = array.sel({dim: usual[dim] for dim in array.dims if dim in usual and dim not in worded}, drop=True)
            over = [dim for dim in array.dims if dim not in (*NUMBER_DIMS, "tokens", "side", *worded)]
            if set(HEAD) <= set(over):
                over = [dim for dim in over if dim not in HEAD]
                if over:
                    continue
            array = array.mean([*over, *(dim for dim in array.dims if dim == "item")])
            without_scalars = array.drop_vars([name for name, coord in array.coords.items() if not coord.ndim])
            variable = result.measure.variables.get(str(name))
            attrs = {"measure": result.name, "long_name": variable.label if variable else str(name)}
            attrs |= {"units": variable.unit} if variable and variable.unit else {}
            attrs["range"] = list(map(float, variable.bounds if variable and variable.bounds else ()))
            labels = {str(dim): str(usual[dim]) for dim in worded if dim in usual and dim != "condition"}
            attrs |= {"usual": json.dumps(labels)} if labels else {}
            attrs |= {"places": places} if places and "condition" in array.dims else {}
            place = headlines if variable and variable.headline else other_variables
            full = str(name) if str(name).startswith(f"{result.name}_") else f"{result.name}_{name}"
            place[full] = without_scalars.assign_attrs(attrs)
            of_result[str(name)] = full
        if any("condition" in {**headlines, **other_variables}[full].dims for full in of_result.values()):
            for name, effect in _effects(result, of_result, {**headlines, **other_variables}).items():
                headlines[f"{result.name}_{name}"] = effect.assign_attrs(measure=result.name)
    return xr.Dataset(_of_one_grouping({**headlines, **other_variables}))


def _places(array: xr.DataArray, usual: Mapping[str, Any]) -> str:
    """Return " (task text, gap 0, mean over ratio)": where a number by condition is taken along its other dims."""
    others = [dim for dim in array.dims if dim not in (*NUMBER_DIMS, *HEAD, "condition", "tokens", "side")]
    several = [str(dim) for dim in others if array.sizes[dim] > 1]
    words = [f"{dim} {usual[dim]}" if dim in usual else f"mean over {dim}" for dim in several]
    return in_brackets(", ".join(words))


def _is_worded(array: xr.DataArray, dim: Any) -> bool:
    """Return whether a dim stays: names of conditions, however many; other words, if few."""
    is_few = dim in array.coords and array.sizes[dim] <= MOST_LABELS
    return dim == "condition" or (is_few and array[dim].dtype.kind in "OU" and dim not in NUMBER_DIMS)


def _effects(
    result: Result, full_names: Mapping[str, str], arrays: Mapping[str, xr.DataArray]
) -> dict[str, xr.DataArray]:
    """Return what the conditions of a measure do, all but the unchanged and the control, by name.

    With a control, the share of the loss that is recovered. Else of every headline, or of the first variable where no
    headline has conditions, its change over the unchanged model; where that is no condition, the variable itself, which
    says what changes.
    """
    measure, numbers = result.measure, result.numbers
    words = {"words": json.dumps({name: measure.in_words(name) for name in _conditions_of(result)})}
    if isinstance(measure, Interventions) and measure.control:
        share = measure.recovered_of(numbers).drop_sel(condition=[UNTOUCHED, measure.control])
        share = share.drop_vars(
            [name for name, coord in share.coords.items() if not coord.ndim or name == "init_label"]
        )
        attrs = {"effect": "share of the loss recovered", "short": RECOVERED, "range": [-np.inf, 1.0]}
        share = share if "group" in share.dims else share.expand_dims(group=[ALL])  # of few prompts
        share.attrs = attrs | words
        return {"recovered": share} if share.sizes["condition"] else {}
    declared = [
        name for name in measure.variables if name in full_names and "condition" in arrays[full_names[name]].dims
    ]
    headlines = [name for name in declared if measure.variables[name].headline]
    effects: dict[str, xr.DataArray] = {}
    for name in headlines or declared[:1]:
        variable, array = measure.variables[name], _over_usual_values(result, name, arrays[full_names[name]])
        is_rise = isinstance(measure, Interventions) and name == "loss"
        what = "rise of the loss" if is_rise else variable.label
        if UNTOUCHED in array["condition"].values:
            what = what if is_rise else f"change of {what}"
            unchanged = array.sel(condition=UNTOUCHED, drop=True)
            array = (array - unchanged).drop_sel(condition=UNTOUCHED).assign_attrs(array.attrs)
        in_units = f" in {variable.unit}" if variable.unit else ""
        attrs = {"effect": what + in_units + array.attrs.get("places", ""), "short": what, "range": []}
        if array.sizes["condition"]:
            effects["rise" if is_rise else f"{name}_change"] = array.assign_attrs(attrs | words)
    return effects


def _over_usual_values(result: Result, name: str, array: xr.DataArray) -> xr.DataArray:
    """Return a number by condition as its mean over dims whose usual label is a value, such as a gap of 0, where an
    intervention may do nothing; as it is where there is none."""
    whole, usual = result.dataset[name].drop_vars("init_label", errors="ignore").astype(float), result.measure.usual()
    valued = [dim for dim in whole.dims if dim in usual and whole[dim].dtype.kind not in "OU"]
    if not valued:
        return array
    mean = whole.mean([dim for dim in whole.dims if dim not in array.dims])
    without_scalars = mean.drop_vars([coord for coord, labels in mean.coords.items() if not labels.ndim])
    others = {dim: label for dim, label in usual.items() if dim not in valued}
    return without_scalars.assign_attrs({**array.attrs, "places": _places(whole, others)})


def _conditions_of(result: Result) -> list[str]:
    return [str(name) for name in result.dataset["condition"].values]


def _of_one_grouping(arrays: Mapping[str, xr.DataArray]) -> dict[str, xr.DataArray]:
    """Return arrays of which those with other groups of prompts than the first have the estimate alone."""
    shares = [array["prompt_share"] for array in arrays.values() if "prompt_share" in array.coords]
    return {
        name: array.sel(group=[ALL]).drop_vars("prompt_share")
        if "prompt_share" in array.coords and not array["prompt_share"].equals(shares[0])
        else array
        for name, array in arrays.items()
    }


def followed(data: xr.Dataset) -> list[Followed]:
    """Return what is followed of every measure in the data.

    Of a measure with conditions, what a few of them do; nothing of the unchanged model, whose own numbers are
    not the measure's. Of one that is not named here, its first few numbers.
    """
    curves = []
    for measure in np.atleast_1d(data.attrs["measures"]):
        arrays = {str(name): array for name, array in data.data_vars.items() if array.attrs.get("measure") == measure}
        if measure in FOLLOWED:
            curves += [curve for curve in FOLLOWED[measure] if curve.name in arrays]
        elif any("condition" in array.dims for array in arrays.values()):
            for name, of_effect in effects_in(data).items():
                curves += few_of(of_effect) if name in arrays else []
        else:
            for name in [*arrays][:_MOST_OTHERS]:
                label, at = name.replace("_", " "), json.loads(arrays[name].attrs.get("usual", "{}"))
                curves.append(Followed(name, label, label[:1].upper() + label[1:], at=at))
    return curves


def effects_in(data: xr.Dataset) -> dict[str, list[Followed]]:
    """Return by the name of a variable what every condition does, the largest first: shares recovered from the highest
    to the lowest, changes from the furthest from zero; those without a number left out."""
    effects: dict[str, list[Followed]] = {}
    for name, array in data.data_vars.items():
        if not (effect := array.attrs.get("effect")):
            continue
        usual, words = json.loads(array.attrs.get("usual", "{}")), json.loads(array.attrs["words"])
        trained = mean_of(at_init(array.sel(usual), TRAINED))
        sizes = trained if array.attrs["short"] == RECOVERED else abs(trained)
        values = mean_over(sizes, [dim for dim in trained.dims if dim != "condition"]).dropna("condition")
        title = array.attrs["measure"].replace("_", " ")
        effects[str(name)] = []
        for condition in values["condition"].values[np.argsort(-values.values, kind="stable")].tolist():
            label = words.get(condition, condition)
            sentence = f"{title[:1].upper()}{title[1:]}, {label}: the {effect}"
            form = ".0%" if array.attrs["short"] == RECOVERED else "+.3f"
            what = f"{title}, {array.attrs['short']}: {label}"
            at = {**usual, "condition": condition}
            effects[str(name)].append(Followed(str(name), what, sentence, form, at, effect, label))
    return effects


def few_of(curves: Sequence[Followed]) -> list[Followed]:
    """Return what a few conditions do, of those of an effect in their order: shares recovered from the highest to the
    lowest, as the highest may be of hardly any change; the largest changes."""
    is_share = bool(curves) and RECOVERED in curves[0].effect
    return evenly([*curves], _MOST_CONDITIONS) if is_share else [*curves[:_MOST_CONDITIONS]]


def has_numbers(array: xr.DataArray) -> bool:
    """Return whether a panel of the model's part of an array would show anything."""
    return bool(np.isfinite(at_init(array, TRAINED)).any())


def is_per_token(curve: Followed, data: xr.Dataset) -> bool:
    """Return whether a number is in nats per token, which models of other tokenizers have of other tokens."""
    return str(data[curve.name].attrs.get("units", "")).startswith("nats")


def at_last_revision(curve: Followed) -> Callable[[Numbers], xr.DataArray]:
    """Return the function of the `Numbers` that gives a followed number at each model's last finished revision."""

    def array(numbers: Numbers) -> xr.DataArray:
        finished = numbers.data["finished"].any("text").transpose("model", "revision")
        last = finished.sizes["revision"] - 1 - finished[:, ::-1].argmax("revision")
        return curve.array(numbers).isel(revision=last.drop_vars("revision", errors="ignore"))

    return array


def same_tokens(data: xr.Dataset) -> list[list[tuple[str, str]]]:
    """Return the models at their revisions in groups that read every text, where both have read it, as the same
    tokens."""
    groups: list[list[tuple[str, str]]] = []
    if "tokenization" not in data:
        return [list(product(data["model"].values.tolist(), data["revision"].values.tolist()))]
    read = data["tokenization"].transpose("model", "revision", "text")
    rows = {
        (model, revision): read.sel(model=model, revision=revision).values
        for model, revision in product(read["model"].values.tolist(), read["revision"].values.tolist())
    }
    for place, row in rows.items():
        if np.isnan(row).all():
            continue
        for group in groups:
            others = np.array([rows[other] for other in group])
            if ((others == row) | np.isnan(others) | np.isnan(row)).all() and (others == row).any():
                group.append(place)
                break
        else:
            groups.append([place])
    return groups
