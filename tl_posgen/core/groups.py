"""Datasets of groups of prompts: all of them and, of variables with an interval, all but one group in turn."""

from collections.abc import Sequence
from functools import reduce
from itertools import groupby

import numpy as np
import xarray as xr

from tl_posgen.core.measure import Measure
from tl_posgen.core.numbers import ALL
from tl_posgen.core.sums import Sums
from tl_posgen.stats.intervals import FEWEST, prompts_per_group


def with_groups(measure: Measure, parts: Sequence[Sums]) -> xr.Dataset:
    """Return `measure.finish` of all groups of prompts; variables with an interval also without each group.

    These have the dim `group`: "all", then the number of the group left out, and each group's share of the prompts as
    its coordinate `prompt_share`. Of fewer than four groups there is "all" alone.
    """
    data = measure.describe(measure.finish(total(parts)))
    names = [name for name, one in measure.variables.items() if one.interval and name in data]
    if not names:
        return data
    if len(parts) < FEWEST:
        return data.assign({name: data[name].expand_dims(group=[ALL]) for name in names})
    without = [measure.finish(total([*parts[:n], *parts[n + 1 :]]).without_rows()) for n in range(len(parts))]
    undefined = xr.full_like(data[names], np.nan, float)  # what only the prompts of the group left out have
    without = [undefined.assign(one[[name for name in names if name in one]]) for one in without]
    without = [one[names].reindex_like(data[names]) for one in without]
    groups = xr.concat([data[names], *without], "group", data_vars="all", combine_attrs="override")
    sizes = np.array([len(part.lengths) for part in parts])
    shares = ("group", [np.nan, *sizes / sizes.sum()])
    labels = [ALL, *map(str, range(len(parts)))]
    grouped = groups.assign_coords(group=labels, prompt_share=shares)
    return data.drop_vars(names).merge(grouped, combine_attrs="override")[list(data.data_vars)]


def total(parts: Sequence[Sums]) -> Sums:
    """Return the sums over all groups."""
    return reduce(Sums.__add__, parts)


class PromptGroups:
    """Sums of neighbouring prompts: memory grows to `MOST_GROUPS` times that of one group, however many prompts come.

    Prompts come in their order: whenever there would be more groups, each is joined with its neighbour.

    Args:
        measure: of the sums.
        grouped: whether to keep groups at all, for intervals.
        seed: of draws.
    """

    def __init__(self, measure: Measure, grouped: bool = True, seed: int = 0):
        self.measure, self.seed = measure, seed
        self.grouped = grouped and any(one.interval for one in measure.variables.values())
        self.size = 1  # prompts in a group
        self._sums: dict[int, Sums] = {}

    def sums_of(self, prompt: int) -> Sums:
        """Return the sums of the group that a prompt belongs to."""
        while self.grouped and self.size < prompts_per_group(prompt + 1):
            pairs = groupby(sorted(self._sums), lambda group: group // 2)
            self._sums = {pair: total([self._sums[one] for one in both]) for pair, both in pairs}
            self.size *= 2
        group = prompt // self.size if self.grouped else 0
        if group not in self._sums:
            self._sums[group] = Sums(self.measure.variables, self.measure.labels(), self.seed)
        return self._sums[group]

    @property
    def parts(self) -> list[Sums]:
        """The sums of every group."""
        return [self._sums[group] for group in sorted(self._sums)]

    def dataset(self) -> xr.Dataset:
        """Return the dataset of all prompts, and of all but each group."""
        return with_groups(self.measure, self.parts)
