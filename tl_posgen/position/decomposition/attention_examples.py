"""Attention examples: a head's true attention beside the attention of its additive fit, token by token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import Measure, TokenView, Variable
from tl_posgen.core.options import Count
from tl_posgen.core.run import Run
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.metric import CHOSEN
from tl_posgen.models.selection import head_name
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.decomposition.three_axis import ThreeAxis, fit_capture
from tl_posgen.report.circuits import CROP, attention_maps, token_colours
from tl_posgen.report.figures import COLOURS, DIVERGING, SCALE, Panels, model_label, token_map
from tl_posgen.report.head_figures import head_names

SCORES = ("true", "additive")
MAPS = (*SCORES, "true - add.")
MOST_CHOSEN = 6  # heads that are all shown where the user chose them
TOKENS_OF_EVERY_HEAD, VALUES_OF_EVERY_HEAD = 48, 500_000
WHY = ("closest to position + key", "furthest from position + key")
PARTS = {"key_part": "key", "query_part": "query"}  # variable -> its dim
Pick = tuple[int, int, str]


def _maps_of(data: xr.Dataset, example: int) -> np.ndarray:
    """Return the true attention, the additive one and their difference [map, query, key] of an example."""
    true, additive = data["pattern"].isel(example=example).transpose("scores", "query", "key").values
    return np.stack([true, additive, true - additive])


def _draw_patterns(result: Any) -> go.Figure:
    """Draw the three maps of every example head as heat maps, a row a head, beside the loss of the token that each
    query predicts."""
    data = result.own
    heads = head_names(zip(data["layer"].values, data["head"].values, strict=True))
    columns = [*MAPS, *(["loss"] if "loss" in data else [])]
    titles = [name if name == "loss" else f"{head} · {name}" for head in heads for name in columns]
    n = len(columns)
    panels = Panels(titles, columns=n, row_height=280)
    attention, difference = {"colorscale": SCALE, "zmin": 0, "zmax": 1}, {"colorscale": DIVERGING, "zmid": 0}
    for example in range(len(heads)):
        for number, picture in enumerate(_maps_of(data, example)):
            colours = difference if number == len(SCORES) else attention
            panels.add(n * example + number, token_map(xr.DataArray(picture, dims=("query", "key")), **colours))
        if "loss" in data:
            loss = go.Bar(x=data["loss"].values, orientation="h", marker_color=COLOURS[0], showlegend=False)
            panels.add(n * example + len(MAPS), loss)
    panels.axes("key", "query").figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    if "loss" in data:
        panels.figure.update_xaxes(title_text="", col=n)
    of_loss = "the loss of the token that each query predicts; " if "loss" in data else ""
    subtitle = f"attention of the scores, of the additive fit, their difference; {of_loss}first prompt; no random init"
    return panels.finish(f"True and additive attention · {model_label(data)}", subtitle)


def labels(data: xr.Dataset) -> list[str]:
    """Return the head of each example and why it was picked; then each of them by its key part and query part."""
    names = ("layer", "head", "why", "r_within_rows")
    rows = list(zip(*(data[name].values for name in names), strict=True))
    maps = [f"{head_name(layer, head)}: {why} (r within rows, first prompt: {r:.3f})" for layer, head, why, r in rows]
    variables = AttentionExamples.variables
    kinds = [f"{variables[name].label}, {variables[name].description}" for name in PARTS if name in data]
    return maps + [f"{head_name(layer, head)}: tokens by {kind}" for kind in kinds for layer, head, *_ in rows]


def show(data: xr.Dataset, example: int) -> Any:
    """Return a circuitsvis page of one example head: the three maps over the prompt's first 128 tokens; or these tokens
    by its key part, or its query part."""
    kind, example = divmod(example, data.sizes["example"])
    tokens = [str(token) for token in data["token"].values]
    if kind:
        part = data[list(PARTS)[kind - 1]].isel(example=example).values
        return token_colours(tokens, part - np.nanmean(part))
    return attention_maps(_maps_of(data, example), tokens, list(MAPS))


@dataclass(frozen=True)
class AttentionExamples(Measure):
    r"""softmax(W) beside softmax(a_{i-j} + b_i + c_j) for chosen heads: first prompt, first 128 tokens.

    Softmax of the true scores, softmax of the additive fit, and their difference, for the heads with the highest and
    lowest correlation within rows over all prompts. Hover a cell for its value; first 128 tokens of the first prompt,
    to which r belongs.

    The heads are those that follow position + query + key most within rows, and least, over all prompts, as
    `three_axis` of the same run found; the `r_within_rows` of this measure is of the prompt that is shown. The fit is
    made over the whole prompt, then cropped. b_i never changes a pattern. It shows the model alone: no random init is
    run.

    Args:
        examples: how many heads of either end; of up to 6 heads that `heads=` chooses, all are shown.

    Source: ours

    Example:
        >>> result = AttentionExamples(examples=1)("mini", "Down, down, down.", null_seeds=())
        >>> result.own["why"].values.tolist()
        ['closest to position + key', 'furthest from position + key']
    """

    examples: Count = 2

    question = "What does the additive fit get right in the attention itself?"
    variables = {
        "pattern": Variable(
            "attention", "", "softmax of the scores, or of a(i-j) + b(i) + c(j)", ("example", "scores", "query", "key")
        ),
        "key_part": Variable("key part c(j)", "logits", "fitted on this prompt, less its mean", ("example", "key")),
        "query_part": Variable(
            "query part b(i)", "logits", "fitted on this prompt, less its mean", ("example", "query")
        ),
        "of_every_head": Variable(
            *("attention of every head", "", "as attention, the first tokens", ("scores", "unit", "row", "column"))
        ),
        "loss": Variable("loss", "nats", "of the token that the query predicts", ("query",)),
        "r_within_rows": Variable(
            *("r within rows, first prompt", "", "of all tokens of the prompt that is shown", ("example",)),
            headline="r_within_rows",
        ),
    }
    after = (ThreeAxis,)
    has_null = False
    rows = ("example",)
    figures = {"patterns": _draw_patterns}
    token_view = TokenView(labels, show)
    patterns = "of_every_head"
    caveats = {"absolute": "the additive pattern's key part mixes where a key stands with what it is."}

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"scores": SCORES}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["patterns"] if data.sizes["example"] else []

    def prompt_tokens(
        self, model: Any, prompts: Any, length: int | None, n_prompts: int | None, consecutive: bool = False
    ) -> Sequence[Tensor]:
        return super().prompt_tokens(model, prompts, length, n_prompts, consecutive)[:1]

    def passes(self, run: Run) -> int:
        return 2  # of its one prompt, patterns and loss

    def of_model(self, run: Run) -> xr.Dataset:
        r = run.found(ThreeAxis)["r_within_rows"].sel(tokens="all").transpose("layer", "head")
        picks = pick_heads(r.to_series(), self.examples, WHY, run.where["heads"])
        n = min(CROP, len(run.rows[0]))
        none = {"pattern": (self.variables["pattern"].dims, np.zeros((0, len(SCORES), n, n)))}
        none |= {"r_within_rows": ("example", [])}
        empty = xr.Dataset(none, {"scores": list(SCORES)})
        few, every = _shown_of_every_head(len(r.to_series().dropna()), n), dict[tuple[int, int], xr.DataArray]()

        def of_layer(layer: LayerCapture) -> dict[tuple[int, int], xr.Dataset]:
            found = patterns(layer)
            every.update({head: one["pattern"][:, :few, :few].copy() for head, one in found.items()})
            return {head: one for head, one in found.items() if head in chosen}

        chosen = {(layer, head) for layer, head, _ in picks}
        data = captured_examples(run, run.rows[0], n, picks, of_layer, empty, **run.where)
        if every:
            maps = np.stack([one.values for one in every.values()], 1)
            data = data.assign(of_every_head=(self.variables["of_every_head"].dims, maps))
            data = data.assign_coords(unit=[head_name(*head) for head in every])
        loss = np.append(run.losses(run.rows[0][None])[0].numpy(), np.nan)[:n]  # nothing follows the last token
        is_of_tokens = CHOSEN.get() is None or np.ptp(loss[:-1]) > 0  # a metric may have one value a prompt
        return data.assign(loss=("query", loss)) if is_of_tokens else data


def _shown_of_every_head(n_heads: int, most: int) -> int:
    """Return the first tokens whose attention is kept of every head: fewer of many heads.

    Example:
        >>> _shown_of_every_head(16, 128), _shown_of_every_head(1024, 128)
        (48, 22)
    """
    return min(most, TOKENS_OF_EVERY_HEAD, int((VALUES_OF_EVERY_HEAD / max(n_heads, 1)) ** 0.5))


def captured_examples(
    run: Run,
    row: Int[Tensor, " pos"],
    n_shown: int,
    picks: Sequence[Pick],
    of_layer: Callable[[LayerCapture], Mapping[tuple[int, int], xr.Dataset]],
    empty: xr.Dataset,
    **where: Any,
) -> xr.Dataset:
    """Return the picked heads of one prompt along "example", with the texts of its first tokens.

    Args:
        of_layer: from a captured layer to the dataset of each head, by (layer, head).
        empty: the variables where no head was picked.
        where: layers and heads that are captured; the picked heads if left out.
    """
    found: dict[tuple[int, int], xr.Dataset] = {}
    if picks:
        where = where or {"heads": [(layer, head) for layer, head, _ in picks]}
        run_capture(run.wrapped, row[None], lambda capture: found.update(of_layer(capture)), **where)
    each, names = [found[layer, head].assign_coords(why=why) for layer, head, why in picks], ["layer", "head", "why"]
    none = empty.assign_coords(dict.fromkeys(names, ("example", [])))
    data = xr.concat(each, "example", coords=names) if picks else none
    texts = np.array(token_strings(run.wrapped, row[:n_shown]), dtype=object)  # whose NULs numpy's strings lose
    return data.assign_coords({"token": ("key", texts), "example": np.arange(len(picks))})


def pick_heads(values: pd.Series, n: int, why: tuple[str, str], chosen: Any = None) -> list[Pick]:
    """Return (layer, head, why) of the n heads with the highest values, and of the n with the lowest; all where the
    user has chosen a few heads."""
    ranked = values.dropna().sort_values(ascending=False)
    heads = [(int(layer), int(head)) for layer, head in ranked.index.to_list()]
    if chosen is not None and len(heads) <= MOST_CHOSEN:
        return [(*head, "chosen") for head in heads]
    n = max(1, min(n, len(heads) // 2))
    highest = [(*head, why[0]) for head in heads[:n]]
    return highest + [(*head, why[1]) for head in heads[-n:] if head not in heads[:n]]


def patterns(layer: LayerCapture) -> dict[tuple[int, int], xr.Dataset]:
    """Return the variables of every head that was captured, by (layer, head)."""
    fit, _ = layer.once(fit_capture)
    n = min(CROP, layer.length)
    true = double(layer.scores(n)).softmax(-1)
    additive = fit.fitted(layer.positions[:n], layer.positions[:n]).nan_to_num(-torch.inf).softmax(-1)
    arrays = {
        "pattern": (("scores", "head", "query", "key"), torch.stack([true, additive]).float()),
        "key_part": (("head", "key"), fit.c[:, :n]),
        "query_part": (("head", "query"), fit.b[:, :n]),
        "r_within_rows": ("head", fit.r_within_rows),
    }
    data = {name: (dims, array.cpu().numpy()) for name, (dims, array) in arrays.items()}
    heads = xr.Dataset(data, {"layer": layer.layer, "head": list(layer.heads), "scores": list(SCORES)})
    return {(layer.layer, head): heads.sel(head=head) for head in layer.heads}
