"""What the running model loses with a band of RoPE planes: loss, and what is left of its slash heads."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("loss", "slash", "heads")
N_HEADS = 12  # the strongest, drawn one by one


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "loss") -> go.Figure:
    """kind "loss": every arm; "slash": mean score and number of the slash heads; "heads": the strongest, arm by arm."""
    check_kind(kind, KINDS)
    return {"loss": _loss, "slash": _slash, "heads": _heads}[kind](dataset, null)


def _loss(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    names = [side for side, _ in sides(dataset, null)]
    figure = make_subplots(rows=1, cols=len(names), shared_yaxes=True, column_titles=names)
    for column, (side, data) in enumerate(sides(dataset, null), start=1):
        colour = NULL_COLOUR if data is null else COLOURS[0]
        bar = go.Bar(x=data["loss_mean"].values, y=data["arm"].values, orientation="h", marker_color=colour, name=side)
        text = [f"{value:.3f}" for value in data["loss_mean"].values]
        figure.add_trace(bar.update(text=text, showlegend=False), row=1, col=column)
        figure.add_vline(x=float(data["loss_mean"][0]), line_dash="dot", row=1, col=column)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title_text="loss, nats per token").update_yaxes(autorange="reversed", automargin=True)
    subtitle = "all layers ablated at once; dotted: untouched"
    return finish(figure, f"Loss without a band of RoPE · {model_label(dataset)}", subtitle, height=_height(dataset))


def _slash(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = ["mean slash score of the slash heads", "slash heads"]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=panels, horizontal_spacing=0.04)
    arms = dataset["arm"].values
    series = [
        (1, dataset, "slash_score", "in the running model", COLOURS[0]),
        (1, dataset, "slash_score_offline", "one layer alone", COLOURS[5]),
        (2, dataset, "slash_heads", "slash-dominant", COLOURS[1]),
        (2, dataset, "slash_heads_kept", "of those before", COLOURS[4]),
    ]
    if null is not None:
        series.insert(2, (1, null, "slash_score", model_label(null), NULL_COLOUR))
        series.append((2, null, "slash_heads", model_label(null), NULL_COLOUR))
    named: set[str] = set()
    for column, data, name, label, colour in series:
        bar = go.Bar(x=data[name].values, y=arms, orientation="h", name=label, marker_color=colour, legendgroup=label)
        figure.add_trace(bar.update(showlegend=label not in named), row=1, col=column)
        named.add(label)
    figure.update_yaxes(autorange="reversed", automargin=True).update_layout(barmode="group", bargap=0.25)
    subtitle = (
        f"each head at its own distance; dominant: a score of {dataset.attrs['kappa']} at one of the distances "
        f"{', '.join(map(str, dataset.attrs['distances']))}"
    )
    title = f"Slash heads without a band of RoPE · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=_height(dataset, 30))


def _heads(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    untouched = dataset["score"].isel(arm=0).to_series()
    strongest = untouched.nlargest(min(N_HEADS, len(untouched))).index.to_list()
    places = [int(dataset["best_distance"].sel(layer=layer, head=head)) for layer, head in strongest]
    labels = [f"L{layer} H{head} D{place}" for (layer, head), place in zip(strongest, places, strict=True)]
    columns = [dataset["score"].sel(layer=layer, head=head).values for layer, head in strongest]
    rows = [[float(column[arm]) for column in columns] for arm in range(dataset.sizes["arm"])]
    heatmap = go.Heatmap(z=rows, x=labels, y=dataset["arm"].values, coloraxis="coloraxis", texttemplate="%{z:.2f}")
    figure = go.Figure(heatmap)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(coloraxis={"colorscale": "Viridis", "cmin": 0, "colorbar": {"thickness": 12}})
    subtitle = "slash score in the running model, each head at its best distance D of the untouched one"
    return finish(
        figure, f"The strongest slash heads, ablated · {model_label(dataset)}", subtitle, height=_height(dataset)
    )


def _height(dataset: xr.Dataset, per_arm: int = 24) -> int:
    return 160 + per_arm * dataset.sizes["arm"]
