"""Do slash heads belong to the model or to the text? The same heads on text and on random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.kinds import points
from tl_posgen.slash.dominance import TITLES, Dominance, at_distance, statistics_of, thresholds
from tl_posgen.slash.slash import Slash

SOURCES = ("natural", "random")
_MOST_DISTANCES = 5  # that are drawn, a row each


def _panels(result: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return a panel a distance, with and without the first token, titled by its correlation over heads."""
    measure, panels = result.measure, {}
    for distance, tokens in product(measure.reached(result.trained)[:_MOST_DISTANCES], TOKENS):
        r = measure.correlation(result.numbers, distance, tokens)
        title = f"D = {distance}, {TITLES[tokens]}: r {r.plain:.2f}{in_brackets(f'{r.null:.2f}')}"
        panels[title] = {"tokens": tokens, "distance": distance}
    return panels


@dataclass(frozen=True)
class SlashTransfer(Dominance):
    r"""SlashScore on text against SlashScore on i.i.d. uniform random tokens: correlations and overlap over heads.

    The slash scores of the same heads on text and on random tokens (i.i.d., uniform), at each distance D, with and
    without the first token.

    The random prompts have the lengths and the first tokens of the natural ones, everything else drawn uniformly from
    the vocabulary with `seed`. The scores on text are those of the measure "slash".

    Args:
        kappa: slash score from which a head is slash-dominant, for the overlap of the sets.
        distances: how many tokens back that score is looked at.

    Raises:
        InputError: a distance that no prompt reaches.

    Source: that slash-dominant heads keep their scores on random tokens is claimed by Cheng et al. 2026 (arXiv
    2601.08297), whose prompts and thresholds are not known; the comparison is ours.

    Example:
        >>> result = SlashTransfer()("mini", "Down, down, down. Would it end?", nulls=0, progress=False)
        >>> result.sel(tokens="all")["score"].dims
        ('source', 'layer', 'head', 'distance')
    """

    question = "Do slash heads belong to the model or to the text?"
    after = (Slash,)
    variables = {
        "slash_score": Variable(
            "slash score on random tokens",
            description="at the head's best distance on text, of either source",
            dims=("tokens", "source", *HEAD),
            headline="random_slash_score",
            short="random",
        ),
        "score": Variable("slash score", dims=("tokens", "source", *HEAD, "distance")),
        "slash_distance": Variable("best distance on text", "tokens", "over D < N/2", whole=True),
        "uniform": Variable("slash score of uniform attention", dims=("layer", "distance")),
    }
    legend = (
        "r, Spearman: of slash scores on text and on random tokens, over heads; dominant: heads that reach kappa; "
        "Jaccard: overlap of the two sets."
    )
    figures = {
        "scatter": points(
            ("score", {"source": "natural"}),
            ("score", {"source": "random"}),
            _panels,
            title="Slash scores in and out of distribution",
            subtitle="a row a distance D; r: Pearson over heads",
            x_title="on text",
            y_title="on random tokens",
            equal=True,
            columns=len(TOKENS),
        )
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"source": list(SOURCES)}

    def usual(self) -> Mapping[str, Any]:
        return {"source": "random"}  # those on text are in the measure slash

    def of_model(self, run: Run) -> xr.Dataset:
        natural, sums = run.dataset_of(Slash), Sums(Slash.variables)
        drawn = random_prompts(run.rows, run.model.cfg.d_vocab, run.seed)

        def add_scores(layer: LayerCapture) -> None:
            sums.add_layer(layer, {"score": statistics_of(layer, entropy=False).score})

        run.capture(add_scores, needs=Slash.needs, rows=drawn)
        score: Any = xr.concat([natural["score"], sums.means()["score"]], pd.Index(SOURCES, name="source"))
        place, uniform = natural["slash_distance"], natural["uniform"].sel(tokens="all", drop=True)
        data = {"score": score, "slash_score": at_distance(score, place), "slash_distance": place, "uniform": uniform}
        return xr.Dataset(data).transpose("tokens", "source", ...)

    def reached(self, data: xr.Dataset) -> list[int]:
        """Return the distances that are looked at."""
        return [distance for distance in sorted(self.distances) if distance < data.sizes["distance"]]

    def correlation(self, numbers: Numbers, distance: int, tokens: str = "all", ranks: bool = False) -> Number:
        """Return r over heads of the scores on text with those on random tokens, or Spearman's of ranks."""
        scores = (numbers.array("score", source=source, distance=distance, tokens=tokens) for source in SOURCES)
        return numbers.correlation(*scores, ranks=ranks)

    def n_dominant(self, numbers: Numbers, distance: int | list[int], source: str) -> Number:
        """Return how many heads are slash-dominant at a distance, or at any of several."""
        dominant = self._dominant(numbers, distance, source)
        return numbers.number((dominant.any("distance") if "distance" in dominant.dims else dominant).sum(HEAD))

    def jaccard(self, numbers: Numbers, distance: int) -> Number:
        """Return |A & B| / |A | B| of the heads that are dominant on text and on random tokens; NaN where none is."""
        text, random = (self._dominant(numbers, distance, source) for source in SOURCES)
        return numbers.number((text & random).sum(HEAD) / (text | random).sum(HEAD))

    def _dominant(self, numbers: Numbers, distance: int | list[int], source: str) -> xr.DataArray:
        score = numbers.array("score", source=source, distance=distance)
        uniform = numbers.array("uniform", distance=distance)
        return score >= thresholds(self.kappa, uniform)

    def findings(self, numbers: Numbers) -> list[str]:
        at = max(self.reached(numbers.data), key=lambda distance: self.n_dominant(numbers, distance, "natural").value)
        r, r_without_first = (self.correlation(numbers, at, tokens) for tokens in TOKENS)
        n, n_random = (self.n_dominant(numbers, at, source) for source in SOURCES)
        bracketed = in_brackets(f"{r.null:.3f}", f"without the first token {r_without_first.with_interval:.3f}")
        return [
            f"At D = {at} slash scores on random tokens follow those on text over heads with r = "
            f"{r.with_interval:.3f}{bracketed}. Dominant at this distance alone: {n.plain:.0f} heads on "
            f"text{in_brackets(n.null_range)}, {n_random.plain:.0f} on random tokens, overlap (Jaccard) "
            f"{self.jaccard(numbers, at).plain:.2f}."
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row per distance: agreement over heads, and how many are dominant."""
        return pd.DataFrame(
            {
                "D": distance,
                "r": self.correlation(numbers, distance).value,
                "Spearman": self.correlation(numbers, distance, ranks=True).value,
                "r without first token": self.correlation(numbers, distance, TOKENS[1]).value,
                "dominant on text": self.n_dominant(numbers, distance, "natural").value,
                "on random": self.n_dominant(numbers, distance, "random").value,
                "Jaccard": self.jaccard(numbers, distance).value,
            }
            for distance in self.reached(numbers.data)
        )


def random_prompts(tokens: Sequence[Int[Tensor, " _"]], n_vocabulary: int, seed: int) -> list[Int[Tensor, " _"]]:
    """Return prompts of the same lengths and first tokens, the others i.i.d. uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(n_vocabulary, (len(prompt),), generator=generator) for prompt in tokens]
    return [torch.cat([prompt[:1], random[1:]]) for prompt, random in zip(tokens, drawn, strict=True)]
