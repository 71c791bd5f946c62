"""Attention examples: a head's true attention beside the attention of its additive fit, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.measure import Measure, Request, TokenView
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.options import Options
from tl_posgen.position.decomposition.layer_fits import fit_capture
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.procedure import Job, as_result
from tl_posgen.report.circuits import CROP, attention_maps, token_colours
from tl_posgen.report.figures import DIVERGING, SCALE, Panels, model_label, token_map
from tl_posgen.result import Result
from tl_posgen.summary import Summary

MAPS = {"pattern": "true", "additive_pattern": "additive", "residual": "true - add."}
MAP = ("example", "query", "key")
R = "r_within_rows_first_prompt"
WHY = ("closest to position + key", "furthest from position + key")
Pick = tuple[int, int, str]
PARTS = ("key_part", "query_part"), ("key", "query")  # variables and their dimensions


@dataclass(frozen=True)
class AttentionExamples(Options):
    r"""softmax(W) beside softmax(a_{i-j} + b_i + c_j) for chosen heads: first prompt, first 128 tokens.

    The heads are those that follow position + query + key most within rows, and least, over all prompts, as
    `three_axis` of the same run found; `r_within_rows_first_prompt` is of the prompt that is shown. The fit is made
    over the whole prompt, then cropped. b_i never changes a pattern. It shows the model alone: no random init is run.

    Args:
        examples: how many heads of either end.

    Raises:
        InputError: fewer than one example; leave the measure out to have none.

    Source: ours.

    Example:
        >>> from tl_posgen.position.decomposition import attention_examples
        >>> result = attention_examples("mini", "Down, down, down.", examples=1, null_seeds=())
        >>> result.dataset["why"].values.tolist()
        ['closest to position + key', 'furthest from position + key']
    """

    examples: int = 2

    def check(self) -> None:
        check_whole("attention_examples", 1, examples=self.examples)


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    """The first prompt once more, for the chosen heads only."""
    assert isinstance(request.options, AttentionExamples)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)[:1]
    picks = pick_heads(job.after["three_axis"].dataset["r_within_rows"].to_series(), request.options.examples, WHY)
    found: dict[tuple[int, int], xr.Dataset] = {}
    job.plan(0, once=int(bool(picks)))
    if picks:
        run_capture(model, tokens[0][None], lambda one: found.update(patterns(one)), heads=[pick[:2] for pick in picks])
    texts = token_strings(model, tokens[0][:CROP])
    dataset = examples_dataset([found[pick[:2]].assign_coords(why=pick[2]) for pick in picks], texts)
    dataset = dataset.assign_attrs(model=model_label(job.after["three_axis"].dataset))
    return as_result(request, [dataset], provenance_of(model, tokens, (), job.seed))


def pick_heads(values: pd.Series, n: int, why: tuple[str, str]) -> list[Pick]:
    """(layer, head, why) of the n heads with the highest values, and of the n with the lowest."""
    ranked = values.dropna().sort_values(ascending=False)
    heads = [(int(layer), int(head)) for layer, head in ranked.index.to_list()]
    n = max(1, min(n, len(heads) // 2))
    highest = [(*head, why[0]) for head in heads[:n]]
    return highest + [(*head, why[1]) for head in heads[-n:] if head not in heads[:n]]


def patterns(layer: LayerCapture) -> dict[tuple[int, int], xr.Dataset]:
    """The three maps and this prompt's r within rows of every head that was captured, by (layer, head)."""
    fit, _ = layer.once(fit_capture)
    n = min(CROP, layer.length)
    scores = layer.scores(n)
    true = scores.double().softmax(-1)
    additive = fit.fitted(layer.positions[:n], layer.positions[:n]).nan_to_num(-torch.inf).softmax(-1)
    maps = {"pattern": true, "additive_pattern": additive, "residual": true - additive}
    data: dict[str, tuple] = {name: (("head", *MAP[1:]), x.float().cpu().numpy()) for name, x in maps.items()}
    data |= {
        name: (("head", dim), part[:, :n].cpu().numpy()) for name, dim, part in zip(*PARTS, (fit.c, fit.b), strict=True)
    }
    data[R] = ("head", fit.r_within_rows.cpu().numpy())
    heads = xr.Dataset(data, {"layer": layer.layer, "head": list(layer.heads)})
    return {(layer.layer, head): heads.sel(head=head) for head in layer.heads}


def examples_dataset(examples: Sequence[xr.Dataset], tokens: Sequence[str]) -> xr.Dataset:
    """The examples along "example"; empty maps where no head was picked."""
    none: dict[str, tuple] = {name: (MAP, np.zeros((0, len(tokens), len(tokens)))) for name in MAPS}
    places = dict.fromkeys(("layer", "head", "why"), ("example", []))
    found = (
        xr.concat(examples, "example", coords="all") if examples else xr.Dataset(none | {R: ("example", [])}, places)
    )
    coords = {"token": ("key", list(tokens)), "example": np.arange(len(examples))}
    return found.assign_coords(coords).assign_attrs(rows="example")


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    heads = [f"{layer}.{head}" for layer, head in zip(data["layer"].values, data["head"].values, strict=True)]
    return {"heads": heads, R: [float(r) for r in data[R].values]}


def labels(data: xr.Dataset) -> list[str]:
    """Which head each example is, and why it was picked."""
    rows = list(zip(*(data[name].values for name in ("layer", "head", "why", R)), strict=True))
    maps = [f"layer {layer}, head {head}: {why} (r within rows, first prompt: {r:.3f})" for layer, head, why, r in rows]
    kinds = [f"{VARIABLES[name].label}, {VARIABLES[name].description}" for name in PARTS[0] if name in data]
    return maps + [f"layer {layer}, head {head}: tokens by {kind}" for kind in kinds for layer, head, *_ in rows]


def show(data: xr.Dataset, example: int) -> Any:
    """A circuitsvis page of one example head: the three maps over the prompt's first 128 tokens; or these tokens by its
    key part, or its query part."""
    kind, example = divmod(example, data.sizes["example"])
    if kind:
        part = data[PARTS[0][kind - 1]].isel(example=example).values
        return token_colours([str(token) for token in data["token"].values], part - np.nanmean(part))
    maps = data.isel(example=example)[list(MAPS)].to_array("map").transpose("map", "query", "key").values
    return attention_maps(maps, [str(token) for token in data["token"].values], list(MAPS.values()))


def heat_maps(result: Any) -> go.Figure:
    """The same maps as heat maps, a row an example head."""
    data = result.dataset
    heads = [head.replace(".", " head ") for head in result.summary["heads"]]
    panels = Panels([f"layer {head} · {name}" for head in heads for name in MAPS.values()], columns=3, row_height=280)
    for panel, (number, name) in enumerate(product(range(len(heads)), MAPS)):
        attention, difference = {"colorscale": SCALE, "zmin": 0, "zmax": 1}, {"colorscale": DIVERGING, "zmid": 0}
        colours = difference if name == "residual" else attention
        panels.add(panel, token_map(data[name].isel(example=number), **colours))
    panels.figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    subtitle = "attention of the scores, of the additive fit, their difference; first prompt; no random init is shown"
    return panels.axes("key", "query").finish(f"True and additive attention · {model_label(data)}", subtitle)


VARIABLES = {
    "pattern": Variable("true attention", description="softmax of the scores", dims=MAP),
    "additive_pattern": Variable("additive attention", description="softmax of a(i-j) + b(i) + c(j)", dims=MAP),
    "residual": Variable("difference", description="true attention less the additive one", dims=MAP),
    "key_part": Variable("key part c(j)", "logits", "fitted on this prompt, less its mean", ("example", "key")),
    "query_part": Variable("query part b(i)", "logits", "fitted on this prompt, less its mean", ("example", "query")),
    R: Variable(
        "r within rows, first prompt", description="of all tokens of the prompt that is shown", dims=("example",)
    ),
}

MEASURE = Measure(
    name="attention_examples",
    question="What does the additive fit get right in the attention itself?",
    explanation=(
        "Softmax of the true scores, softmax of the additive fit, and their difference, for the heads with the highest "
        "and lowest correlation within rows over all prompts. Hover a cell for its value; first 128 tokens of the "
        "first prompt, to which r belongs."
    ),
    source="ours",
    options=AttentionExamples,
    procedure=run,
    after=("three_axis",),
    variables=VARIABLES,
    summarise=summarise,
    figures={"patterns": heat_maps},
    off_page=frozenset({"patterns"}),
    drawn=lambda data: ["patterns"] if data.sizes["example"] else [],
    tokens=TokenView(labels, show),
    caveats={"absolute": "the additive pattern's key part mixes where a key stands with what it is."},
)
