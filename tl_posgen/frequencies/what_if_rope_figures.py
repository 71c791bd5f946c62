"""Figures of other frequencies: mean curves before and after, and distortion beside the rise of the loss."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import COLOURS, Panels, at_labels, line, model_label, sides
from tl_posgen.report.head_figures import head_names, head_points
from tl_posgen.slash.layer_means import strongest

MOST_HEADS = 6


def draw_curves(result: Any) -> go.Figure:
    """Draw a(d) and a'(d) of the heads whose own mean curve stands out most from its mean, in sd of scores."""
    data, own = result.own, result.own["curve"].sel(rule="unchanged", drop=True)
    heads = strongest((own.max("distance") - own.mean("distance")) / data["sd"], MOST_HEADS)
    panels = Panels(head_names(heads), columns=3)
    rules, largest = data["rule"].values, max(result.measure.factors)
    few = [rule for rule, of in result.measure.labelled.items() if of is None or of.factor in (None, largest)]
    shown = {rule: True if rule in few else "legendonly" for rule in rules}
    for number, (layer, head) in enumerate(heads):
        one = data["curve"].sel(layer=layer, head=head)
        for place, rule in enumerate(rules):
            colour = "black" if place == 0 else COLOURS[(place - 1) % len(COLOURS)]
            look: Any = {"width": 1.2 + (place == 0), "visible": shown[rule]}
            panels.add(number, line(one["distance"].values + 1, one.sel(rule=rule).values, str(rule), colour, **look))
    panels.axes("distance + 1", "logits", log_x=True)
    inside = result.measure.inside
    panels.figure.add_vline(x=inside, line_dash="dot", line_width=1) if inside and heads else None
    hidden = "; a click on a pale name draws it" if "legendonly" in shown.values() else ""
    subtitle = (
        f"score of the mean query and mean key by distance, first token left out; dotted: the prompts' length{hidden}"
    )
    return panels.finish(f"Mean curves at other frequencies · {model_label(data)}", subtitle)


def draw_check(result: Any) -> go.Figure:
    """Draw the rise of the loss with one head alone changed by its distortion, a panel a rule."""
    rules = list(result.own["rule"].values)[1:]
    panels = Panels(rules, columns=4)
    for side, data, colour in reversed(sides(result)):
        for change, symbol in (("random", "x"), ("rule", "circle")):
            at = {"change": change, "times": 1, "rule": None}
            columns = {name: at_labels(result, data[name], at | {"rule": rules}) for name in ("distortion", "rise")}
            columns["rise"] = columns["rise"].mean("prompt")
            heads = xr.Dataset(columns).stack(unit=("layer", "head"))
            look: Any = {"name": f"{side}, {change}", "marker": {"color": colour, "symbol": symbol, "size": 6}}
            for number, rule in enumerate(rules):
                one = heads.sel(rule=rule)
                panels.add(number, head_points(one["distortion"], one["rise"], **look))
    panels.axes("forecast distortion", "rise of the loss, nats")
    subtitle = "one head alone changed; a point a head; random: a random change of the same total angle"
    return panels.finish(f"Distortion and loss · {model_label(result.own)}", subtitle)
