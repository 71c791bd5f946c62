"""Numbers over training: sentences, table and figures of `emergence`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import TRAINED, Number, Numbers, intervals_of, mean_of
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.studies.curves import Curve, array_of, bounds_in, chance_array, followed, half_way

LOSS = Curve("loss", "loss")
MOST_ROWS = 20  # of the short table


def over_steps(kind: str, title: str) -> Callable[[Any], go.Figure]:
    """Return a figure with a panel a curve over step + 1, on a logarithmic axis: means, heads or controls."""

    def figure(result: Any) -> go.Figure:
        own, curves = result.numbers, followed(result.dataset)
        chosen = {
            "means": [LOSS, *(curve for curve in curves if not curve.control)],
            "heads": [LOSS, *(curve for curve in curves if "head" in result.dataset[curve.name].dims)],
            "controls": [curve for curve in curves if curve.control],
        }[kind]
        x = own.data["step"].values + 1
        panels = Panels([curve.label for curve in chosen], row_height=240)
        for number, curve in enumerate(chosen):
            draw = draw_mean if kind != "heads" or curve == LOSS else draw_every_head
            panels.add(number, *draw(result, curve, x))
            if own.inits:
                level = float(mean_of(array_of(own, curve).sel(init=own.inits[0])).isel(checkpoint=0))
                label = model_label(result.null)
                panels.add(number, line(x[[0, -1]], np.full(2, level), label, NULL_COLOUR, dash="dot"))
        panels.figure.update_xaxes(tickangle=0)
        panels.axes("step + 1", log_x=True)
        areas = "; areas: 95% intervals over prompts" if list(panels.figure.select_traces({"fill": "toself"})) else ""
        dotted = "; dotted: random init's mean" if own.inits else ""
        subtitle = f"by step + 1, on the same prompts{areas}{dotted}"
        return panels.finish(f"{title} · {model_label(result.own)}", subtitle)

    return figure


def draw_mean(result: Any, curve: Curve, x: np.ndarray) -> list[Any]:
    """Draw the mean of a curve with its interval, and random bases where it has them."""
    own = result.numbers
    ends = intervals_of(array_of(own, curve), bounds_in(own, curve))
    shown = {"mode": "lines+markers", "showlegend": False}
    found: list[Any] = []
    if bool(ends["low"].notnull().any()):
        found.append(band(x, ends["low"].values, ends["high"].values, "interval").update(showlegend=False))
    found.append(line(x, ends["value"].values, model_label(result.own), COLOURS[0], **shown))
    if curve.chance is not None:
        chance = mean_of(own.of_side(chance_array(own, curve))).values
        found.append(line(x, chance, "random bases", COLOURS[1], mode="lines+markers"))
    return found


def draw_every_head(result: Any, curve: Curve, x: np.ndarray) -> list[Any]:
    """Draw a line a head, coloured by layer."""
    array = mean_of(result.numbers.array(curve.name, **curve.at).sel(init=TRAINED))
    array = array.mean([dim for dim in array.dims if dim not in ("checkpoint", *HEAD)])
    found = []
    for place, layer in enumerate(array["layer"].values):
        for head in array["head"].values:
            hover = f"{head_name(layer, head)}: %{{y:.3f}}<extra></extra>"
            shown = {"width": 1.0, "hovertemplate": hover}
            y, colour = array.sel(layer=layer, head=head).values, COLOURS[place % len(COLOURS)]
            found.append(line(x, y, f"layer {layer}", colour, **shown))
    return found


@dataclass(frozen=True)
class Emergence(Measure):
    """Measures over training checkpoints.

    Every measure over training checkpoints, each on the same prompts; means over heads of what every head has. Dotted:
    a randomly initialised model, as training begins.

    Args:
        per_head: whether a measure has a number for every head, which are the rows of its frame then.

    Source: that it be followed through training: Aubry et al. 2024, and readers of Han & Ji 2025; how: ours
    """

    per_head: bool = True

    question = "When does it form?"
    variables = {
        "loss": Variable("loss", "nats", "per token", ("checkpoint", "prompt")),
        "step": Variable("step", "", "the number in a checkpoint's name, or its place", ("checkpoint",)),
    }

    @property
    def rows(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("checkpoint", *HEAD) if self.per_head else ("checkpoint",)

    def number(self, own: Numbers, curve: Curve, checkpoint: Any) -> Number:
        """Return the number of a curve at one checkpoint."""
        return own.number(array_of(own, curve, checkpoint=checkpoint), bounds_in(own, curve))

    def at_steps(self, own: Numbers, name: str) -> dict[int, Number]:
        """Return the number of a followed variable at every step; {} where it was not measured."""
        curves = [curve for curve in followed(own.dataset) if curve.name == name][:1]
        places = zip(own.data["step"].values.tolist(), own.data["checkpoint"].values, strict=True)
        return {step: self.number(own, curve, place) for step, place in places for curve in curves}

    def findings(self, own: Numbers) -> list[str]:
        steps, names, sentences = own.data["step"].values, own.data["checkpoint"].values, []
        if len(steps) > 1:
            first, last = (own("loss", checkpoint=names[place]).plain for place in (0, -1))
            sentences.append(
                f"From step {steps[0]} to step {steps[-1]} the loss goes from {first:.3f} to {last:.3f} nats."
            )
        for curve in followed(own.dataset):
            if curve.sentence:
                sentences.append(f"{curve.sentence} {self.course(own, curve)}.")
            if curve.chance is not None:
                chance = mean_of(chance_array(own, curve).sel(init=TRAINED)).values
                sentences.append(f"Random bases with the same spectra reach {chance.min():.3f} to {chance.max():.3f}.")
        return sentences

    def course(self, own: Numbers, curve: Curve) -> str:
        """Return "goes from ... to ... (random init ...), largest at ..., lowest at ...; half of the change is there by
        step ...": lowest where both ends are a quarter of the curve's range above, the last where they are at least
        half of it apart."""
        steps, names, form = own.data["step"].values, own.data["checkpoint"].values, curve.form
        first, last = (self.number(own, curve, names[place]) for place in (0, -1))
        if len(steps) < 2:
            return f"is {last.with_interval:{form}} at step {steps[0]}{last.null_in_brackets:{form}}"
        ends = (
            f"goes from {first.with_interval:{form}} at step {steps[0]} to {last.with_interval:{form}} at step "
            f"{steps[-1]}{last.null_in_brackets:{form}}"
        )
        values = values_of(own, curve)
        if not np.isfinite(values).all():
            return ends
        (early, for_good), span = half_way(values), np.ptp(values)
        top, bottom = int(values.argmax()), int(values.argmin())
        named = [f"largest at step {steps[top]} ({values[top]:{form}})"] if 0 < top < len(steps) - 1 else []
        if min(values[0], values[-1]) - values[bottom] > span / 4:
            named.append(f"lowest at step {steps[bottom]} ({values[bottom]:{form}})")
        extremes = f", and is {' and '.join(named)}" if named else ""
        if abs(values[-1] - values[0]) <= span / 2:
            return f"{ends}{extremes}"  # a peak or a dip, and no change
        lost = f"at step {steps[early]}, is lost again, and is there for good " if early < for_good else ""
        loss = own("loss", checkpoint=names[for_good]).plain
        return f"{ends}{extremes}; half of the change is there {lost}by step {steps[for_good]}, at loss {loss:.3f}"

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a checkpoint: the loss and every curve. At most 20 rows, spread over all of them."""
        names = own.data["checkpoint"].values
        frame = pd.DataFrame({"checkpoint": names, "loss": [own("loss", checkpoint=name).value for name in names]})
        for curve in followed(own.dataset):
            if not curve.column:
                continue
            numbers = [self.number(own, curve, name) for name in names]
            known = any(one.low == one.low for one in numbers)
            form = curve.form if known else ""
            frame[curve.label] = [f"{one.with_interval:{form}}" if known else one.value for one in numbers]
            if curve.chance is not None:
                frame["random bases"] = mean_of(own.of_side(chance_array(own, curve))).values
        n = len(frame)
        return frame.iloc[sorted({round(i * (n - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})]

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no heads where no measure is of heads, no controls where nothing has any."""
        drawn = {"means": True, "heads": self.per_head, "controls": any(curve.control for curve in followed(data))}
        return [kind for kind, has_data in drawn.items() if has_data]

    figures = {
        "means": over_steps("means", "Emergence over training"),
        "heads": over_steps("heads", "Emergence over training, head by head"),
        "controls": over_steps("controls", "Controls over training"),
    }


def values_of(own: Numbers, curve: Curve) -> np.ndarray:
    """Return the value of a curve at every checkpoint."""
    return mean_of(array_of(own, curve).sel(init=TRAINED)).values.astype(np.float64)
