"""Numbers of a summary, or their means over several random inits: by key, or an entry of a list."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tl_posgen.measure import NullSummary, Summary


def entry(summary: Summary, key: str, along: str, place: Any) -> float:
    """The entry of a list where the list `along` has `place`; the mean over seeds of several random inits.

    Example:
        >>> entry({"r": [0.9, 0.3], "distances": [0, 1]}, "r", "distances", 1)
        0.3
        >>> null = NullSummary([{"r": [0.1], "distances": [1]}, {"r": [0.3], "distances": [1]}])
        >>> entry(null, "r", "distances", 1)
        0.2
    """
    return float(np.mean([one[key][one[along].index(place)] for one in seeds_of(summary)]))


def mean_of(summary: Summary, key: str) -> float | None:
    """A number of the summary; of several random inits, the mean over those that have one; None where none has.

    Example:
        >>> mean_of(NullSummary([{"r": None}, {"r": 0.3}, {"r": 0.5}]), "r")
        0.4
    """
    values = [one[key] for one in seeds_of(summary) if one[key] is not None]
    return float(np.mean(values)) if values else None


def seeds_of(summary: Summary) -> Sequence[Summary]:
    return summary.seeds if isinstance(summary, NullSummary) else [summary]
