"""The claims of the papers as a table: verdict, numbers, null."""

import textwrap

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.style import check_kind, finish, model_label

KINDS = ("table",)
COLOURS = {"held": "#d7eddf", "partly": "#f6ecd0", "not held": "#f6d9d0", "open": "#e8eaee"}
WIDTHS = {"claim": 70, "says": 260, "verdict": 60, "measured": 320, "null": 320}
CHARACTERS_PER_PIXEL = 1 / 6.4


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "table") -> go.Figure:
    """A row a claim, coloured by its verdict; the null's numbers are its last column."""
    check_kind(kind, KINDS)
    cells, lines = [], [1] * dataset.sizes["claim"]
    for name, width in WIDTHS.items():
        texts = [textwrap.wrap(str(text), int(width * CHARACTERS_PER_PIXEL)) for text in dataset[name].values]
        lines = [max(most, len(text)) for most, text in zip(lines, texts, strict=True)]
        cells.append(["<br>".join(text) for text in texts])
    fill = [COLOURS[str(verdict)] for verdict in dataset["verdict"].values]
    table = go.Table(
        columnwidth=list(WIDTHS.values()),
        header={"values": [f"<b>{name}</b>" for name in WIDTHS], "align": "left"},
        cells={"values": cells, "align": "left", "fill_color": [fill], "height": 20, "font": {"size": 11}},
    )
    figure = go.Figure(table)
    subtitle = "verdicts by criteria of ours; null: randomly initialised model of the same shape"
    return finish(figure, f"Claims · {model_label(dataset)}", subtitle, height=180 + 20 * sum(lines))


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """None on a page, where the table itself stands."""
    return ()
