"""Calibration: mean queries and mean keys of some prompts, from which every rule of every head is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.run import Run
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.rules.head_rules import HeadRule
from tl_posgen.rules.numbers.rule_scores import Means, Weights


@dataclass(frozen=True)
class Calibration:
    """Means over tokens of all prompts, the first token of each left out.

    Attributes:
        means: of the chosen query heads of each layer.
        groups: by layer, these query heads of every key/value head.
        n_groups: key/value heads of a layer.
    """

    means: Mapping[int, Means]
    groups: Mapping[int, Mapping[int, list[int]]]
    n_groups: int

    def head_rule(self, layer: int, group: int, rule: Any, budget: int | None) -> HeadRule:
        """Return a rule of one key/value head."""
        heads, means = self.groups[layer][group], self.means[layer]
        places = [one == group for one, of in self.groups[layer].items() for _ in of]
        own = Means(means.q[places], means.k[places], means.n_distances, means.weights)
        return HeadRule(layer, group, tuple(heads), rule, budget, own)

    def places(self) -> list[tuple[int, int]]:
        """Return every layer and key/value head."""
        return [(layer, group) for layer, of in self.groups.items() for group in of]


def calibrate(run: Run, rows: Sequence[Tensor], weights: Weights) -> Calibration:
    """Return the means over these prompts, from one pass each.

    Args:
        weights: of distances, see `Means`.
    """
    sums, longest, n_tokens = run.sums(), max(map(len, rows)), sum(len(row) - 1 for row in rows)

    def add(capture: LayerCapture) -> None:
        sums.add_layer(capture, {side: double(x)[:, 1:].sum(1) for side, x in (("q", capture.q), ("k", capture.k))})

    run.capture(add, rows=rows)
    means, groups = {}, {}
    for layer, (geometry, heads) in sums.layers.items():
        q, k = (torch.from_numpy(sums.by_layer(side)[layer].sum) / n_tokens for side in "qk")
        means[layer] = Means(q, k, min(longest, geometry.window or longest), weights)
        groups[layer] = groups_of(geometry, heads)
    return Calibration(means, groups, max(one.n_key_value_heads for one, _ in sums.layers.values()))


def groups_of(geometry: LayerGeometry, heads: Sequence[int]) -> dict[int, list[int]]:
    """Return, by key/value head, those of these query heads that read it."""
    found: dict[int, list[int]] = {}
    for head in heads:
        found.setdefault(geometry.key_head(head), []).append(head)
    return found
