"""The trial of rules on one model: calibrated on even prompts, measured on odd ones, and a plan for every head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.metric import CHOSEN
from tl_posgen.rules.calibration import calibrate
from tl_posgen.rules.head_rules import ALL, HeadRule
from tl_posgen.rules.hooks import hooks_of
from tl_posgen.rules.recalls import cheapest, recalls_of

Losses = Float[np.ndarray, "budget prompt"]


def n_steps(n_places: int, n_rules: int) -> int:
    """Return how many steps of bisection find one of the recalls of so many key/value heads and rules, or none."""
    return (n_places * n_rules).bit_length()


class Trial:
    """The rules of one model on its prompts.

    Args:
        measure: a `Rules`.
    """

    def __init__(self, measure: Any, run: Run):
        self.measure, self.run = measure, run
        self.even, self.odd = run.rows[::2], run.rows[1::2]
        self.rules, self.budgets = measure.labels()["rule"], measure.labels()["budget"]
        self.calibration = calibrate(run, self.even, measure.weights)
        self.places = self.calibration.places()
        self.untouched: Losses

    # Attention

    def recalls(self, rows: Sequence[Tensor]) -> Sums:
        """Return what each rule keeps of the attention in these prompts."""
        sums = self.run.sums()

        def add(capture: LayerCapture) -> None:
            means = self.calibration.means[capture.layer]
            sums.add_layer(capture, recalls_of(capture, means, self.rules, self.budgets, self.run.seed))

        self.run.capture(add, frozenset({"pattern"}), rows)
        return sums

    def means(self, sums: Sums) -> xr.Dataset:
        """Return the calibration as arrays."""
        found = []
        for layer, means in self.calibration.means.items():
            geometry, heads = sums.layers[layer]
            values = {
                "mean_query": (("head", "component"), means.q.numpy()),
                "mean_key": (("head", "component"), means.k.numpy()),
                "reads": ("head", [float(geometry.key_head(head)) for head in heads]),
                "n_distances": means.n_distances,
            }
            found.append(xr.Dataset(values, {"layer": layer, "head": heads, "component": range(means.q.shape[1])}))
        return sums.join_layers(found)

    # Losses

    def losses(self, rows: Sequence[Tensor], hooks: HookList) -> Losses:
        """Return the loss of each prompt behind its first B tokens; NaN where it has no more."""
        found = np.full((len(self.budgets), len(rows)), np.nan)
        lengths = [len(row) for row in rows]
        for length in sorted(set(lengths)):
            places = [place for place, one in enumerate(lengths) if one == length]
            losses = self.run.losses(torch.stack([rows[place] for place in places]), hooks)
            for number, budget in enumerate(self.budgets):
                if losses.shape[1] > budget:
                    found[number, places] = losses[:, budget:].mean(1).numpy()
        return found

    def rise(self, rules: Sequence[HeadRule], budget: int) -> Float[np.ndarray, " prompt"]:
        """Return the rise of the loss of every odd prompt under rules."""
        found = self.losses(self.odd, hooks_of(self.run.model, rules, self.run.seed)) - self.untouched
        return found[self.budgets.index(budget)]

    def rises(self) -> xr.Dataset:
        """Return the loss untouched, and its rise with one rule in every head."""
        self.untouched = self.losses(self.odd, [])
        loss = xr.DataArray(self.untouched, {"budget": self.budgets}, ("budget", "prompt"))
        return xr.Dataset({"loss": loss, "rise": self.cells()})

    def rises_alone(self, alone: str) -> xr.Dataset:
        """Return the rise with a rule in one layer, or one key/value head, alone."""
        layers = []
        for layer, groups in self.calibration.groups.items():
            if alone == "layer":
                layers.append(self.cells(layer))
            else:
                found = xr.concat([self.cells(layer, one) for one in groups], pd.Index(groups, name="key_value_head"))
                layers.append(found.reindex(key_value_head=range(self.calibration.n_groups)))
        whole = xr.concat(layers, pd.Index(self.calibration.groups, name="layer"))
        return xr.Dataset({f"{'layer' if alone == 'layer' else 'group'}_rise": whole})

    def cells(self, layer: int | None = None, group: int | None = None) -> xr.DataArray:
        """Return the rise by every rule and budget: in every head, in those of a layer, or in one key/value head."""
        chosen = [place for place in self.places if layer in (None, place[0]) and group in (None, place[1])]

        def rise(rule: str, budget: int) -> Float[np.ndarray, " prompt"]:
            return self.rise([self.calibration.head_rule(*place, rule, budget) for place in chosen], budget)

        found = np.array([[rise(rule, budget) for budget in self.budgets] for rule in self.rules])
        return xr.DataArray(found, {"rule": self.rules, "budget": self.budgets}, ("rule", "budget", "prompt"))

    # The plan

    def plans(self) -> xr.Dataset:
        """Return the cheapest rule of every key/value head at each budget, and what these cost together."""
        sums, untouched = self.recalls(self.even), self.losses(self.even, [])
        recalls = sums.mean("group_recall").mean("prompt").sel(rule=self.measure.in_order).fillna(1)  # all keys kept
        layers, groups = list(self.calibration.groups), range(self.calibration.n_groups)
        names = np.full((len(self.budgets), len(layers), len(groups)), "", object)
        shares, rises = [], []
        for number, budget in enumerate(self.budgets):
            share, plan = self.plan(recalls.sel(budget=budget), untouched[number], budget)
            for one in plan:
                names[number, layers.index(one.layer), one.key_value_head] = one.rule
            shares.append(share)
            rises.append(self.rise(plan, budget))
        coords = {"budget": self.budgets, "layer": layers, "key_value_head": list(groups)}
        data = {"plan": (tuple(coords), names), "plan_recall": ("budget", shares)}
        return xr.Dataset(data | {"plan_rise": (("budget", "prompt"), np.array(rises))}, coords)

    def plan(self, recalls: xr.DataArray, untouched: np.ndarray, budget: int) -> tuple[float, list[HeadRule]]:
        """Return a threshold with which the loss on even prompts rises by no more than epsilon, and its rules: the
        lowest one if the rise falls with the threshold, as bisection takes it to."""
        of_place = {place: recalls.sel(layer=place[0], key_value_head=place[1]).to_series() for place in self.places}
        thresholds = sorted(float(recall) for one in of_place.values() for recall in one)
        low, high = 0, 2 ** n_steps(len(self.places), len(self.measure.in_order)) - 1  # beyond the last one, all keys
        number = self.budgets.index(budget)

        def planned(place: int) -> list[HeadRule]:
            least = thresholds[place] if place < len(thresholds) else np.inf
            rules = {at: cheapest(one.to_dict(), least, ALL) for at, one in of_place.items()}
            return [
                self.calibration.head_rule(*at, rule, None if rule == ALL else budget) for at, rule in rules.items()
            ]

        while low < high:
            middle = (low + high) // 2
            losses = self.losses(self.even, hooks_of(self.run.model, planned(middle), self.run.seed))[number]
            rise = np.nanmean(losses - untouched)
            if (rise if CHOSEN.get() is None else abs(rise)) <= self.measure.epsilon:
                high = middle
            else:
                low = middle + 1
        return (thresholds[low] if low < len(thresholds) else 1.0), planned(low)
