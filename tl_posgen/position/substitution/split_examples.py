"""Split examples: a head's scores beside their position part and their content part, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.formatting import format_number, in_brackets
from tl_posgen.core.measure import Measure, TokenView, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count
from tl_posgen.core.run import Run, head_examples, pick_heads
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.position.substitution.numbers import MAPS, SplitMaps, split_maps
from tl_posgen.position.substitution.split_examples_figure import draw_maps
from tl_posgen.report.circuits import attention_maps

N_TOKENS = 64
PARTS = ("position", "content", "both")
_MAP = ("example", "query", "key")
_WHY = ("most position", "least position")
R = "of the scores with this part, within rows of the first prompt, first token left out"
EXACT = "nothing rotates, so the position part is the same for every key, and there is nothing to show."


def _token_labels(data: xr.Dataset) -> list[str]:
    rows = zip(*(data[name].values for name in ("layer", "head", "why")), data["r"].values.tolist(), strict=True)
    return [
        f"{head_name(layer, head)}: {why} (r within rows: position {format_number(position, '.2f')}, content "
        f"{format_number(content, '.2f')}, both {format_number(of_both, '.2f')}); attention without the first token"
        for layer, head, why, (position, content, of_both) in rows
    ]


def _token_page(data: xr.Dataset, example: int) -> Any:
    """Return a circuitsvis page of one example head: softmax of each map."""
    maps = data.isel(example=example)[list(MAPS)].to_array("map").transpose("map", "query", "key").fillna(-np.inf)
    weights = np.exp(maps - maps.max("key").clip(min=-1e30)).values
    patterns = weights / weights.sum(-1, keepdims=True).clip(min=1e-30)
    return attention_maps(patterns, [str(token) for token in data["token"].values], ["true", *MAPS[1:]])


@dataclass(frozen=True)
class SplitExamples(Measure):
    r"""W_ij beside f(q_i, i - j) and g(q_i, k_j), within rows, for chosen heads: first prompt, first 64 tokens.

    A head's scores beside two parts of them: one knows the query and the distance, the other the query and the key.
    Shown are the heads that correlate most and least with their position part, on the first 64 tokens of the first
    prompt; token by token, the softmax of each.

    Random inits show the heads that the model itself chose. f takes the mean key and g the mean over distances of these
    tokens, first token left out, see `tl_posgen.position.substitution.numbers`. The rest, W - f - g, is
    interaction.

    Args:
        examples: how many heads of either end; of up to 6 heads that `heads=` chooses, all are shown.

    Source: the figure is of Han & Ji 2025 (arXiv 2503.13305); the split, the choice of heads and the null are ours.

    Example:
        >>> result = SplitExamples()("mini", "Down, down, down. Would the fall never end?", nulls=0)
        >>> result.sel()["why"].values.tolist(), result.sel()["position"].dims
        (['most position', 'least position'], ('example', 'query', 'key'))
    """

    examples: Count = 1

    question = "What do the position part and the content part of a head look like?"
    rows = ("example",)
    variables = {
        "scores": Variable("scores within rows", "logits", "first token left out, first 64 tokens", _MAP),
        "position": Variable("position part", "logits", "f(q, i - j) of the mean key, within rows", _MAP),
        "content": Variable("content part", "logits", "g(q, k) at the mean over distances, within rows", _MAP),
        "r": Variable.correlation("r within rows", R, ("example", "part"), interval=False),
    }
    figures = {"maps": draw_maps}
    token_view = TokenView(_token_labels, _token_page)
    caveats = {"absolute": EXACT, "none": EXACT, "alibi": "nothing rotates, so the position part is the slope alone."}
    without_meaning = frozenset({"absolute", "none"})

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"part": PARTS}

    def of_model(self, run: Run) -> xr.Dataset:
        tokens = run.rows[0][:N_TOKENS]
        if run.trained is not None:  # null models show its heads
            picks = list(zip(*(run.trained[name].values.tolist() for name in ("layer", "head", "why")), strict=True))
        else:
            position_r: dict[tuple[int, int], float] = {}

            def keep(layer: LayerCapture) -> None:
                places = [(layer.layer, head) for head in layer.heads]
                position_r.update(zip(places, _maps_of(layer).r[0].tolist(), strict=True))

            run.capture(keep, rows=[tokens])
            values, chosen = pd.Series(position_r, dtype=float), run.where["heads"] is not None
            picks = pick_heads(values, self.examples, _WHY, chosen=chosen)

        def examples(layer: LayerCapture) -> dict[str, Tensor]:
            maps = _maps_of(layer)
            return {**{name: getattr(maps, name).float() for name in MAPS}, "r": maps.r.mT}

        return head_examples(run, tokens, len(tokens), picks, examples)

    def findings(self, numbers: Numbers) -> list[str]:
        lines = []
        for example in numbers.data["example"].values.tolist():
            place = numbers.data.sel(example=example)
            r_of_parts = [numbers("r", example=example, part=part) for part in PARTS]
            nulls = (in_brackets(f"random init {r.of_inits.plain:.2f}" if r.inits else "") for r in r_of_parts)
            position, content, of_both = map("{:.2f}{}".format, (r.plain for r in r_of_parts), nulls)
            lines.append(
                f"{head_name(place['layer'], place['head'])}, {place['why'].item()}: within rows of one "
                f"prompt scores correlate with their position part at {position}, with their content part at "
                f"{content}, with both at {of_both}."
            )
        return lines

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["maps"] if data.sizes["example"] else []


def _maps_of(layer: LayerCapture) -> SplitMaps:
    """Return the maps of every captured head."""
    geometry, away = layer.geometry, double(layer.positions[:, None] - layer.positions)
    options: dict[str, Any] = {"window": geometry.window, "bias": geometry.distance_bias(away, layer.heads)}
    return split_maps(layer.scores(), layer.q, layer.k, geometry.rope, geometry.scale, **options)
