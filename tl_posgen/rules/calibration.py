"""Calibration: mean queries and mean keys of some prompts, from which every rule of every head is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.run import Run
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.rules.head_rules import HeadRule
from tl_posgen.rules.numbers.rule_scores import Means, Weights


@dataclass
class Calibration:
    """Means over tokens of all prompts, the first token of each left out.

    Attributes:
        n_distances: tokens of the longest prompt.
        means: of the chosen query heads of each layer.
        heads: these query heads.
        groups: by layer, those of every key/value head.
        n_groups: key/value heads of a layer.
    """

    n_distances: int
    n_groups: int = 0
    means: dict[int, Means] = field(default_factory=dict)
    heads: dict[int, list[int]] = field(default_factory=dict)
    groups: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def head_rule(self, layer: int, group: int, rule: Any, budget: int | None) -> HeadRule:
        """Return a rule of one key/value head."""
        heads, means = self.groups[layer][group], self.means[layer]
        places = [self.heads[layer].index(head) for head in heads]
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
    found, sums, windows = Calibration(max(map(len, rows))), dict[int, list[Tensor]](), dict[int, int]()

    def add(capture: LayerCapture) -> None:
        layer, some = capture.layer, [double(x)[:, 1:].sum(1).cpu() for x in (capture.q, capture.k)]
        sums[layer] = [one + other for one, other in zip(sums[layer], some, strict=True)] if layer in sums else some
        found.heads[layer], found.groups[layer] = list(capture.heads), groups_of(capture.geometry, capture.heads)
        found.n_groups = max(found.n_groups, capture.geometry.n_key_value_heads)
        windows[layer] = capture.geometry.window or found.n_distances

    run.capture(add, rows=rows)
    n_tokens = sum(len(row) - 1 for row in rows)
    for layer, (q, k) in sums.items():
        found.means[layer] = Means(q / n_tokens, k / n_tokens, min(found.n_distances, windows[layer]), weights)
    return found


def groups_of(geometry: LayerGeometry, heads: Sequence[int]) -> dict[int, list[int]]:
    """Return, by key/value head, those of these query heads that read it."""
    found: dict[int, list[int]] = {}
    for head in heads:
        found.setdefault(geometry.key_head(head), []).append(head)
    return found
