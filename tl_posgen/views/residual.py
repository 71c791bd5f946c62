"""What the three-axis fit leaves: how much, of what shape, at which distances, in which planes and token pairs."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.circuits import attention_maps
from tl_posgen.views.style import COLOURS, DIVERGING, check_kind, finish, head_maps, layer_curves, model_label, sides

KINDS = ("map", "spectrum", "distances", "planes", "tokens")
N_POINTS = 64  # distances drawn per curve, evenly spread on the logarithmic axis
N_PANELS = 4  # heads whose token pairs are drawn
MAPS = {"example_residual": "left over", "example_additive": "position + key", "example_scores": "scores"}


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Planes where the encoding has some, tokens where the model was given token ids."""
    needed = {"planes": "plane_share_no_first", "tokens": "query_token_no_first"}
    return tuple(kind for kind in KINDS if needed.get(kind, "share") in dataset)


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": the residual's share of every head; "spectrum": of its singular directions; "distances": where a
    pair's residual is above the average pair's; "planes": its share by RoPE plane; "tokens": the kinds of
    token pair that explain most of it, in the heads that leave most."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "map":
        measures = {
            "share": "share left",
            "share_no_first": "share left, first token left out",
            "top_share_no_first": "of it in one direction",
        }
        subtitle = (
            "share of the scores' variance within rows that a(i-j) + b(i) + c(j) leaves; its top singular direction"
        )
        return head_maps(dataset, null, measures, title=f"What the three-axis fit leaves · {model}", subtitle=subtitle)
    if kind == "spectrum":
        return layer_curves(
            dataset,
            null,
            "spectrum_no_first",
            "component",
            title=f"Spectrum of the residual · {model}",
            subtitle="share of the residual's energy in its r-th singular direction, first token left out",
            y_title="share",
        )
    if kind == "distances":
        return layer_curves(
            _thinned(dataset),
            None if null is None else _thinned(null),
            "distance_ratio_no_first",
            "distance",
            title=f"Residual by distance · {model}",
            subtitle="energy of a pair at that distance over that of the average pair, first token left out; 1: even",
            y_title="energy ratio",
            log_x=True,
        )
    return _planes(dataset, null) if kind == "planes" else _tokens(dataset, null)


def show(dataset: xr.Dataset, example: int = 0):
    """A circuitsvis page of one head: what is left over, position + key, and the scores, all within rows, in logits.

    One colour scale for the three: red above the row's mean, blue below; full colour at four times the standard
    deviation of the residual.
    """
    head = dataset.isel(example=example)
    residual = head["example_residual"].values
    maps = [residual, head["example_scores"].values - residual, head["example_scores"].values]
    reach = 4 * float(np.sqrt(np.mean(residual[np.tril_indices_from(residual)] ** 2)))
    colours = {"negative_color": "blue", "positive_color": "red"}
    tokens = [str(token) for token in _texts(dataset, "example_token").values]
    return attention_maps(np.stack(maps), tokens, list(MAPS.values()), max_value=reach, min_value=-reach, **colours)


def examples(dataset: xr.Dataset) -> list[str]:
    """Which head each example is, and how much the fit leaves of it on this prompt."""
    labels = []
    for number in range(dataset.sizes.get("example", 0)):
        head = dataset.isel(example=number)
        where = f"layer {int(head['example_layer'])}, head {int(head['example_head'])}"
        share = f"{float(head['example_share']):.0%} of the variance within rows"
        labels.append(f"{where}: position + query + key leave {share} (first token left out)")
    return labels


def _thinned(dataset: xr.Dataset) -> xr.Dataset:
    """A choice of distances below half the prompt: all the short ones, ever fewer of the long."""
    places = np.unique(np.geomspace(1, max(1, dataset.sizes["distance"] // 2), N_POINTS).round().astype(int)) - 1
    return dataset.isel(distance=places)


def _texts(dataset: xr.Dataset, name: str) -> xr.DataArray:
    """The texts of a variable of token ids; the ids where no tokenizer was known."""
    return dataset.get(f"{name}_text", dataset[name])


def _planes(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    """Heads down, planes across: the residual's share beside the scores'; the null below."""
    measures = {"plane_share_no_first": "of the residual", "score_plane_share_no_first": "of the scores within rows"}
    rows = sides(dataset, null)
    figure = make_subplots(
        rows=len(rows),
        cols=2,
        shared_xaxes=True,
        subplot_titles=[f"{label} · {side}" for side, _ in rows for label in measures.values()],
        horizontal_spacing=0.08,
        vertical_spacing=0.1,
    )
    reach = max(float(abs(data[name]).max()) for _, data in rows for name in measures)
    for row, (_, data) in enumerate(rows, start=1):
        for column, name in enumerate(measures, start=1):
            heads = data[name].stack(unit=("layer", "head")).transpose("unit", "plane")
            heatmap = go.Heatmap(
                z=heads.values,
                x=heads["plane"].values,
                y=[f"L{layer}H{head}" for layer, head in heads["unit"].values],
                coloraxis="coloraxis",
                hovertemplate="%{y}, plane %{x}: %{z:.3f}<extra></extra>",
            )
            figure.add_trace(heatmap, row=row, col=column)
    lengths = dataset["wavelength"].isel(layer=0).values
    ticks = [f"{x:.2g}" if x < 100 else f"{x:.0f}" if x < 1000 else f"{x / 1000:.2g}k" for x in lengths]
    every = slice(None, None, -(-len(ticks) // 16))
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_xaxes(tickvals=np.arange(len(ticks))[every], ticktext=ticks[every], tickangle=0)
    figure.update_xaxes(title_text="wavelength of the plane, tokens (first layer's)", row=len(rows))
    bar = {"colorscale": DIVERGING, "reversescale": True, "cmin": -reach, "cmax": reach, "colorbar": {"thickness": 12}}
    figure.update_layout(coloraxis=bar)
    figure.update_annotations(font_size=11)
    subtitle = (
        "first token left out; a head's shares add up to 1 over planes and what does not rotate; below 0: works "
        "against the others"
    )
    height = 150 + len(rows) * max(200, min(9 * dataset.sizes["layer"] * dataset.sizes["head"], 900))
    return finish(figure, f"Residual by RoPE plane · {model_label(dataset)}", subtitle, height=height)


def _tokens(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    """A panel for each of the heads that leave most, the null's heads to the right: a bar a kind of token pair."""
    columns = [(side, data, _most_left(data)) for side, data in sides(dataset, null)]
    n_rows = len(columns[0][2])
    figure = make_subplots(
        rows=n_rows,
        cols=len(columns),
        subplot_titles=[
            f"layer {column[2][row][0]}, head {column[2][row][1]} · {column[0]}"
            for row in range(n_rows)
            for column in columns
        ],
        horizontal_spacing=0.16,
        vertical_spacing=0.24 / n_rows,
    )
    for column, (_, data, heads) in enumerate(columns, start=1):
        for row, (layer, head) in enumerate(heads, start=1):
            figure.add_trace(_bars(data.sel(layer=layer, head=head)), row=row, col=column)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title_text="mean residual, logits", row=n_rows)
    figure.update_annotations(font_size=11)
    subtitle = (
        "query token → key token, × how often, share of the head's residual it explains; orange: above the fit, blue: "
        "below"
    )
    return finish(figure, f"Token pairs in the residual · {model_label(dataset)}", subtitle, height=150 + 230 * n_rows)


def _most_left(dataset: xr.Dataset) -> list[tuple[int, int]]:
    ranked = dataset["share_no_first"].to_series().dropna().sort_values(ascending=False)
    return ranked.index[:N_PANELS].to_list()


def _bars(pairs: xr.Dataset) -> go.Bar:
    """The kinds of token pair of one head."""
    query, key = (_texts(pairs, f"{side}_token_no_first").values for side in ("query", "key"))
    names = ("pair_mean_no_first", "pair_count_no_first", "pair_share_no_first")
    mean, count, share = (pairs[name].values for name in names)
    known = np.flatnonzero(count > 0)
    return go.Bar(
        x=mean[known],
        y=[f"{rank + 1}. {_quoted(query[rank])} → {_quoted(key[rank])}" for rank in known],
        orientation="h",
        marker_color=[COLOURS[0] if mean[rank] < 0 else COLOURS[1] for rank in known],
        text=[f"×{count[rank]:.0f}, {share[rank]:.1%}" for rank in known],
        textposition="auto",
        hovertemplate="%{y}: mean %{x:.3g} logits, %{text}<extra></extra>",
        showlegend=False,
    )


def _quoted(token: object) -> str:
    text = str(token).replace("\n", "↵").replace("\t", "⇥").replace("<", "&lt;")
    return f"“{text}”"
