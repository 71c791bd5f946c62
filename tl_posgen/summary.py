"""Summaries: the numbers of a dataset that are shown or judged, and those of its random inits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tl_posgen.options import fits

Summary = Mapping[str, Any]


def jsonable(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinity, which JSON lacks, become null, arrays lists, and others words.

    Example:
        >>> jsonable({"r": np.float32(0.5), "curve": np.array([1.0, np.nan]), 3: (True, None)})
        {'r': 0.5, 'curve': [1.0, None], '3': [True, None]}
    """
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    return [jsonable(one) for one in value] if isinstance(value, Sequence) else str(value)


class NullSummary(Mapping[str, Any]):
    """The summaries of one or several random inits: a number is the mean over the seeds that have one, a list of
    numbers the mean of each entry, anything else the first's.

    Example:
        >>> null = NullSummary([{"r": 0.3, "by_k": [1, 2], "head": "1.2"}, {"r": 0.5, "by_k": [1, 3], "head": "0.0"}])
        >>> null["r"], round(null.spread("r"), 4), null["by_k"], null["head"]
        (0.4, 0.1414, [1.0, 2.5], '1.2')
    """

    def __init__(self, summaries: Sequence[Summary]):
        self.seeds = list(summaries)

    def __getitem__(self, key: str) -> Any:
        values = [summary[key] for summary in self.seeds if key in summary]
        if not values:
            raise KeyError(key)
        if all(value == values[0] for value in values):
            return values[0]
        if all(fits(value, Sequence[float]) for value in values) and len(set(map(len, values))) == 1:
            return np.mean(values, axis=0).tolist()
        numbers = self._numbers(key)
        return float(np.mean(numbers)) if numbers else values[0]

    def _numbers(self, key: str) -> list[int | float]:
        """Of the seeds that have one."""
        return [summary[key] for summary in self.seeds if key in summary and fits(summary[key], float)]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for summary in self.seeds for key in summary))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def spread(self, key: str) -> float | None:
        """Standard deviation over the seeds that have a number; None of fewer than two."""
        numbers = self._numbers(key)
        return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
