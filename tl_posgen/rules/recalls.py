"""Recall of rules: the attention that the keys of a rule hold, for query heads and for key/value heads."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rules.calibration import groups_of
from tl_posgen.rules.hooks import ranks_by
from tl_posgen.rules.numbers.kept_keys import best_keys, squared_correlations, unions
from tl_posgen.rules.numbers.rule_scores import PREDICTING, Means, distances_of

SMALLEST = 1e-300  # attention; of none at all, a rule recalls 0
BLOCK = 256  # queries whose attention is in memory
OF_GROUPS = ("group_recall", "kept")


def recalls_of(
    capture: LayerCapture, means: Means, rules: Sequence[str], budgets: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Return means over the queries that see more than the budget, and R^2 over all: "mass" and "recall" [tokens, rule,
    budget, head], without the attention to the first key in the second place, "group_recall" and "kept" [rule, budget,
    key/value head], "r2" [rule, head].

    Args:
        capture: with its pattern.
        rules: "drawn" and "oracle" too.
    """
    sums = RecallSums(capture, len(rules), budgets)
    for start in range(0, capture.length, BLOCK):
        rows = Rows(capture, start, min(capture.length, start + BLOCK), max(budgets))
        for number, rule in enumerate(rules):
            is_oracle = rule == "oracle"
            scores = rows.scores if is_oracle else ranks_by(rule, rows.capture, rows.places, means, seed)
            if rule in PREDICTING:
                sums.products[number] += squared_correlations(scores, rows.scores, rows.visible).to(sums.device)
            sums.add(rows, number, best_keys(scores, rows.visible, max(budgets)).to(sums.device))
    return sums.means()


class Rows:
    """Attention of the queries start .. stop - 1 of a layer over the keys before `stop`."""

    def __init__(self, capture: LayerCapture, start: int, stop: int, budget: int):
        self.places, self.groups = list(range(len(capture.heads))), groups_of(capture.geometry, capture.heads)
        self.members = [[capture.heads.index(head) for head in of] for of in self.groups.values()]
        self.capture = capture.of_rows(start, stop)
        self.scores, self.pattern = capture.score_rows(start, stop), double(capture.pattern_rows(start, stop))
        self.visible = capture.geometry.sees(distances_of(stop - start, stop, self.scores.device))
        self.n_visible = self.visible.sum(-1).to(self.pattern.device)
        self.together = torch.stack([self.pattern[of].mean(0) for of in self.members])
        without_first = self.pattern.clone()
        without_first[..., 0] = 0
        self.patterns = [(one, best_masses(one, budget)) for one in (self.pattern, without_first)]
        self.best_together = best_masses(self.together, budget * max(map(len, self.members)))


class RecallSums:
    """Sums over the queries that see more keys than the budget."""

    def __init__(self, capture: LayerCapture, n_rules: int, budgets: Sequence[int]):
        self.device, self.budgets = double_device(capture.device), budgets
        self.n_groups = capture.geometry.n_key_value_heads
        self.products = torch.zeros(n_rules, 3, len(capture.heads), dtype=DOUBLE, device=self.device)
        of_heads, of_groups = (2, n_rules, len(budgets), len(capture.heads)), (n_rules, len(budgets), self.n_groups)
        shapes = dict.fromkeys(("mass", "recall"), of_heads) | dict.fromkeys(OF_GROUPS, of_groups)
        self.sums = {name: torch.zeros(shape, dtype=DOUBLE, device=self.device) for name, shape in shapes.items()}
        self.n_queries = torch.zeros(n_rules, len(budgets), dtype=DOUBLE, device=self.device)
        self.missing = [
            group for group in range(self.n_groups) if group not in groups_of(capture.geometry, capture.heads)
        ]

    def add(self, rows: Rows, rule: int, best: Int[Tensor, "head query place"]) -> None:
        """Add the attention that the best keys of one rule hold at each budget."""
        groups, n_keys = list(rows.groups), rows.pattern.shape[-1]
        masses = [pattern.gather(-1, best).cumsum(-1) for pattern, _ in rows.patterns]
        for number, budget in enumerate(self.budgets):
            if budget >= n_keys:
                continue  # no query sees more
            place, counted = (rule, number), rows.n_visible > budget
            self.n_queries[place] += counted.sum()
            for tokens, (of_rule, (_, of_best)) in enumerate(zip(masses, rows.patterns, strict=True)):
                mass = of_rule[:, counted, budget - 1]
                self.sums["mass"][(tokens, *place)] += mass.sum(-1)
                self.sums["recall"][(tokens, *place)] += (mass / of_best[:, counted, budget - 1]).sum(-1)
            union = unions(best[:, counted, :budget], rows.members, n_keys)
            n_kept = union.sum(-1, keepdim=True)
            together = torch.where(union, rows.together[:, counted], 0).sum(-1)
            best_together = rows.best_together[:, counted].gather(-1, n_kept - 1)[..., 0]
            self.sums["kept"][place][groups] += n_kept[..., 0].sum(-1)
            self.sums["group_recall"][place][groups] += (together / best_together).sum(-1)

    def means(self) -> dict[str, Tensor]:
        """Return the means; NaN where no query sees more than the budget, and for key/value heads without a head."""
        found = {name: one / self.n_queries[..., None] for name, one in self.sums.items()}
        for name in OF_GROUPS:
            found[name][..., self.missing] = torch.nan
        product, x, y = self.products.unbind(1)
        return found | {"r2": product.square() / (x * y)}


def best_masses(pattern: Float[Tensor, "head query key"], n: int) -> Float[Tensor, "head query place"]:
    """Return the attention that the best 1, 2, .. n keys of each query hold."""
    return pattern.topk(min(n, pattern.shape[-1])).values.cumsum(-1).clamp(min=SMALLEST)


def cheapest(recalls: Mapping[str, float], threshold: float, otherwise: str) -> str:
    """Return the first rule that recalls at least so much.

    Example:
        >>> cheapest({"window": 0.7, "vertical": 0.9}, 0.8, "all"), cheapest({"window": 0.7}, 0.8, "all")
        ('vertical', 'all')
    """
    return next((rule for rule, recall in recalls.items() if recall >= threshold), otherwise)
