"""What a head's planes foretell of its interaction share, for trained, randomly initialised and shuffled weights."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label

KINDS = ("scatter", "certified")
LOOKS = {
    "trained": (COLOURS[0], "circle"),
    "random init": (NULL_COLOUR, "diamond-open"),
    "shuffled": (COLOURS[1], "square-open"),
}
PANELS = {"all": ("", "all tokens"), "no_first": ("_no_first", "first token left out")}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "scatter") -> go.Figure:
    """kind "scatter": interaction share against the sum of the plane scores, a point a head, correlations in the
    legend; "certified": share of heads that the sufficient criterion certifies, by its tolerance."""
    check_kind(kind, KINDS)
    return _scatter(dataset) if kind == "scatter" else _certified(dataset)


def _scatter(dataset: xr.Dataset) -> go.Figure:
    titles = [f"{label}; pooled: {_correlation(dataset, 'pooled', at)}" for at, (_, label) in PANELS.items()]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.05)
    for column, (variant, (suffix, label)) in enumerate(PANELS.items(), start=1):
        for kind, (colour, symbol) in LOOKS.items():
            heads = dataset.sel(weights=kind)[[f"score_sum{suffix}", f"interaction{suffix}"]].to_dataframe().dropna()
            trace = go.Scatter(
                x=heads[f"score_sum{suffix}"],
                y=heads[f"interaction{suffix}"],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 8},
                name=f"{kind}: {_correlation(dataset, kind, variant)}",
                legendgroup=variant,
                legendgrouptitle={"text": label},
                text=[f"{kind}, layer {layer} head {head}" for layer, head in heads.index],
                hovertemplate="%{text}<br>sum of scores %{x:.2f}, interaction %{y:.3f}<extra></extra>",
            )
            figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title_text="sum of plane scores / std of the scores", rangemode="tozero")
    figure.update_yaxes(title_text="interaction share, kd + qkd", col=1)
    figure.update_yaxes(rangemode="tozero").update_annotations(font_size=12)
    subtitle = "a point a head; r: Pearson, rho: Spearman, over the heads of one kind of weights"
    title = f"Do the planes foretell how additive a head is? · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=460)


def _certified(dataset: xr.Dataset) -> go.Figure:
    figure = go.Figure()
    for kind, (colour, symbol) in LOOKS.items():
        values = dataset["certified"].sel(weights=kind)
        trace = go.Scatter(x=values["eps"].values, y=values.values, mode="lines+markers", name=kind)
        figure.add_trace(trace.update(line={"color": colour}, marker={"symbol": symbol, "size": 9}))
    figure.update_xaxes(title_text="eps, the tolerance of each plane", type="log", tickvals=dataset["eps"].values)
    figure.update_yaxes(title_text="share of heads certified", range=[-0.03, 1.03], tickformat=".0%")
    subtitle = "in every plane: the key nearly constant, or too small to matter, or hardly turning; all tokens"
    return finish(figure, f"Heads that the criterion certifies · {model_label(dataset)}", subtitle)


def _correlation(dataset: xr.Dataset, group: str, variant: str) -> str:
    at = dataset.sel(group=group, variant=variant)
    return f"r = {float(at['pearson']):.2f}, rho = {float(at['spearman']):.2f}"
