"""Slash-dominant heads: the options that make one, and which heads a dataset finds so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import xarray as xr
from torch import Tensor

from tl_posgen.core.measure import Measure
from tl_posgen.core.options import Each, Threshold, Whole
from tl_posgen.errors import InputError
from tl_posgen.slash.numbers.slash_scores import SHORT_DISTANCES, SHORT_KAPPA


@dataclass(frozen=True)
class Dominance(Measure):
    """SlashScore(D) >= kappa at one of the distances D: base of the measures that single out such heads."""

    kappa: Threshold = SHORT_KAPPA
    distances: Annotated[Sequence[Whole], Each()] = tuple(SHORT_DISTANCES)

    def dominant_at(self, score: xr.DataArray) -> xr.DataArray:
        """Return score >= kappa at each of the distances that the prompts reach, along `short_distance`."""
        reached = [one for one in sorted(self.distances) if one < score.sizes["distance"]]
        return (score.sel(distance=reached) >= self.kappa).rename(distance="short_distance")

    def require_any_reached(self, tokens: Sequence[Tensor]) -> None:
        """Refuse prompts that reach none of the distances."""
        longest = max(len(prompt) for prompt in tokens)
        if min(self.distances) >= longest:
            raise InputError(
                f"distance {min(self.distances)}: the longest prompt has {longest} tokens; "
                "give longer prompts, or smaller distances"
            )

    def require_all_reached(self, tokens: Sequence[Tensor]) -> None:
        """Refuse distances that no prompt reaches, its first token left out."""
        longest = max(len(prompt) for prompt in tokens)
        if max(self.distances) >= longest - 1:
            raise InputError(
                f"distance {max(self.distances)}: without its first token the longest prompt has {longest - 1} tokens; "
                "give longer prompts, or smaller distances"
            )
