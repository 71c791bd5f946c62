"""Attention examples: a head's true attention beside the attention of its additive fit, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import Measure, TokenView, Variable
from tl_posgen.core.options import Count
from tl_posgen.core.run import Run, head_examples, pick_heads
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.position.decomposition.three_axis import ThreeAxis, fit_capture
from tl_posgen.report.circuits import CROP, attention_maps
from tl_posgen.report.figures import DIVERGING, SCALE, Panels, model_label, token_map

_SCORES = ("true", "additive")
_MAPS = (*_SCORES, "true - add.")
_TOKENS_OF_EVERY_HEAD, _VALUES_OF_EVERY_HEAD = 48, 500_000
_WHY = ("closest to position + key", "furthest from position + key")


def _maps_of(data: xr.Dataset, example: int) -> np.ndarray:
    """Return the true attention, the additive one and their difference [map, query, key] of an example."""
    true, additive = data["pattern"].isel(example=example).transpose("scores", "query", "key").values
    return np.stack([true, additive, true - additive])


def _draw_patterns(result: Any) -> go.Figure:
    """Draw the three maps of every example head as heat maps, a row a head."""
    heads = [head_name(*place) for place in zip(result.own["layer"].values, result.own["head"].values, strict=True)]
    panels = Panels([f"{head} · {name}" for head in heads for name in _MAPS], columns=len(_MAPS), row_height=280)
    attention, difference = {"colorscale": SCALE, "zmin": 0, "zmax": 1}, {"colorscale": DIVERGING, "zmid": 0}
    for number, (example, kind) in enumerate(product(range(len(heads)), range(len(_MAPS)))):
        shown = xr.DataArray(_maps_of(result.own, example)[kind], dims=("query", "key"))
        panels.add(number, token_map(shown, **(difference if kind == 2 else attention)))
    panels.axes("key", "query").figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    subtitle = "attention of the scores, of the additive fit, their difference; first prompt; no random init"
    return panels.finish(f"True and additive attention · {model_label(result.own)}", subtitle)


def _labels(data: xr.Dataset) -> list[str]:
    rows = zip(*(data[name].values for name in ("layer", "head", "why", "r_within_rows")), strict=True)
    return [f"{head_name(layer, head)}: {why} (r within rows, first prompt: {r:.3f})" for layer, head, why, r in rows]


def _show(data: xr.Dataset, example: int) -> Any:
    return attention_maps(_maps_of(data, example), [str(token) for token in data["token"].values], list(_MAPS))


@dataclass(frozen=True)
class AttentionExamples(Measure):
    r"""softmax(W) beside softmax(a_{i-j} + b_i + c_j) for chosen heads: first prompt, first 128 tokens.

    Softmax of the true scores, softmax of the additive fit, and their difference. Shown are the heads with the highest
    and the lowest correlation within rows over all prompts, on the first 128 tokens of the first prompt; the r of a
    picture is of these tokens. Hover over a cell for its value.

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
        "of_every_head": Variable(
            *("attention of every head", "", "as attention, the first tokens", ("scores", "unit", "row", "column"))
        ),
        "r_within_rows": Variable(
            *("r within rows, first prompt", "", "of all tokens of the prompt that is shown", ("example",)),
            headline="r_within_rows",
        ),
    }
    after = (ThreeAxis,)
    has_null = False
    rows = ("example",)
    figures = {"patterns": _draw_patterns}
    token_view = TokenView(_labels, _show)
    patterns = "of_every_head"
    caveats = {"absolute": "the additive pattern's key part mixes where a key stands with what it is."}

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"scores": _SCORES}

    def findings(self, own: Any) -> list[str]:
        return []  # the heads that are shown were picked for their numbers

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["patterns"] if data.sizes["example"] else []

    def prompt_tokens(self, *given: Any, **how: Any) -> Sequence[Tensor]:
        return super().prompt_tokens(*given, **how)[:1]

    def of_model(self, run: Run) -> xr.Dataset:
        r = run.found(ThreeAxis)["r_within_rows"].sel(tokens="all").transpose("layer", "head").to_series()
        picks = pick_heads(r, self.examples, _WHY, run.where["heads"])
        n = min(CROP, len(run.rows[0]))
        of_each = int((_VALUES_OF_EVERY_HEAD / max(r.notnull().sum(), 1)) ** 0.5)  # fewer tokens of many heads
        few, every = min(n, _TOKENS_OF_EVERY_HEAD, of_each), dict[str, np.ndarray]()

        def of_layer(layer: LayerCapture) -> dict[str, Tensor]:
            fit, place = layer.once(fit_capture)[0], layer.positions[:n]
            true = double(layer.scores(n)).softmax(-1)
            additive = fit.fitted(place, place).nan_to_num(-torch.inf).softmax(-1)
            both = torch.stack([true, additive], 1).float()
            shown = both[..., :few, :few].cpu().numpy().copy()
            every.update({head_name(layer.layer, head): one for head, one in zip(layer.heads, shown, strict=True)})
            return {"pattern": both, "r_within_rows": fit.r_within_rows}

        data = head_examples(run, run.rows[0], n, picks, of_layer, **run.where)
        if every:
            maps = (self.variables["of_every_head"].dims, np.stack(list(every.values()), 1))
            data = data.assign(of_every_head=maps).assign_coords(unit=list(every))
        return data
