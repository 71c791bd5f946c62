"""The figure of split examples: scores, their position part and their content part, a row a head."""

from itertools import product
from typing import Any

import plotly.graph_objects as go

from tl_posgen.core.formatting import format_number
from tl_posgen.models.selection import head_name
from tl_posgen.position.substitution.numbers import MAPS
from tl_posgen.report.figures import DIVERGING, Panels, drawn_models, model_label, token_map


def draw_maps(result: Any) -> go.Figure:
    """Draw scores, position and content, a row a head; below each head the same one of the random init."""
    models, n = drawn_models(result), result.trained.sizes["example"]
    rows = [(side, data, number) for number, (side, data, _) in product(range(n), models)]
    examples, titles = [data.isel(example=number) for _, data, number in rows], []
    for (side, *_), head in zip(rows, examples, strict=True):
        r_position, r_content, r_of_both = (format_number(float(r), ".2f") for r in head["r"].values)
        titles += [
            f"{head_name(head['layer'], head['head'])}, {head['why'].item()} · {side}",
            f"position, r {r_position}",
        ]
        titles.append(f"content, r {r_content} (both {r_of_both})")
    panels = Panels(titles, columns=3, row_height=300)
    for row, maps in enumerate(examples):
        reach = float(abs(maps["scores"]).quantile(0.98))
        colours = {"colorscale": DIVERGING, "reversescale": True, "zmin": -reach, "zmax": reach}
        for column, name in enumerate(MAPS):
            panels.add(3 * row + column, token_map(maps[name], **colours))
    panels.figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    panels.figure.update_annotations(font_size=11)
    subtitle = (
        "scores within rows, first prompt, first token left out, and their parts: f(q, i - j) with the mean key, "
        "g(q, k) at the mean over distances;<br>r: of the part with the scores. Red high, blue low, a scale a row"
    )
    subtitle += ". Below each head the same one of the random init" if len(models) > 1 else ""
    title = f"Scores, position and content · {model_label(result.trained)}"
    return panels.axes("key", "query").titled(title, subtitle)
