"""The loss with all scores replaced: which parts of them the model runs on."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, head_maps, model_label, sides

KINDS = ("loss", "correlation", "search", "laws", "heads")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "loss") -> go.Figure:
    """kind "loss": every arm; "correlation": what a correlation would have made one believe; "search" and "laws": the
    laws of distance that were searched; "heads": what each head alone loses."""
    check_kind(kind, KINDS)
    return {"loss": _loss, "correlation": _correlation, "search": _search, "laws": _laws, "heads": _heads}[kind](
        dataset, null
    )


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """The kinds that this result has data for: laws only if they were searched, heads only if they were costed."""
    needed = {"search": "search_loss", "laws": "search_loss", "heads": "residual_cost"}
    return tuple(kind for kind in KINDS if needed.get(kind, "loss_mean") in dataset)


def _loss(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in sides(dataset, null):
        shares = ["" if data is null else f"{value:.0%}" for value in data["recovered"].values]
        colour = NULL_COLOUR if data is null else COLOURS[0]
        bar = go.Bar(x=data["arm"].values, y=data["loss_mean"].values, name=side, text=shares, marker_color=colour)
        figure.add_trace(bar)
    figure.update_layout(barmode="group", yaxis_title="loss, nats per token")
    subtitle = "every score replaced; on the bars the share of the loss recovered against uniform attention"
    return finish(figure, f"Loss with substituted scores · {model_label(dataset)}", subtitle)


def _correlation(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in sides(dataset, null):
        arms = data.drop_sel(arm=["base", "uniform"])
        points = go.Scatter(
            x=arms["r"].mean(("layer", "head")).values,
            y=arms["loss_mean"].values,
            text=arms["arm"].values,
            mode="markers+text",
            textposition="top center",
            name=side,
            marker={"size": 9, "color": NULL_COLOUR if data is null else COLOURS[0]},
        )
        figure.add_trace(points)
    for arm in ("base", "uniform"):
        figure.add_hline(y=float(dataset["loss_mean"].sel(arm=arm)), line_dash="dot", annotation_text=arm)
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="loss, nats per token")
    subtitle = "each point a stand-in; were correlation enough, the points would fall from left to right"
    return finish(figure, f"Correlation is not mechanism · {model_label(dataset)}", subtitle)


def _search(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    _require_search(dataset)
    figure = go.Figure()
    for family in dataset["family"].values:
        values = dataset["search_recovered"].sel(family=family)
        bar = go.Bar(x=values["scope"].values, y=values.values, name=family, text=[f"{x:.1%}" for x in values.values])
        figure.add_trace(bar)
    figure.update_layout(barmode="group", xaxis_title="one law per", yaxis_title="share of the loss recovered")
    figure.update_yaxes(range=[float(min(0.9, dataset["search_recovered"].min() - 0.02)), 1.0])
    subtitle = "p(d) chosen on one half of the prompts, reported on the other; no null: nothing to recover there"
    return finish(figure, f"Searched laws of distance · {model_label(dataset)}", subtitle)


def _laws(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    _require_search(dataset)
    families = dataset["family"].values
    figure = make_subplots(cols=len(families), rows=1, subplot_titles=list(families), shared_yaxes=True)
    for column, family in enumerate(families, start=1):
        for number, scope in enumerate(dataset["scope"].values):
            law = dataset["law"].sel(family=family, scope=scope).mean(("layer", "head"))
            line = {"color": COLOURS[number]}
            trace = go.Scatter(x=law["law_distance"].values, y=law.values, name=f"per {scope}", line=line)
            figure.add_trace(trace.update(showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title_text="distance").update_yaxes(title_text="p", col=1)
    return finish(figure, f"The laws found · {model_label(dataset)}", "p(d) of the meaning part, mean over heads")


def _heads(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    if "residual_cost" not in dataset:
        raise ValueError("no head costs were measured; run substitution again with head_costs=True")
    measures = {"residual_cost": "residual dropped", "uniform_cost": "uniform attention"}
    width = dataset.attrs.get("cost_width", "")
    subtitle = f"rise of the loss (nats) with this head alone replaced: by the width-{width} split; by nothing"
    title = f"What each head's residual is worth · {model_label(dataset)}"
    return head_maps(dataset, None, measures, title=title, subtitle=subtitle, limits=None)


def _require_search(dataset: xr.Dataset) -> None:
    if "search_loss" not in dataset:
        raise ValueError("no law was searched; run substitution again with search=True")
