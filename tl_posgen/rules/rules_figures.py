"""Figures of rules: the recall of every head by rule beside the random init, and the cheapest rule of each head."""

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from tl_posgen.report.figures import Panels, model_label, sides
from tl_posgen.report.head_figures import head_names
from tl_posgen.rules.head_rules import ALL, REFERENCES, WORDS
from tl_posgen.rules.numbers.rule_scores import RULES

FEW = 128  # heads whose rule is written into the map; of more the colour bar names it
PLAN_COLOURS = ("#1a9850", "#66bd63", "#a6d96a", "#d9ef8b", "#fee08b", "#fdae61", "#f46d43", "#a50026")


def draw_recall(result: Any) -> go.Figure:
    """Draw the recall of every head, a column a rule and a panel a budget, beside the random init."""
    budgets = result.own["budget"].values
    panels = Panels([f"{budget} keys" for budget in budgets], columns=1, row_height=300)
    rules = [rule for rule in result.own["rule"].values if rule != REFERENCES[1]]
    for side, data, colour in sides(result):
        for number, budget in enumerate(budgets):
            recall = (
                data["recall"].sel(budget=budget, rule=rules, tokens="all").mean("prompt").stack(unit=("layer", "head"))
            )
            points = recall.transpose("rule", "unit")
            names = head_names(points["unit"].values) * len(rules)
            x = np.repeat([WORDS[rule] for rule in rules], points.sizes["unit"])
            dots = go.Box(x=x, y=points.values.ravel(), text=names, name=side, boxpoints="all", pointpos=0, jitter=0.6)
            dots.update(marker={"color": colour, "size": 4}, line={"width": 0})
            dots.update(fillcolor=f"rgba{(*hex_to_rgb(colour), 0.45)}")
            panels.add(number, dots)
    panels.axes("", "recall").figure.update_layout(boxmode="group").update_yaxes(range=[0, 1.03])
    names = [WORDS[rule] for rule in rules]
    for row, budget in enumerate(budgets, 1):
        rises = result.own["rise"].sel(budget=budget, rule=rules).mean("prompt").values
        broken = [
            "<br>".join([*textwrap.wrap(name, 10), f"{rise:+.2f} nats"])
            for name, rise in zip(names, rises, strict=True)
        ]
        panels.figure.update_xaxes(tickvals=names, ticktext=broken, tickangle=0, tickfont_size=10, row=row)
    subtitle = (
        "attention in the keys that a rule keeps / attention in as many best keys, on prompts it was not calibrated "
        "on; a dot a head, the boxes are quartiles; below the names: the rise of the loss with the rule in every head"
    )
    return panels.finish(f"Recall of rules · {model_label(result.own)}", subtitle)


def draw_plan(result: Any) -> go.Figure:
    """Draw the cheapest rule of every key/value head, a panel a budget and model."""
    order = [*(rule for rule in RULES if rule in result.own["rule"].values), ALL]
    both, budgets = sides(result), result.own["budget"].values
    titles = [f"{budget} keys · {side}" for side, _, _ in both for budget in budgets]
    height = max(170, min(28 * result.own.sizes["layer"], 700))
    few = result.own["plan"].isel(budget=0).size <= FEW
    panels = Panels(titles, columns=len(budgets), row_height=height, horizontal_spacing=0.06)
    colours = [*PLAN_COLOURS[: len(order) - 1], PLAN_COLOURS[-1]]
    edges = np.linspace(0, 1, len(order) + 1)
    scale = [(edge, colour) for n, colour in enumerate(colours) for edge in edges[n : n + 2]]
    for row, (_, data, _) in enumerate(both):
        for column, budget in enumerate(budgets):
            plan = data["plan"].sel(budget=budget).transpose("layer", "key_value_head")
            codes = np.vectorize(lambda rule: order.index(rule) if rule in order else np.nan, otypes=[float])(
                plan.values
            )
            words = np.vectorize(lambda rule: WORDS.get(rule, ""), otypes=[object])(plan.values)
            x, y = ([str(one) for one in data[dim].values] for dim in ("key_value_head", "layer"))
            grid = go.Heatmap(z=codes, x=x, y=y, text=words, texttemplate="%{text}" if few else None)
            grid.update(
                coloraxis="coloraxis",
                hovertemplate="layer %{y}, key/value head %{x}: %{text}<extra></extra>",
                textfont_size=9,
            )
            panels.add(row * len(budgets) + column, grid)
    panels.axes("key/value head", "layer").figure.update_xaxes(type="category").update_yaxes(type="category")
    bar = {"tickvals": list(range(len(order))), "ticktext": [WORDS[rule] for rule in order], "thickness": 12}
    axis = {"colorscale": scale, "cmin": -0.5, "cmax": len(order) - 0.5, "showscale": not few, "colorbar": bar}
    panels.figure.update_layout(coloraxis=axis)
    subtitle = (
        f"the cheapest rule of each head, within {result.measure.epsilon:g} nats together on the calibrating prompts"
    )
    return panels.finish(f"Cheapest rules · {model_label(result.own)}", subtitle)
