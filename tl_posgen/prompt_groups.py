"""Intervals over prompts: a measure's collectors, one a group of neighbours, joined with each left out in turn."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.collector import Collector, Variable
from tl_posgen.measure import Request
from tl_posgen.stats.intervals import FEWEST, MOST_GROUPS, jackknife_interval, prompts_per_group

GROUP = "prompt_group"
INTERVAL = (
    f"of the 95 % interval over prompts, by a jackknife over {FEWEST} to {MOST_GROUPS} groups; none of fewer prompts"
)


class PromptGroups:
    """A measure's collectors: joined, its dataset; without one of them, what its intervals are made of.

    Prompts come in their order, and how many is not known: whenever there would be more than `MOST_GROUPS` groups,
    each is joined with its neighbour. A collector's memory grows to as many times that of one.
    """

    def __init__(self, request: Request, seed: int, intervals: bool = True):
        self.request, self.seed = request, seed
        self.grouped = intervals and any(one.interval for one in request.measure.variables.values())
        self.size = 1  # prompts in a group
        self._collectors: dict[int, Collector] = {}

    def of(self, prompt: int) -> Collector:
        """The collector that takes this prompt in."""
        size = prompts_per_group(prompt + 1)
        while self.grouped and self.size < size:
            pairs = groupby(sorted(self._collectors), lambda group: group // 2)
            self._collectors = {pair: joined([self._collectors[one] for one in both]) for pair, both in pairs}
            self.size *= 2
        group = prompt // self.size if self.grouped else 0
        if group not in self._collectors:
            self._collectors[group] = self.request.collect(self.seed)
        return self._collectors[group]

    def dataset(self, prompts: Iterable[int]) -> xr.Dataset:
        """What was found of all prompts, with the intervals of the variables that have one."""
        parts = [self._collectors[group] for group in sorted(self._collectors)]
        whole = joined(parts).dataset()
        if not self.grouped:
            return whole
        sizes = Counter(prompt // self.size for prompt in prompts)
        share = np.array([sizes[group] / sizes.total() for group in sorted(sizes)])
        left_out = [one.dataset() for one in all_but_one(parts)] if len(parts) >= FEWEST else []
        return whole.assign(interval_ends(whole, left_out, share, self.request.measure.variables))


def joined(parts: Sequence[Collector]) -> Collector:
    return reduce(lambda one, other: one.joined(other), parts)


def all_but_one(parts: Sequence[Collector], outside: Sequence[Collector] = ()) -> Iterator[Collector]:
    """What is outside and all parts but one, joined, for each part in turn: n log n joins of n parts."""
    if len(parts) == 1:
        yield from outside
        return
    half = len(parts) // 2
    for inside, others in ((parts[:half], parts[half:]), (parts[half:], parts[:half])):
        yield from all_but_one(inside, [joined([*outside, *others])])


def interval_ends(
    whole: xr.Dataset,
    left_out: Sequence[xr.Dataset],
    share: Float[np.ndarray, " group"],
    declared: Mapping[str, Variable],
) -> dict[str, Any]:
    """`<name>_low` and `<name>_high` of the variables with an interval and of their mean over everything; for other
    functions of heads' numbers `<name>_left_out`, the number without each group, and the groups' `prompt_share`."""
    ends: dict[str, Any] = {"prompt_share": (GROUP, share, {"long_name": "share of the prompts"})} if left_out else {}
    for name, variable in declared.items():
        if not variable.interval or name not in whole:
            continue
        values = [whole[name], *(one[name].reindex_like(whole[name]) for one in left_out)]
        over = [dim for dim in whole[name].dims if dim != "variant"]  # a choice of tokens is nothing to average over
        for key, label, reduced in (
            (name, variable.label, values),
            (f"mean_{name}", f"mean {variable.label}", [one.mean(over) for one in values]),
        ):
            value, *without = (one.transpose(*reduced[0].dims) for one in reduced)
            nothing = np.full((2, *value.shape), np.nan)
            edges = jackknife_interval(value.values, np.stack(without), share, variable.bounds) if without else nothing
            for end, word, edge in zip(("low", "high"), ("lower", "upper"), edges, strict=True):
                words = {"long_name": f"{label}, {word} end", "units": variable.unit, "description": INTERVAL}
                ends[f"{key}_{end}"] = (value.dims, edge, {key: one for key, one in words.items() if one})
        if left_out and variable.dims[-2:] == ("layer", "head"):
            without = np.stack([one.transpose(*variable.dims).values for one in values[1:]])
            label = {"long_name": f"{variable.label}, without a group of prompts"}
            ends[f"{name}_left_out"] = ((GROUP, *variable.dims), without, label)
    return ends
