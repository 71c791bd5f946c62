"""How near rank one queries and keys are, the cone of their inputs, and the slash score of the axis alone."""

from operator import itemgetter

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.head_groups import TOKENS, box_panels, head_groups, places
from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, head_maps, model_label, sides

KINDS = ("rank", "cosines", "gain", "share", "counterfactual", "bias")


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Biases are drawn where there are any."""
    biased = bool((dataset["bias_share_q"] > 0).any() | (dataset["bias_share_k"] > 0).any())
    return KINDS if biased else KINDS[:-1]


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "rank") -> go.Figure:
    """kind "rank": r1 of Q and K, by group of heads; "cosines": of the inputs with their axis; "gain" and "share": what
    W_Q and W_K do with the axis, per head; "counterfactual": slash score of the axis part alone; "bias": its part."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "rank":
        figure = _ranks(dataset, null, {"Q": "r1_q", "K": "r1_k"})
        subtitle = "share of the first singular value in the energy of Q and K before RoPE, not centred; a point a head"
        return finish(figure, f"How near rank one are queries and keys? · {model}", subtitle)
    if kind == "bias":
        figure = _ranks(dataset, null, {"Q, input part": "r1_input_q", "Q, with bias": "r1_sum_q",
                                        "K, input part": "r1_input_k", "K, with bias": "r1_sum_k"})  # fmt: skip
        subtitle = "r1 of H W and of H W + b, before any norm of queries and keys; a bias alone has r1 = 1"
        return finish(figure, f"What biases add to rank one · {model}", subtitle)
    if kind == "cosines":
        return _cosines(dataset, null)
    if kind == "counterfactual":
        return _counterfactual(dataset, null)
    names = {f"{kind}_q": "W_Q", f"{kind}_k": "W_K"} if kind == "gain" else {"axis_share_q": "Q", "axis_share_k": "K"}
    data, other = dataset.sel(variant="all"), None if null is None else null.sel(variant="all")
    if kind == "gain":
        title, limits = f"Gain of the cone's axis · {model}", None
        subtitle = "|u'W| over its root mean square over directions: 1 is no preference for the axis u"
    else:
        title, limits = f"Energy of queries and keys from the cone's axis · {model}", (0.0, 1.0)
        subtitle = "share of |H W|² that the axis part of the inputs H makes"
    return head_maps(data, other, names, title=title, subtitle=subtitle, limits=limits)


def _ranks(dataset: xr.Dataset, null: xr.Dataset | None, measures: dict[str, str]) -> go.Figure:
    of = {label: itemgetter(name) for label, name in measures.items()}
    panels = {title: (head_groups(dataset, null, variant), of) for variant, title in TOKENS.items()}
    return box_panels(panels, "r1").update_yaxes(range=[0, 1.03])


def _cosines(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    layers = dataset["layer"].values
    n_columns = min(4, len(layers))
    n_rows = -(-len(layers) // n_columns)
    data = dataset.sel(variant="all")
    titles = [
        f"layer {one}: mean {float(data.cosine_mean.sel(layer=one)):.2f}, r1 {float(data.r1_h.sel(layer=one)):.2f}"
        for one in layers
    ]
    figure = make_subplots(
        rows=n_rows,
        cols=n_columns,
        subplot_titles=titles,
        shared_yaxes="all",  # type: ignore[arg-type]
        horizontal_spacing=0.03,
        vertical_spacing=0.4 / n_rows,
    )
    for number, (side, one) in enumerate(sides(dataset, null)):
        for index, layer in enumerate(layers):
            curve = go.Scatter(
                x=one["cosine"].values,
                y=one["cosine_share"].sel(variant="all", layer=layer).values,
                mode="lines",
                line={"shape": "hvh", "width": 1.4, "color": NULL_COLOUR if number else COLOURS[0]},
                fill="tozeroy",
                name=side,
                legendgroup=side,
                showlegend=index == 0,
                hovertemplate=f"layer {layer}, {side}<br>cosine %{{x:.2f}}: %{{y:.1%}}<extra></extra>",
            )
            figure.add_trace(curve, row=index // n_columns + 1, col=index % n_columns + 1)
    figure.update_xaxes(range=[-1, 1], title_text="cosine with the axis").update_yaxes(tickformat=".0%")
    figure.update_yaxes(title_text="share of inputs", col=1).update_annotations(font_size=12)
    subtitle = "cosine of each attention input, after the norm, with their top right-singular vector; all tokens"
    title = f"The cone of attention inputs · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=140 + 230 * n_rows)


def _counterfactual(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=list(TOKENS.values()), shared_yaxes=True)
    kinds = {"best_axis_only": ("only the axis part", "circle"), "best_off_axis": ("all but the axis part", "x")}
    for column, variant in enumerate(TOKENS, start=1):
        for group, colour, heads in reversed(head_groups(dataset, null, variant)):
            for name, (label, symbol) in kinds.items():
                points = go.Scatter(
                    x=heads["best_measured"].values,
                    y=heads[name].values,
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": 7},
                    name=f"{group}: {label}",
                    legendgroup=f"{group}{name}",
                    showlegend=column == 1,
                    text=places(heads),
                    hovertemplate="%{text}<br>measured %{x:.3f}, then %{y:.3f}<extra></extra>",
                )
                figure.add_trace(points, row=1, col=column)
        top = float(dataset[["best_measured", "best_axis_only"]].to_array().max())
        equal = go.Scatter(x=[0, top], y=[0, top], mode="lines", line={"dash": "dot", "color": "black"}, name="equal")
        figure.add_trace(equal.update(showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title_text="measured slash score").update_yaxes(title_text="slash score after", col=1)
    subtitle = "each head at its best distance; inputs of W_Q and W_K changed in its layer alone, softmax taken anew"
    return finish(figure, f"Is the axis enough for the slash? · {model_label(dataset)}", subtitle)
