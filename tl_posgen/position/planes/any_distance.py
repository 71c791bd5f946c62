"""Any function of distance made by a head with RoPE, exactly, and as near as a model's own frequencies come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, Within
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.position.decomposition.variance import moments_of, shares_of
from tl_posgen.position.planes.made_scores import (
    INVERSE_DFT,
    Table,
    as_table,
    example_functions,
    least_additive,
    made_scores,
)
from tl_posgen.position.planes.rope_layers import require_rope
from tl_posgen.report.figures import COLOURS, Panels, finish, line, model_label, sides
from tl_posgen.report.head_figures import head_names
from tl_posgen.rope.rotation import complex_frequencies

RCONDS = (1e-12, 1e-2)  # the best fit, whatever its logits, and one whose planes hardly cancel
MOST = 2**12  # distances: the head by inverse DFT has half as many planes
ROWS = 20  # of the short table

ROW = ("function", "planes")
LARGEST = "largest sum_m |z^q_m z^k_m| of a token pair; far above |F|: planes that cancel"
Rcond = Annotated[int | float, Within(0, 1, "a number between 0 and 1", excluded=("low", "high"))]


def draw_functions(result: Any) -> go.Figure:
    """Draw each function with the scores of the head made for it, and of the fits with the model's own frequencies."""
    data = result.own
    names = [str(name) for name in data["function"].values]
    errors = {
        name: ", ".join(format_number(error, ".2g") for error in data["error"].sel(function=name).values.tolist())
        for name in names
    }
    look: dict[str, Any] = {"row_height": 130, "shared_xaxes": True, "vertical_spacing": 0.3 / len(names)}
    panels = Panels([f"{name}: errors {errors[name]}" for name in names], columns=1, **look)
    x = data["distance"].values
    for panel, name in enumerate(names):
        one = data.sel(function=name)
        panels.add(panel, line(x, one["values"].values, "the function", "black", width=5, opacity=0.25))
        for number, planes in enumerate(str(planes) for planes in data["planes"].values):
            look = {"mode": "lines+markers" if planes == INVERSE_DFT else "lines", "marker": {"size": 4}}
            look["hovertemplate"] = f"{planes}, distance %{{x}}: %{{y:.3f}}<extra></extra>"
            scores = one["scores"].sel(planes=planes).values
            panels.add(panel, line(x, scores, planes, COLOURS[number % len(COLOURS)], width=1.5, **look))
    panels.axes("distance").figure.update_annotations(font_size=11)
    panels.figure.update_layout(legend={"orientation": "h", "y": -0.06, "x": 0})
    subtitle = (
        "errors in the order of the legend, relative to the function's standard deviation; fits with the model's own "
        "frequencies, the larger rcond with smaller logits; of token pairs the first is drawn"
    )
    return panels.finish(f"RoPE can take on any function of distance · {model_label(data)}", subtitle)


def draw_heads(result: Any) -> go.Figure:
    """Draw how near each head's scores are to f(q, d) + g(q, k), beside the least additive of the functions."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        values = data["head_additive_r"].to_series().dropna()
        box = go.Box(x=values.values, name=side, boxpoints="all", pointpos=0, jitter=0.6, fillcolor="rgba(0,0,0,0)")
        box.update(marker={"color": colour, "size": 6}, line={"width": 1}, text=head_names(values.index))
        figure.add_trace(box.update(hovertemplate="%{text}: %{x:.3f}<extra></extra>", showlegend=False))
    least = least_additive(result.own)
    marker = {"symbol": "star", "size": 13, "color": COLOURS[1]}
    x, y = [float(least["additive_r"])], [f"made by {INVERSE_DFT}:<br>{least['function'].item()}"]
    point = go.Scatter(x=x, y=y, mode="markers", marker=marker, showlegend=False)
    figure.add_trace(point.update(hovertemplate="%{x:.3f}<extra></extra>"))
    figure.update_xaxes(title_text="correlation of the scores with the best f(q, d) + g(q, k)", range=[0, 1.02])
    figure.update_yaxes(autorange="reversed")
    subtitle = "a point a head, over all (query, key, distance); below, the least additive of the functions"
    title = f"What was learned instead · {model_label(result.own)}"
    return finish(figure, title, subtitle).update_layout(margin={"l": 150})


@dataclass(frozen=True)
class AnyDistance(Measure):
    r"""score(a, b, d) = F(a, b, d) for any F on d < N: with planes at theta_m = 2 pi m / N exactly, with a model's own
    frequencies as near as least squares gets; beside it how additive the model's heads are.

    Planes at the frequencies 2 pi m / N give a head any function of distance, even a different one for every pair of
    tokens. Beside it stand the best fit with the model's own frequencies, and what its heads have learned: scores that
    are nearly f(q, d) + g(q, k).

    So heads that do not entangle distance and content have learned it. The fit gives every token pair its own
    coefficients; a real head has one vector per token, which allows less. A row per (function, planes): planes are
    "inverse DFT", or those of layers with the same frequencies and an rcond. Random init has only the heads. Chosen
    layers are those that are fitted, and whose heads stand beside.

    Args:
        n_distances: N.
        functions: name -> F, [distance] or [query_token, key_token, distance], on N distances; if left out those of
            `example_functions`, drawn with the seed of the analysis.
        rconds: cutoff of the least squares, see `fit_frequencies`: a larger one has a larger error, smaller logits.

    Raises:
        InputError: functions that are none on N distances.
        UnsupportedModelError: a model without RoPE in the chosen layers.

    Source: the argument: Han & Ji 2025 (arXiv 2503.13305); construction, fits and comparison: our reconstruction

    Example:
        >>> text = "Down, down, down. Would the fall never end?"
        >>> found = AnyDistance(n_distances=16)("mini", text, length=12, n_prompts=1, null_seeds=(), progress=False)
        >>> bool((found.sel(planes="inverse DFT")["error"] < 1e-6).all())
        True
    """

    n_distances: Annotated[int, Within(2, MOST, f"a whole number, 2 to {MOST}")] = 64
    functions: Mapping[str, Any] | None = None
    rconds: Annotated[Sequence[Rcond], Each()] = RCONDS

    question = "Could RoPE entangle position and content?"
    rows = ROW
    variables = {
        "n_planes": Variable("planes", "", "how many planes the head has", ROW),
        "error": Variable("relative error", "", "root mean square, over the function's standard deviation", ROW),
        "largest_logit": Variable("largest logit", "logits", LARGEST, ROW),
        "largest_value": Variable("largest value", "logits", "of |F|", ROW),
        "additive_r": Variable("additive r", "", "corr of the scores with the best f(q, d) + g(q, k)", ROW),
        "scores": Variable("scores", "logits", "of the first token pair", (*ROW, "distance")),
        "values": Variable("the function", "logits", "F of the first token pair", ("function", "distance")),
        "head_additive_r": Variable("additive r of the model's heads", "", "sqrt(1 - kd - qkd), first token left out"),
    }
    requires = require_rope
    figures = {"functions": draw_functions, "heads": draw_heads}
    legend = (
        "error: root mean square over the function's standard deviation; largest_logit: what the fit needs; "
        "additive_r: of the fit's scores."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tables(seed=0)

    def tables(self, seed: int) -> dict[str, Table]:
        """Return the functions as tables; InputError for one that is none."""
        functions = example_functions(self.n_distances, seed) if self.functions is None else self.functions
        if not functions:
            raise InputError("functions: give name -> values of one function at least, or leave them out")
        return {str(name): as_table(str(name), values, self.n_distances) for name, values in functions.items()}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        return {"moments": layer.once(moments_of)}

    def finish(self, sums: Sums) -> xr.Dataset:
        found = {}
        for layer, moments in sums.by_layer("moments").items():
            geometry, heads = sums.layers[layer]
            r = shares_of(moments, geometry, heads, self.n_distances, "uniform").within_rows.additive_r
            known = geometry.window != 1 and moments.q.n > 1  # else nothing varies that softmax sees
            found[layer] = {"head_additive_r": r if known else torch.full_like(r, torch.nan)}
        return sums.variables_of(found)

    def passes(self, run: Run) -> int:
        return 0

    def of_model(self, run: Run) -> xr.Dataset:
        if run.init is not None:
            return xr.Dataset()
        return made_scores(self.tables(run.seed), own_frequencies(run.model, run.where["layers"]), self.rconds)

    def findings(self, own: Numbers) -> list[str]:
        data, least = own.data, least_additive(own.data)
        exact, fits = data["error"].sel(planes=INVERSE_DFT), data.drop_sel(planes=INVERSE_DFT)
        lines = []
        for name in fits["planes"].values:
            one = fits.sel(planes=name)
            overshoot = float((one["largest_logit"] / one["largest_value"]).max())
            lines.append(
                f"With the model's own {int(one['n_planes'].max())} planes ({name}) the relative error is "
                f"{float(one['error'].min()):.2f} to {float(one['error'].max()):.2f}, with planes that add up to as "
                f"much as {overshoot:.2g} times the largest value."
            )
        return [
            f"A head made by inverse DFT takes on each of {data.sizes['function']} functions of {self.n_distances} "
            f"distances, relative error at most {float(exact.max()):.0e}; for '{least['function'].item()}', which "
            f"takes {int(least['n_planes'])} planes, the correlation with f(q, d) + g(q, k) is "
            f"{float(least['additive_r']):.2f}.",
            *lines,
            f"Of the model's own heads that correlation is {own('head_additive_r'):.3f}, mean over heads.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row per function and kind of planes, the first 20; of the null, which has only heads, a row per
        layer."""
        if own.is_null:
            return own.frame({"head_additive_r": own.array("head_additive_r")}, "layer").head(ROWS)
        names = ["n_planes", "error", "largest_logit", "largest_value", "additive_r"]
        frame = own.data[names].to_dataframe(dim_order=list(ROW)).reset_index()
        # from 1e-15 to 1e9: three decimals would not do
        return frame.assign(**{name: frame[name].map("{:.2g}".format) for name in names[1:3]}).head(ROWS)


def own_frequencies(model: Model, layers: Sequence[int] | None) -> dict[str, Float[Tensor, " plane"]]:
    """Return 'layers 0, 1, 2' -> their frequencies, zeros for what is not rotated; without layers that have no RoPE."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for geometry in geometry_of(model, layers):
        if geometry.rope.rotary_dim:
            theta = tuple(complex_frequencies(geometry.rope, geometry.d_head).tolist())
            groups.setdefault(theta, []).append(geometry.layer)
    if not groups:
        raise UnsupportedModelError("any_distance: no chosen layer has RoPE, so there are no frequencies to fit with")
    return {layer_names(layers): torch.tensor(theta, dtype=DOUBLE) for theta, layers in groups.items()}


def layer_names(layers: Sequence[int]) -> str:
    """Return 'layers 0 to 4' for a run, 'layers 0, 2, 4' otherwise."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return ("layers " if len(layers) > 1 else "layer ") + ", ".join(map(str, layers))
