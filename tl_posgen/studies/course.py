"""Numbers over training: sentences, table and figures of `emergence`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Number, Numbers, intervals_of, mean_of
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.studies.curves import Curve, array_of, bounds_in, chance_array, followed, half_way

LOSS = Curve("loss", "loss")
MOST_ROWS = 20  # of the short table


@dataclass(frozen=True)
class Emergence(Measure):
    """Measures over training checkpoints.

    Every measure over training checkpoints, from step 0, each on the same prompts; means over heads of what every head
    has. Dotted: a randomly initialised model, which is what step 0 should be.

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
                chance = mean_of(chance_array(own, curve).sel(init="trained"))
                sentences.append(
                    f"Random bases with the same spectra reach {float(chance.min()):.3f} to {float(chance.max()):.3f}."
                )
        return sentences

    def course(self, own: Numbers, curve: Curve) -> str:
        """Return "goes from ... to ... (random init ...), largest at ...; half of the change is there by step ..."."""
        steps, names, form = own.data["step"].values, own.data["checkpoint"].values, curve.form
        first, last = (self.number(own, curve, names[place]) for place in (0, -1))
        if len(steps) < 2:
            return f"is {last.with_interval:{form}} at step {steps[0]} ({last.null:{form}})"
        ends = (
            f"goes from {first.with_interval:{form}} at step {steps[0]} to {last.with_interval:{form}} at step "
            f"{steps[-1]} ({last.null:{form}})"
        )
        values = values_of(own, curve)
        if not np.isfinite(values).all():
            return ends
        (early, for_good), top = half_way(values), int(values.argmax())
        largest = ""
        if top not in (0, len(steps) - 1):
            largest = f", and is largest at step {steps[top]} ({values[top]:{form}})"
        lost = f"at step {steps[early]}, is lost again, and is there for good " if early < for_good else ""
        loss = own("loss", checkpoint=names[for_good]).plain
        return f"{ends}{largest}; half of the change is there {lost}by step {steps[for_good]}, at loss {loss:.3f}"

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
        curves = followed(data)
        controls = ["controls"] if any(curve.control for curve in curves) else []
        return ["means", *(["heads"] if self.per_head else []), *controls]

    figures = {
        "means": lambda result: draw_means(result),
        "heads": lambda result: draw_heads(result),
        "controls": lambda result: draw_controls(result),
    }


def values_of(own: Numbers, curve: Curve) -> np.ndarray:
    """Return the value of a curve at every checkpoint."""
    return mean_of(array_of(own, curve).sel(init="trained")).values.astype(np.float64)


def draw_means(result: Any) -> go.Figure:
    """Draw the loss and every curve by step; heads averaged, intervals over prompts where there are any."""
    curves = [LOSS, *(curve for curve in followed(result.dataset) if not curve.control)]
    return over_steps(result, curves, draw_mean, "Emergence over training")


def draw_controls(result: Any) -> go.Figure:
    """Draw the curves that others are compared with."""
    curves = [curve for curve in followed(result.dataset) if curve.control]
    return over_steps(result, curves, draw_mean, "Controls over training")


def draw_heads(result: Any) -> go.Figure:
    """Draw the loss, and one line a head, coloured by layer."""
    curves = [curve for curve in followed(result.dataset) if "head" in result.dataset[curve.name].dims]
    return over_steps(result, [LOSS, *curves], draw_every_head, "Emergence over training, head by head")


def over_steps(result: Any, curves: Sequence[Curve], draw: Callable[..., list[Any]], title: str) -> go.Figure:
    """Draw a panel a curve over step + 1, on a logarithmic axis."""
    own = result.numbers
    x = own.data["step"].values + 1
    panels = Panels([curve.label for curve in curves], row_height=240)
    for number, curve in enumerate(curves):
        panels.add(number, *draw(result, curve, x))
        if own.inits:
            level = float(mean_of(array_of(own, curve).sel(init=own.inits[0])).isel(checkpoint=0))
            label = model_label(result.null)
            panels.add(number, line(x[[0, -1]], np.full(2, level), label, NULL_COLOUR, dash="dot"))
    panels.figure.update_xaxes(tickangle=0)
    panels.axes("step + 1", log_x=True)
    subtitle = "by step + 1, on the same prompts; areas: 95% intervals over prompts; dotted: random init's mean"
    return panels.finish(f"{title} · {model_label(result.own)}", subtitle)


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
    """Draw a line a head."""
    if curve == LOSS:
        return draw_mean(result, curve, x)
    array = mean_of(result.numbers.array(curve.name, **curve.at).sel(init="trained"))
    array = array.mean([dim for dim in array.dims if dim not in ("checkpoint", *HEAD)])
    return [
        line(
            x,
            array.sel(layer=layer, head=head).values,
            f"layer {layer}",
            COLOURS[place % len(COLOURS)],
            width=1.0,
            hovertemplate=f"layer {layer}, head {head}: %{{y:.3f}}<extra></extra>",
        )
        for place, layer in enumerate(array["layer"].values)
        for head in array["head"].values
    ]
