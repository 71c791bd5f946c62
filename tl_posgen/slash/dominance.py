"""Slash-dominant heads: the options that define them, and the heads of a dataset that fulfil them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xarray as xr
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.options import Options
from tl_posgen.slash.slash_scores import SHORT_DISTANCES, SHORT_KAPPA


@dataclass(frozen=True)
class Dominance(Options):
    """Definition of a slash-dominant head: SlashScore(D) >= kappa at one of the distances D."""

    kappa: float = SHORT_KAPPA
    distances: Sequence[int] = tuple(SHORT_DISTANCES)

    def check(self) -> None:
        check_kappa(self.kappa)
        if not len(self.distances) or min(self.distances) < 0:
            raise InputError(
                f"distances {list(self.distances)}: give one at least, 0 (itself), 1 (previous token) or more"
            )


def check_kappa(kappa: float) -> None:
    if not 0 < kappa <= 1:
        raise InputError(f"kappa = {kappa}: choose a slash score in (0, 1]")


def check_any_reached(options: Dominance, tokens: Sequence[Tensor]) -> None:
    """Refuse prompts that reach none of the distances."""
    longest = max(len(prompt) for prompt in tokens)
    if min(options.distances) >= longest:
        raise InputError(
            f"distance {min(options.distances)}: the longest prompt has {longest} tokens; "
            "give longer prompts, or smaller distances"
        )


def check_all_reached(options: Dominance, tokens: Sequence[Tensor]) -> None:
    """Refuse distances that no prompt without its first token reaches."""
    longest = max(len(prompt) for prompt in tokens)
    if max(options.distances) >= longest - 1:
        raise InputError(
            f"distance {max(options.distances)}: without its first token the longest prompt has {longest - 1} tokens; "
            "give longer prompts, or smaller distances"
        )


def dominant_at(score: xr.DataArray, options: Any) -> xr.DataArray:
    """score >= kappa at each of the distances that the prompts reach."""
    reached = [one for one in sorted(set(options.distances)) if one < score.sizes["distance"]]
    return score.sel(distance=reached) >= options.kappa


def is_dominant(score: xr.DataArray, options: Any) -> xr.DataArray:
    """score >= kappa at any of the distances that the prompts reach."""
    return dominant_at(score, options).any("distance")
