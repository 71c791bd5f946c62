"""Split examples: a head's scores beside their position part and their content part, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.measure import Measure, Request, TokenView
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.options import Options
from tl_posgen.position.decomposition.attention_examples import pick_heads
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.substitution.split_maps import SplitMaps, split_maps
from tl_posgen.procedure import Job
from tl_posgen.report.circuits import attention_maps
from tl_posgen.report.figures import DIVERGING, Panels, model_label, sides, token_map
from tl_posgen.report.sentences import NO_NULL, said
from tl_posgen.result import Result
from tl_posgen.summary import Summary

N_TOKENS = 64
MAPS = ("scores", "position", "content")
PARTS = ("position", "content", "split")
MAP = ("example", "query", "key")
WHY = ("most position", "least position")


@dataclass(frozen=True)
class SplitExamples(Options):
    r"""W_ij beside f(q_i, i - j) and g(q_i, k_j), within rows, for chosen heads: first prompt, first 64 tokens.

    The heads are those whose scores correlate most and least with f, within rows of these tokens; random inits show the
    same heads. f takes the mean key and g the mean over distances of these tokens, first token left out, as
    `tl_posgen.position.substitution.split_maps` says. What f + g leaves is interaction.

    Args:
        examples: how many heads of either end.

    Raises:
        InputError: fewer than one example; leave the measure out to have none.

    Source: the figure is of Han & Ji 2025 (arXiv 2503.13305); the split, the choice of heads and the null are ours.

    Example:
        >>> from tl_posgen.position.substitution import split_examples
        >>> result = split_examples("mini", "Down, down, down. Would the fall never end?", null_seeds=())
        >>> result.dataset["why"].values.tolist(), result.dataset["position"].dims
        (['most position', 'least position'], ('example', 'query', 'key'))
    """

    examples: int = 1

    def check(self) -> None:
        check_whole("split_examples", 1, examples=self.examples)


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    """The beginning of the first prompt once more, for the chosen heads only."""
    assert isinstance(request.options, SplitExamples)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)
    shown, r = tokens[0][:N_TOKENS], {}
    job.plan(0, once=1)
    run_capture(model, shown[None], lambda one: r.update(position_r(one)), layers=job.layers, heads=job.heads)
    picks = pick_heads(pd.Series(r, dtype=float), request.options.examples, WHY)
    heads = [pick[:2] for pick in picks]
    job.plan(int(bool(heads)))

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        found: dict[tuple[int, int], xr.Dataset] = {}
        if heads:
            run_capture(other, shown[None], lambda one: found.update(examples_of(one)), heads=heads)
        examples = [found[pick[:2]].assign_coords(why=pick[2]) for pick in picks]
        return examples_dataset(examples, token_strings(other, shown)).assign_attrs(model=label)

    return job.result(request, model, tokens, of_model)


def maps_of(layer: LayerCapture) -> SplitMaps:
    """The maps of every head that was captured."""
    geometry, slopes = layer.geometry, layer.geometry.alibi_slopes
    which = {"window": geometry.window, "slopes": None if slopes is None else slopes[list(layer.heads)]}
    return split_maps(layer.scores(), layer.q, layer.k, geometry.rope, geometry.scale, **which)


def position_r(layer: LayerCapture) -> dict[tuple[int, int], float]:
    """How far the scores of every head follow their position part, by (layer, head)."""
    return {(layer.layer, head): r for head, r in zip(layer.heads, maps_of(layer).r[0].tolist(), strict=True)}


def examples_of(layer: LayerCapture) -> dict[tuple[int, int], xr.Dataset]:
    """The three maps and their correlations, by (layer, head)."""
    maps = maps_of(layer)
    data: dict[str, tuple] = {name: (("head", *MAP[1:]), getattr(maps, name).float().cpu().numpy()) for name in MAPS}
    data |= {f"{name}_r": ("head", r.cpu().numpy()) for name, r in zip(PARTS, maps.r, strict=True)}
    heads = xr.Dataset(data, {"layer": layer.layer, "head": list(layer.heads)})
    return {(layer.layer, head): heads.sel(head=head) for head in layer.heads}


def examples_dataset(examples: Sequence[xr.Dataset], tokens: Sequence[str]) -> xr.Dataset:
    """The examples along "example"; empty maps where no head was picked."""
    none: dict[str, tuple] = {name: (MAP, np.zeros((0, len(tokens), len(tokens)))) for name in MAPS}
    none |= {f"{name}_r": ("example", []) for name in PARTS}
    places = dict.fromkeys(("layer", "head", "why"), ("example", []))
    found = xr.concat(examples, "example", coords="all") if examples else xr.Dataset(none, places)
    coords = {"token": ("key", list(tokens)), "example": np.arange(len(examples))}
    return found.assign_coords(coords).assign_attrs(rows="example")


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    heads = [f"{layer}.{head}" for layer, head in zip(data["layer"].values, data["head"].values, strict=True)]
    found = {f"{name}_r": [float(r) for r in data[f"{name}_r"].values] for name in PARTS}
    return {"heads": heads, "why": [str(why) for why in data["why"].values], **found}


def findings(own: Summary, null: Any) -> list[str]:
    def told(key: str, place: int) -> str:
        random = NO_NULL if null is None else f"random init {said(null[key][place], '.2f')}"
        return f"{said(own[key][place], '.2f')} ({random})"

    return [
        f"Layer {head.replace('.', ' head ')}, {why}: within rows of one prompt scores correlate with their position "
        f"part at {told('position_r', place)}, with their content part at {told('content_r', place)}, with both at "
        f"{told('split_r', place)}."
        for place, (head, why) in enumerate(zip(own["heads"], own["why"], strict=True))
    ]


def labels(data: xr.Dataset) -> list[str]:
    """Which head each example is, and why it was picked."""
    own = summarise(data)
    rows = zip(own["heads"], own["why"], *(own[f"{name}_r"] for name in PARTS), strict=True)
    return [
        f"layer {head.replace('.', ', head ')}: {why} (r within rows: position {said(position, '.2f')}, content "
        f"{said(content, '.2f')}, both {said(both, '.2f')}); attention without the first token"
        for head, why, position, content, both in rows
    ]


def show(data: xr.Dataset, example: int) -> Any:
    """A circuitsvis page of one example head: softmax of each map. The product of the last two, each row divided by its
    sum, is softmax of position + content."""
    maps = data.isel(example=example)[list(MAPS)].to_array("map").transpose("map", "query", "key").fillna(-np.inf)
    weights = np.exp(maps - maps.max("key").clip(min=-1e30)).values
    patterns = weights / weights.sum(-1, keepdims=True).clip(min=1e-30)
    return attention_maps(patterns, [str(token) for token in data["token"].values], ["true", *MAPS[1:]])


def heat_maps(result: Any) -> go.Figure:
    """Scores, position and content, a row a head; below each head the same one of the random init."""
    both, n = sides(result), result.dataset.sizes["example"]
    rows = [(side, data, number) for number, (side, data, _) in product(range(n), both)]
    panels = Panels([title for row in rows for title in map_titles(*row)], columns=3, row_height=300)
    for row, (_, data, number) in enumerate(rows):
        maps = data.isel(example=number)
        reach = float(abs(maps["scores"]).quantile(0.98))
        colours = {"colorscale": DIVERGING, "reversescale": True, "zmin": -reach, "zmax": reach}
        for column, name in enumerate(MAPS):
            panels.add(3 * row + column, token_map(maps[name], **colours))
    panels.figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    panels.figure.update_annotations(font_size=11)
    subtitle = (
        "scores within rows, first prompt, first token left out, and their parts: f(q, i - j) with the mean key, "
        "g(q, k) at the mean over distances;<br>r: of the part with the scores. Red high, blue low, a scale a row. "
        "Below each head the same one of the random init"
    )
    title = f"Scores, position and content · {model_label(result.dataset)}"
    return panels.axes("key", "query").finish(title, subtitle).update_layout(margin_t=110)


def map_titles(side: str, data: xr.Dataset, number: int) -> list[str]:
    own = summarise(data)
    head, r = "L{}H{}".format(*own["heads"][number].split(".")), {name: own[f"{name}_r"][number] for name in PARTS}
    return [
        f"{head}, {own['why'][number]} · {side}",
        *(f"{name}, r {said(r[name], '.2f')}" for name in MAPS[1:-1]),
        f"content, r {said(r['content'], '.2f')} (both {said(r['split'], '.2f')})",
    ]


R = "of the scores with this part, within rows of the first prompt, first token left out"
VARIABLES = {
    "scores": Variable("scores within rows", "logits", "first token left out, first 64 tokens", MAP),
    "position": Variable("position part", "logits", "f(q, i - j) of the mean key, within rows", MAP),
    "content": Variable("content part", "logits", "g(q, k) at the mean over distances, within rows", MAP),
    "position_r": Variable("r of the position part", "", R, ("example",)),
    "content_r": Variable("r of the content part", "", R, ("example",)),
    "split_r": Variable("r of position + content", "", R, ("example",)),
}
EXACT = "nothing rotates, so the position part is the same for every key, and there is nothing to show."

MEASURE = Measure(
    name="split_examples",
    question="What do the position part and the content part of a head look like?",
    explanation=(
        "Scores beside the part that knows the query and the distance, and the part that knows the query and the key, "
        "for the heads that correlate most and least with their position part; first 64 tokens of the first prompt. "
        "Token by token: softmax of each."
    ),
    source="the figure: Han & Ji 2025 (arXiv 2503.13305); the split and the choice of heads: ours",
    options=SplitExamples,
    procedure=run,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"maps": heat_maps},
    drawn=lambda data: ["maps"] if data.sizes["example"] else [],
    tokens=TokenView(labels, show),
    caveats={"absolute": EXACT, "none": EXACT, "alibi": "nothing rotates, so the position part is the slope alone."},
    without_meaning=frozenset({"absolute", "none"}),
)
