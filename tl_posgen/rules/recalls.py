"""Recall of rules: the attention that the keys of a rule hold, for query heads and for key/value heads."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rules.calibration import groups_of
from tl_posgen.rules.hooks import ranks_by
from tl_posgen.rules.numbers.kept_keys import best_masses, kept_keys, mass_of, squared_correlations
from tl_posgen.rules.numbers.rule_scores import PREDICTING, Means, distances_of

BLOCK = 256  # queries whose attention is in memory
OF_GROUPS = ("group_recall", "kept")


def recalls_of(
    capture: LayerCapture, means: Means, rules: Sequence[str], budgets: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Return means over the queries that see more than the budget, and R^2 over all: "mass" and "recall" [rule, budget,
    head], "group_recall" and "kept" [rule, budget, key/value head], "r2" [rule, head].

    Args:
        capture: with its pattern.
        rules: "drawn" and "oracle" too.
    """
    sums = RecallSums(capture, len(rules), len(budgets))
    for start in range(0, capture.length, BLOCK):
        stop = min(capture.length, start + BLOCK)
        rows = Rows(capture, start, stop)
        for number, rule in enumerate(rules):
            is_oracle = rule == "oracle"
            scores = rows.scores if is_oracle else ranks_by(rule, rows.capture, rows.places, means, seed)
            if rule in PREDICTING:
                sums.products[number] += squared_correlations(scores, rows.scores, rows.visible).to(sums.device)
            for place, budget in enumerate(budgets):
                sums.add(rows, (number, place), kept_keys(scores, rows.visible, budget), budget)
    return sums.means()


class Rows:
    """Attention of the queries start .. stop - 1 of a layer over the keys before `stop`."""

    def __init__(self, capture: LayerCapture, start: int, stop: int):
        self.places, self.groups = list(range(len(capture.heads))), groups_of(capture.geometry, capture.heads)
        self.members = [[capture.heads.index(head) for head in of] for of in self.groups.values()]
        self.capture = capture.of_rows(start, stop)
        self.scores, pattern = capture.score_rows(start, stop), double(capture.pattern_rows(start, stop))
        self.visible = capture.geometry.sees(distances_of(stop - start, stop, self.scores.device))
        self.own = pattern, best_masses(pattern)
        together = torch.stack([pattern[of].mean(0) for of in self.members])
        self.together = together, best_masses(together)


class RecallSums:
    """Sums over the queries that see more keys than the budget."""

    def __init__(self, capture: LayerCapture, n_rules: int, n_budgets: int):
        self.device = double_device(capture.device)
        self.n_groups = capture.geometry.n_key_value_heads
        self.products = torch.zeros(n_rules, 3, len(capture.heads), dtype=DOUBLE, device=self.device)
        sizes = dict.fromkeys(("mass", "recall"), len(capture.heads)) | dict.fromkeys(OF_GROUPS, self.n_groups)
        self.sums = {
            name: torch.zeros(n_rules, n_budgets, size, dtype=DOUBLE, device=self.device)
            for name, size in sizes.items()
        }
        self.n_queries = torch.zeros(n_budgets, dtype=DOUBLE, device=self.device)
        self.missing = [
            group for group in range(self.n_groups) if group not in groups_of(capture.geometry, capture.heads)
        ]

    def add(self, rows: Rows, place: tuple[int, int], kept: Tensor, budget: int) -> None:
        """Add what the keys hold that one rule keeps."""
        kept = kept.to(self.device)
        counts = (rows.visible.sum(-1) > budget).to(self.device)
        self.n_queries[place[1]] += counts.sum() if place[0] == 0 else 0
        union = torch.stack([kept[of].any(0) for of in rows.members])
        groups = list(rows.groups)
        self.sums["kept"][place][groups] += union.sum(-1)[:, counts].sum(-1)
        mass, share = recall_by(*rows.own, kept)
        self.sums["mass"][place] += mass[:, counts].sum(-1)
        self.sums["recall"][place] += share[:, counts].sum(-1)
        self.sums["group_recall"][place][groups] += recall_by(*rows.together, union)[1][:, counts].sum(-1)

    def means(self) -> dict[str, Tensor]:
        """Return the means; NaN where no query sees more than the budget, and for key/value heads without a head."""
        found = {name: one / self.n_queries[:, None] for name, one in self.sums.items()}
        for name in OF_GROUPS:
            found[name][..., self.missing] = torch.nan
        product, x, y = self.products.unbind(1)
        return found | {"r2": product.square() / (x * y)}


def recall_by(pattern: Tensor, best: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention in the kept keys of every query, and its share of what as many best keys hold."""
    mass = mass_of(pattern, kept)
    return mass, mass / best.gather(-1, kept.sum(-1, keepdim=True) - 1)[..., 0]


def cheapest(recalls: Mapping[str, float], threshold: float, otherwise: str) -> str:
    """Return the first rule that recalls at least so much.

    Example:
        >>> cheapest({"window": 0.7, "vertical": 0.9}, 0.8, "all"), cheapest({"window": 0.7}, 0.8, "all")
        ('vertical', 'all')
    """
    return next((rule for rule, recall in recalls.items() if recall >= threshold), otherwise)
