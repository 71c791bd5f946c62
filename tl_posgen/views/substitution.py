"""The loss with all scores replaced: which parts of them the model runs on."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, head_maps, model_label, sides

KINDS = ("loss", "dose", "correlation", "search", "laws", "heads")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "loss") -> go.Figure:
    """kind "loss": every arm; "dose": a share of the residual added back; "correlation": what a correlation would have
    made one believe; "search" and "laws": the splits that were searched; "heads": what each head alone loses."""
    check_kind(kind, KINDS)
    draw = {
        "loss": _loss,
        "dose": _dose,
        "correlation": _correlation,
        "search": _search,
        "laws": _laws,
        "heads": _heads,
    }
    return draw[kind](dataset, null)


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
        figure.add_trace(bar.update(textposition="outside", textangle=0, cliponaxis=False))
    figure.update_layout(barmode="group", yaxis_title="loss, nats per token")
    subtitle = "every score replaced; on the bars the share of the loss recovered against uniform attention"
    return finish(figure, f"Loss with substituted scores · {model_label(dataset)}", subtitle)


def _dose(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in sides(dataset, null):
        for number, name in enumerate(data["stand_in"].values):
            curve = data["dose_loss"].sel(stand_in=name)
            colour = NULL_COLOUR if data is null else COLOURS[number]
            line = {"color": colour, "dash": "dot" if data is null and number else "solid"}
            x = curve["residual_share"].values
            figure.add_trace(go.Scatter(x=x, y=curve.values, mode="lines+markers", name=f"{name}<br>{side}", line=line))
    figure.add_hline(y=float(dataset["loss_mean"].sel(arm="uniform")), line_dash="dot", annotation_text="uniform")
    figure.update_layout(xaxis_title="share of the residual added back", yaxis_title="loss, nats per token")
    subtitle = "scores = stand-in + share × what it leaves out; 0 drops the residual, 1 is the untouched model"
    return finish(figure, f"How much residual does it take? · {model_label(dataset)}", subtitle)


def _correlation(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in reversed(sides(dataset, null)):
        arms = data.drop_sel(arm=["base", "uniform"])
        r = arms["r"].mean(("layer", "head")).values
        rise = (arms["loss_mean"] - data["loss_mean"].sel(arm="base")).values
        if data is null:
            marker = {"size": 9, "color": NULL_COLOUR}
            figure.add_trace(go.Scatter(x=r, y=rise, text=arms["arm"].values, mode="markers", name=side, marker=marker))
            continue
        for number, arm in enumerate(arms["arm"].values):
            symbol = ("circle", "diamond")[number // len(COLOURS) % 2]
            marker = {"size": 11, "color": COLOURS[number % len(COLOURS)], "symbol": symbol}
            figure.add_trace(
                go.Scatter(
                    x=r[number : number + 1], y=rise[number : number + 1], mode="markers", name=arm, marker=marker
                )
            )
    level = float(dataset["loss_mean"].sel(arm="uniform") - dataset["loss_mean"].sel(arm="base"))
    figure.add_hline(y=level, line_dash="dot", annotation_text="uniform", annotation_position="bottom left")
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="rise of the loss, nats")
    subtitle = (
        "each point a stand-in; were correlation enough, they would fall from left to right; rank correlation of r "
        f"and share recovered {float(dataset['r_rank']):.2f}, of attention KL {float(dataset['kl_rank']):.2f}"
    )
    return finish(figure, f"Correlation is not mechanism · {model_label(dataset)}", subtitle, height=520)


def _search(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    _require_search(dataset)
    figure = go.Figure()
    share, low, high = (dataset[name].values for name in ("search_recovered", "search_low", "search_high"))
    labels = [
        f"{family}<br>{int(n)} number{'s' if n > 1 else ''}"
        for family, n in zip(dataset["family"].values, dataset["search_parameters"].values, strict=True)
    ]
    controls = dataset["family"].isin(["position", "meaning"]).values
    bars = go.Bar(
        x=labels,
        y=share,
        text=[f"{x:.1%}" for x in share],
        textposition="inside",
        insidetextanchor="start",
        marker_color=[NULL_COLOUR if control else COLOURS[0] for control in controls],
        error_y={"type": "data", "array": high - share, "arrayminus": share - low},
    )
    figure.add_trace(bars)
    figure.update_layout(xaxis_title="what was searched, and over how many numbers", yaxis_title="share recovered")
    figure.update_yaxes(tickformat=".0%")
    subtitle = (
        f"chosen on {dataset.attrs['search_prompts']} prompts, reported on {dataset.attrs['held_out_prompts']} others "
        "with a 95 % interval; grey: controls, one part missing, searched as hard"
    )
    return finish(figure, f"Searched splits · {model_label(dataset)}", subtitle)


def _laws(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    _require_search(dataset)
    families = [name for name in dataset["free_family"].values if name != "meaning"]
    titles = ["p(d) of the searched law", *(f"|mean turn| by plane, {name}" for name in families)]
    figure = make_subplots(cols=len(titles), rows=1, subplot_titles=titles)
    for number, layer in enumerate(dataset["layer"].values):
        law = dataset["law"].sel(layer=layer).mean("head")
        line = {"color": COLOURS[number % len(COLOURS)]}
        trace = go.Scatter(x=law["law_distance"].values, y=law.values, name=f"layer {layer}", line=line)
        figure.add_trace(trace, row=1, col=1)
        for column, family in enumerate(families, start=2):
            turn = dataset["turn"].sel(layer=layer, free_family=family).mean("head")
            trace = go.Scatter(y=turn.values, mode="lines+markers", line=line, showlegend=False)
            figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title_text="distance", col=1)
    for column in range(2, len(titles) + 1):
        figure.update_xaxes(title_text="plane, fast to slow", col=column).update_yaxes(rangemode="tozero", col=column)
    subtitle = "mean over the heads of a layer; a turn of 1: this plane carries meaning, 0: position averages it away"
    return finish(figure, f"The splits found · {model_label(dataset)}", subtitle)


def _heads(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    if "residual_cost" not in dataset:
        raise ValueError("no head costs were measured; run substitution again with head_costs=True")
    measures = {"residual_cost": "residual dropped", "uniform_cost": "uniform attention"}
    width = dataset.attrs.get("cost_width", 0)
    subtitle = f"rise of the loss (nats) with this head alone replaced: by the split of triangle {width:g}; by nothing"
    title = f"What each head's residual is worth · {model_label(dataset)}"
    return head_maps(dataset, None, measures, title=title, subtitle=subtitle, limits=None)


def _require_search(dataset: xr.Dataset) -> None:
    if "search_loss" not in dataset:
        raise ValueError("no split was searched; run substitution again with search=True")
