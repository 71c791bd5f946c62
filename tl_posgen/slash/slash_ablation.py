"""Measure what is left of each head's slash when its own Q, K or RoPE are ablated, one layer alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal, get_args

import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, Whole
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.kinds import bars
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds, bands_by_wavelength
from tl_posgen.rope.rotation import Rope
from tl_posgen.slash.dominance import (
    at_distance,
    reached,
    slash_distance,
    spectra_of,
    statistics_from_qk,
    statistics_of,
)
from tl_posgen.slash.numbers.ablations import ablate
from tl_posgen.slash.numbers.slash_scores import SHORT_DISTANCES

Scheme = Literal["thirds", "wavelength"]
_BAND_KINDS = {"drop": "without", "freeze": "unrotated", "keep": "only"}
_WHOLE_KINDS = {
    "rank_one": "Q, K of rank one",
    "no_rope": "RoPE removed",
    "means": "Q, K their means",
    "means_no_rope": "Q, K their means with RoPE removed",
}
WORDS = _WHOLE_KINDS | _BAND_KINDS
_WITHOUT_PLANES = ["unchanged", "rank_one", "means"]
_ROWS = ("condition", *HEAD)


def ablations(schemes: Sequence[str], n: int = 0) -> dict[str, tuple[str, Callable[[Rope], Bool[Tensor, " plane"]]]]:
    """Return the ablations by name, the unchanged model first: a kind, and the planes of a layer that it is about.

    Each band is dropped, frozen and kept alone, by each scheme; then Q and K of rank one, RoPE removed, means, and the
    last two together. n tokens end a medium wavelength.
    """

    def planes_of(scheme: str, number: int) -> Callable[[Rope], Bool[Tensor, " plane"]]:
        by_thirds = scheme == "thirds"
        return lambda rope: (bands_by_thirds(len(rope.inv_freq)) if by_thirds else bands_by_wavelength(rope, n))[number]

    kinds = [("unchanged", "none"), *((kind, kind) for kind in _WHOLE_KINDS)]
    unbanded = {name: (kind, lambda rope: torch.ones_like(rope.inv_freq, dtype=torch.bool)) for name, kind in kinds}
    banded = {
        f"{kind} {band}, {scheme}": (kind, planes_of(scheme, number))
        for scheme, kind, (number, band) in product(dict.fromkeys(schemes), _BAND_KINDS, enumerate(BANDS))
    }
    return {"unchanged": unbanded.pop("unchanged"), **banded, **unbanded}


def _scores(numbers: Numbers, of: str) -> xr.DataArray:
    """Return the scores without each third of the planes and under each ablation of all, of the head that is strongest
    unchanged, each model's own, or the mean over heads."""
    score = numbers.array("slash_score", condition=None).stack(place=HEAD)
    strongest = score.sel(condition="unchanged", drop=True).fillna(-1).argmax("place")
    kinds = ["unchanged", *(f"drop {band}, thirds" for band in BANDS), *_WHOLE_KINDS]
    score = score.sel(condition=[kind for kind in kinds if kind in score["condition"]])
    return score.mean("place") if of == "mean over heads" else score.isel(place=strongest)


@dataclass(frozen=True)
class SlashAblation(Measure):
    r"""SlashScore(D) of softmax(scale <R' q', R' k'>) with one layer's own q and k ablated, nothing before it changed.

    q and k of one layer at a time are ablated, and the softmax is taken anew. A slash that RoPE alone makes survives
    when Q and K are replaced by their means, and is lost when nothing rotates.

    Each band of planes set to zero ("drop"), not rotated ("freeze", theta = 0) or kept alone ("keep"); "rank_one" (Q
    and K truncated), "no_rope" (nothing rotates), "means" (Q and K replaced by their means over positions) and
    "means_no_rope", which leaves uniform attention but for ALiBi. Bands are thirds of the planes, or go by wavelength:
    high < 32 tokens, medium up to the prompt's length, low above; a layer with frequencies of its own has bands of its
    own. Means over prompts. Of a model that rotates nothing only "unchanged", "rank_one" and "means" are kept: the
    others would change nothing.

    Args:
        schemes: how to make bands, any of "thirds" and "wavelength".
        distances: where the scores of every head are kept, beside those at its best distance.

    Source: that a slash comes from RoPE acting on nearly rank-one Q and K, and from medium and high frequencies, is
    claimed by Cheng et al. 2026 (arXiv 2601.08297); the choice of ablations is ours.

    Example:
        >>> result = SlashAblation(schemes=["thirds"])("mini", "Down, down, down. Would it end?", nulls=0)
        >>> result.sel()["condition"].values[:3].tolist()
        ['unchanged', 'drop high, thirds', 'drop medium, thirds']
    """

    schemes: Sequence[Scheme] = get_args(Scheme)
    distances: Annotated[Sequence[Whole], Each()] = tuple(SHORT_DISTANCES)

    words = WORDS
    question = "What makes the slash: content, RoPE, which frequencies?"
    needs = frozenset({"pattern"})
    rows = _ROWS
    variables = {
        "score": Variable(
            "slash score",
            description="with this layer alone ablated, at the distances",
            dims=("tokens", *_ROWS, "distance"),
        ),
        "slash_score": Variable("slash score", "", "at the head's best distance, unchanged", _ROWS),
        "slash_distance": Variable("best distance", "tokens", "of the unchanged head, over D < N/2", whole=True),
        "best_uniform": Variable("slash score of uniform attention", "", "at the best distance"),
    }
    figures = {
        "ablations": bars(
            {of: [("slash score", partial(_scores, of=of))] for of in ("strongest head", "mean over heads")},
            "condition",
            title="What makes the slash",
            subtitle="slash score, each head at its best distance on text; q and k changed, softmax taken anew",
        )
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"condition": list(ablations(self.schemes))}

    def usual(self) -> Mapping[str, Any]:
        return {"condition": "unchanged"}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        unchanged, rope = layer.shared(statistics_of), layer.geometry.rope
        scores = [unchanged.score]
        for kind, planes in [*ablations(self.schemes, layer.length).values()][1:]:
            tops = [spectrum.top for spectrum in layer.shared(spectra_of, 0).values()] if kind == "rank_one" else None
            rotated = ablate(layer.q, layer.k, rope, kind, planes(rope), tops)
            scores.append(statistics_from_qk(layer, *rotated).score)
        return {"score": torch.stack(scores, 1), "uniform": unchanged.uniform[0]}

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data, uniform = sums.means(), sums.mean("uniform", ("layer", "distance"))
        if not any(len(geometry.rope.inv_freq) for geometry, _ in sums.layers.values()):
            data = data.sel(condition=_WITHOUT_PLANES)
        score = data["score"].sel(tokens="all", drop=True)
        distance = slash_distance(score.sel(condition="unchanged", drop=True))
        best = {"slash_score": at_distance(score, distance), "best_uniform": at_distance(uniform, distance)}
        return data.assign(best | {"slash_distance": distance}).sel(distance=reached(self.distances, score))

    def findings(self, numbers: Numbers) -> list[str]:
        best = numbers.extreme("slash_score")
        head = numbers.data.sel(layer=best.layer, head=best.head)
        scores = head["slash_score"].to_series()
        phrases = [f"{label} {scores[kind]:.3f}" for kind, label in _WHOLE_KINDS.items() if kind in scores]
        strongest = numbers.number(numbers.array("slash_score").max(HEAD))
        nulls = in_brackets(f"strongest of {strongest.null:.3f}" if strongest.nulls else "")
        lines = [
            f"The strongest, {best:.3f} at D = {int(head['slash_distance'])}{nulls}, with its own layer ablated: "
            f"{', '.join(phrases)}, uniform attention {float(head['best_uniform']):.3f}."
        ]
        if "no_rope" not in numbers.data["condition"]:
            lines.append(
                "No layer measured here has rotary planes, so ablations of RoPE mean nothing and are left out."
            )
        return lines
