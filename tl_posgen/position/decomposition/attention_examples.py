"""Attention examples: a head's true attention beside the attention of its three-axis fit, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import Measure, TokenView, Variable
from tl_posgen.core.options import Count
from tl_posgen.core.run import MOST_CHOSEN, Run, examples_of, pick_heads
from tl_posgen.core.sums import OfFirstPrompt, Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.position.decomposition.attention_examples_figure import MAPS, SCORES, draw_patterns, maps_of
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.report.circuits import CROP, attention_maps

_TOKENS_OF_EVERY_HEAD, _VALUES_OF_EVERY_HEAD = 48, 500_000
_WHY = ("closest to position + key", "furthest from position + key")


def _labels(data: xr.Dataset) -> list[str]:
    rows = zip(*(data[name].values for name in ("layer", "head", "why", "r_within_rows")), strict=True)
    return [f"{head_name(layer, head)}: {why} (r within rows, first prompt: {r:.3f})" for layer, head, why, r in rows]


def _show(data: xr.Dataset, example: int) -> Any:
    return attention_maps(maps_of(data, example), [str(token) for token in data["token"].values], list(MAPS))


@dataclass(frozen=True)
class AttentionExamples(Measure):
    r"""softmax(W) beside softmax(a_{i-j} + b_i + c_j) for chosen heads: first prompt, first 128 tokens.

    Softmax of the true scores, softmax of the three-axis fit, and their difference. Shown are the heads with the
    highest and the lowest correlation within rows on the first prompt, and of that its first 128 tokens. Hover over a
    cell for its value.

    The fit, and the r within rows that picks the heads, are of the whole first prompt; then it is cropped. b_i never
    changes a pattern. It shows the model alone: no random init is run.

    Args:
        examples: how many heads of either end; of up to 6 heads that `heads=` chooses of their layers, all are shown.

    Source: ours

    Example:
        >>> result = AttentionExamples(examples=1)("mini", "Down, down, down.", nulls=0)
        >>> result.trained["why"].values.tolist()
        ['closest to position + key', 'furthest from position + key']
    """

    examples: Count = 2

    question = "What does the three-axis fit get right in the attention itself?"
    variables = {
        "pattern": Variable(
            "attention", "", "softmax of the scores, or of a(i-j) + b(i) + c(j)", ("example", "scores", "query", "key")
        ),
        "of_every_head": Variable(
            "attention of every head",
            description="as attention, the first tokens",
            dims=("scores", "unit", "row", "column"),
        ),
        "r_within_rows": Variable(
            "r within rows, first prompt",
            description="of all tokens of the prompt that is shown",
            dims=("example",),
            headline="r_within_rows",
        ),
    }
    has_null = False
    rows = ("example",)
    figures = {"patterns": draw_patterns}
    token_view = TokenView(_labels, _show)
    patterns = "of_every_head"
    caveats = {"absolute": "the fitted pattern's key part mixes where a key stands with what it is."}

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"scores": SCORES}

    def findings(self, numbers: Any) -> list[str]:
        return []  # the heads that are shown were picked for their numbers

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["patterns"] if data.sizes["example"] else []

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        if layer.prompt:
            return {}
        fit, place = layer.shared(fit_capture)[0], layer.positions[:CROP]
        true = layer.attention(double(layer.scores(len(place))))
        fitted = layer.attention(fit.fitted(place, place).nan_to_num(-torch.inf))
        patterns, r = torch.stack([true, fitted], 1).float(), fit.r_within_rows
        heads = torch.arange(len(r), device=r.device)
        if len(r) > MOST_CHOSEN:  # at either end there can be no other of this layer
            highest, lowest = (r.nan_to_num(fill).argsort(descending=True, stable=True) for fill in (-2, 2))
            heads = torch.cat([highest[: self.examples], lowest[-self.examples :]])
        few = patterns[..., :_TOKENS_OF_EVERY_HEAD, :_TOKENS_OF_EVERY_HEAD].clone()
        return {"examples": OfFirstPrompt({"r": r, "heads": heads, "pattern": patterns[heads], "of_every_head": few})}

    def of_sums(self, sums: Sums) -> xr.Dataset:
        r, maps, every = dict[tuple[int, int], float](), dict[tuple[int, int], Any](), dict[str, np.ndarray]()
        for layer, first in sums.by_layer("examples").items():
            values = first.value
            places = [(layer, head) for head in sums.layers[layer][1]]
            r |= zip(places, values["r"].tolist(), strict=True)
            maps |= {places[n]: pattern.numpy() for n, pattern in zip(values["heads"], values["pattern"], strict=True)}
            every |= zip((head_name(*place) for place in places), values["of_every_head"].numpy(), strict=True)
        chosen = any(len(heads) < geometry.n_heads for geometry, heads in sums.layers.values())
        picks = pick_heads(pd.Series(r), self.examples, _WHY, chosen=chosen)
        picked = {(layer, head) for layer, head, _ in picks}
        of_heads = {at: {"pattern": maps[at], "r_within_rows": r[at]} for at in picked}
        data = examples_of(self, picks, of_heads, min(CROP, sums.lengths[0]))
        n_tokens = int((_VALUES_OF_EVERY_HEAD / max(len(r), 1)) ** 0.5)  # fewer of many heads
        few = np.stack(list(every.values()), 1)[..., :n_tokens, :n_tokens]
        return data.assign(of_every_head=(self.variables["of_every_head"].dims, few)).assign_coords(unit=list(every))

    def of_model(self, run: Run) -> xr.Dataset:
        row = run.rows[0][:CROP]
        return xr.Dataset(coords={"token": ("key", run.texts(row))})
