"""What is left of each head's slash when its own Q, K or RoPE are ablated, one layer alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.collector import Collector, HeadRows, Variable
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.report.figures import COLOURS, Panels, model_label, sides
from tl_posgen.report.sentences import at_head, head_reference
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds, bands_by_wavelength
from tl_posgen.rope.rotation import Rope
from tl_posgen.slash.ablations import ablate
from tl_posgen.slash.layer_means import (
    at_distance,
    best_distance,
    by_head,
    means_over_prompts,
    of_head,
    statistics_from_qk,
    statistics_of,
    strongest,
    with_and_without,
)
from tl_posgen.slash.slash_scores import SlashStatistics
from tl_posgen.summary import Summary

Scheme = Literal["thirds", "wavelength"]
BAND_KINDS = ("drop", "freeze", "keep")
WHOLE_KINDS = {
    "rank_one": "Q, K of rank one",
    "no_rope": "RoPE removed",
    "means": "Q, K their means",
    "means_no_rope": "means, RoPE removed",
}
WITHOUT_PLANES = ("unchanged", "rank_one", "means")
KEPT = ("score", "score_without_first_token", "uniform")
N_HEADS = 8  # the strongest heads, drawn one by one


@dataclass(frozen=True)
class Condition:
    """One ablation: a kind, and for "drop", "freeze" and "keep" a frequency band.

    Attributes:
        n: tokens of the prompt, which limit the medium band where bands are made by wavelength.
    """

    kind: str
    scheme: str = ""
    band: str = ""
    n: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.band}, {self.scheme}" if self.band else self.kind

    def planes(self, rope: Rope) -> Bool[Tensor, " plane"]:
        """Which planes of a layer the band holds."""
        bands = bands_by_thirds(len(rope.inv_freq)) if self.scheme == "thirds" else bands_by_wavelength(rope, self.n)
        return bands[BANDS.index(self.band)]


def conditions(schemes: Sequence[str], n: int) -> list[Condition]:
    """Unchanged; each band dropped, frozen and kept alone; rank one, RoPE removed, means, and the last two."""
    bands = product(dict.fromkeys(schemes), BAND_KINDS, BANDS)
    banded = [Condition(kind, scheme, band, n) for scheme, kind, band in bands]
    return [Condition("unchanged"), *banded, *(Condition(kind) for kind in WHOLE_KINDS)]


def in_words(label: str) -> str:
    """A condition as axes and legends call it."""
    return WHOLE_KINDS.get(label, label)


@dataclass(frozen=True)
class SlashAblation(Options):
    r"""SlashScore(D) of softmax(scale <R' q', R' k'>) with one layer's own q and k ablated, nothing before it changed.

    Each band of planes set to zero ("drop"), not rotated ("freeze", theta = 0) or kept alone ("keep"); "rank_one" (Q
    and K truncated), "no_rope" (nothing rotates), "means" (Q and K replaced by their means over positions) and
    "means_no_rope", which leaves uniform attention but for ALiBi. A slash that is only RoPE survives "means" and is
    lost in "no_rope". Bands are thirds of the planes, or go by wavelength: high < 32 tokens, medium up to the prompt's
    length, low above; a layer with frequencies of its own has bands of its own. Means over prompts. Of a model that
    rotates nothing only "unchanged", "rank_one" and "means" are kept: the others would change nothing.

    Args:
        schemes: how to make bands, any of "thirds" and "wavelength".

    Raises:
        InputError: an unknown scheme.

    Source: that a slash comes from RoPE acting on nearly rank-one Q and K, and from medium and high frequencies, is
    claimed by Cheng et al. 2026 (arXiv 2601.08297); the choice of ablations is ours.

    Example:
        >>> from tl_posgen.slash import slash_ablation
        >>> result = slash_ablation("mini", "Down, down, down. Would it end?", schemes=["thirds"], null_seeds=())
        >>> result.dataset["condition"].values[:3].tolist()
        ['unchanged', 'drop high, thirds', 'drop medium, thirds']
    """

    schemes: Sequence[Scheme] = get_args(Scheme)


class SlashAblationCollector(Collector):
    options: SlashAblation

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._of_condition: dict[str, HeadRows] = defaultdict(HeadRows)
        self._turns = False

    def update(self, layer: LayerCapture) -> None:
        self._turns |= len(layer.geometry.rope.inv_freq) > 0
        for condition in conditions(self.options.schemes, layer.q.shape[1]):
            found = by_head(ablated_statistics(layer, condition))
            self._of_condition[condition.label].add(layer, **{name: found[name] for name in KEPT})

    def dataset(self) -> xr.Dataset:
        measured = [label for label in self._of_condition if self._turns or label in WITHOUT_PLANES]
        found = [means_over_prompts(self._of_condition[label]) for label in measured]
        data = xr.concat(found, xr.DataArray(measured, dims="condition", name="condition"))
        place = best_distance(data["score"].sel(condition="unchanged", drop=True))
        data = data.drop_vars("uniform").assign(
            best_distance=place,
            score_at_best=at_distance(data["score"], place),
            uniform_at_best=at_distance(data["uniform"].sel(condition="unchanged", drop=True), place),
        )
        return data.assign_attrs(rows=["condition", "layer", "head"], turns=str(self._turns))


def ablated_statistics(layer: LayerCapture, condition: Condition) -> SlashStatistics:
    """Slash statistics of one layer with its own captured q and k ablated, nothing before it changed."""
    if condition.kind == "unchanged":
        return layer.once(statistics_of)
    rope = layer.geometry.rope
    planes = condition.planes(rope) if condition.band else None
    return statistics_from_qk(layer, *ablate(layer.q, layer.k, rope, condition.kind, planes))


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    unchanged = data["score_at_best"].sel(condition="unchanged", drop=True)
    reference = head_reference(unchanged.to_dataset(name="score"), "score") or ""
    head = of_head(data, reference)
    return {
        "conditions": [str(one) for one in data["condition"].values],
        "strongest_head": reference,
        "strongest_distance": int(head["best_distance"]),
        "strongest": float(unchanged.max()),
        "strongest_by_condition": [float(value) for value in head["score_at_best"].values],
        "strongest_uniform": float(head["uniform_at_best"]),
        "turns": data.attrs["turns"] == "True",
    }


def findings(own: Summary, null: Any) -> list[str]:
    scores = dict(zip(own["conditions"], own["strongest_by_condition"], strict=True))
    parts = [f"{words} {scores[kind]:.3f}" for kind, words in WHOLE_KINDS.items() if kind in scores]
    parts.append(f"uniform attention {own['strongest_uniform']:.3f}")
    random = "" if null is None else f" (strongest of the random init {null['strongest']:.3f})"
    lines = [
        f"The strongest, {at_head(own['strongest_head'], own['strongest'])} at D = {own['strongest_distance']}{random}"
        f", with its own layer ablated: {', '.join(parts)}."
    ]
    if not own["turns"]:
        lines.append("No layer measured here has rotary planes, so ablations of RoPE mean nothing and are left out.")
    return lines


def strongest_heads(result: Any) -> go.Figure:
    """Bars: the strongest heads at their best distance, under each ablation."""
    both = sides(result)
    panels = Panels([side for side, _, _ in both], columns=1, row_height=270)
    for number, (_, data, _) in enumerate(both):
        panels.add(number, *bars(data))
    panels.axes("", "slash score").figure.update_layout(barmode="group")
    subtitle = "the strongest heads, each at its best distance on text; q and k changed, softmax taken anew"
    if not result.summary["turns"]:
        subtitle += "; no layer has rotary planes, so none can be turned off"
    return panels.finish(f"What makes the slash · {model_label(result.dataset)}", subtitle)


def bars(data: xr.Dataset) -> list[Any]:
    by_thirds = {f"drop {band}, thirds": f"{band} planes dropped" for band in BANDS}
    names = {"unchanged": "unchanged", **WHOLE_KINDS, **by_thirds}
    unchanged = data["score_at_best"].sel(condition="unchanged", drop=True)
    heads = [data.sel(layer=layer, head=head) for layer, head in strongest(unchanged, N_HEADS)]
    x = [f"L{int(one['layer'])} H{int(one['head'])}, D = {int(one['best_distance'])}" for one in heads]
    shown = [kind for kind in names if kind in data["condition"]]
    traces: list[Any] = [
        go.Bar(
            x=x,
            y=[float(one["score_at_best"].sel(condition=kind)) for one in heads],
            name=names[kind],
            marker_color=COLOURS[number % len(COLOURS)],
        )
        for number, kind in enumerate(shown)
    ]
    marker = {"symbol": "line-ew-open", "size": 40, "color": "black"}
    uniform = [float(one["uniform_at_best"]) for one in heads]
    return [*traces, go.Scatter(x=x, y=uniform, mode="markers", marker=marker, name="uniform attention")]


PER_HEAD = ("condition", "layer", "head")
MEASURE = Measure(
    name="slash_ablation",
    question="What makes the slash: content, RoPE, which frequencies?",
    explanation=(
        "q and k of one layer at a time are ablated and the softmax taken anew. A slash of RoPE alone survives Q and K "
        "replaced by their means, and is lost when nothing rotates."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); the choice of ablations: ours",
    options=SlashAblation,
    collector=SlashAblationCollector,
    needs=frozenset({"pattern"}),
    variables={
        **with_and_without(
            {"score": Variable("slash score", "", "with this layer alone ablated", (*PER_HEAD, "distance"))}
        ),
        "score_at_best": Variable("slash score", "", "at the head's best distance, unchanged", PER_HEAD),
        "best_distance": Variable("best distance", "tokens", "of the unchanged head, over D < N/2"),
        "uniform_at_best": Variable("slash score of uniform attention", description="at the best distance"),
    },
    summarise=summarise,
    findings=findings,
    figures={"ablations": strongest_heads},
)
