"""The figure of emergence head by head: a panel a number, a line a head over the steps of training."""

from itertools import product
from typing import Any

import plotly.graph_objects as go

from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import TRAINED, mean_of
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import COLOURS, Panels, line, model_label
from tl_posgen.studies.curves import followed

SAME = "by step + 1, on the same prompts"


def draw_heads(result: Any) -> go.Figure:
    """Draw a panel a number over step + 1, on a logarithmic axis: a line a head, coloured by layer."""
    curves = [curve for curve in followed(result.dataset) if "head" in result.dataset[curve.name].dims]
    panels = Panels([curve.label for curve in curves], row_height=240)
    for panel, curve in enumerate(curves):
        array = mean_of(curve.array(result.numbers).sel(init=TRAINED))
        array = array.mean([dim for dim in array.dims if dim not in ("checkpoint", *HEAD)])
        for layer, head in product(array["layer"].values, array["head"].values):
            look: dict[str, Any] = {"hovertemplate": f"{head_name(layer, head)}: %{{y:.3f}}<extra></extra>", "width": 1}
            y, colour = array.sel(layer=layer, head=head).values, COLOURS[layer % len(COLOURS)]
            panels.add(panel, line(result.trained["step"].values + 1, y, f"layer {layer}", colour, **look))
    title = f"Emergence over training, head by head · {model_label(result.trained)}"
    return panels.axes("step", log_x=True).titled(title, SAME)
