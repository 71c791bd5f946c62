"""Order disturbed in the text, in the position index, or in the features: how fast does the loss rise?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, Real, Share, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.interventions import tokens_by_condition
from tl_posgen.models.streaming.stream import BATCH, prompts_at_once
from tl_posgen.position.order import cloze
from tl_posgen.position.order.cloze import N_CHOICES, EncodedItem, encoded_items, score_items
from tl_posgen.position.order.hooks import Condition, conditions_for, disturb, draw
from tl_posgen.position.order.numbers import Reach
from tl_posgen.report.circuits import CROP
from tl_posgen.report.kinds import lines

TARGETS = ("all", "unmoved", "suffix")
FEW, MANY = 0.05, 0.2  # shares that sentences name: the paper's claim has them on either side of 5 to 10 %
SHOWN = 0.1  # the ratio nearest to this is shown by token
DIMS, CLOZE = ("condition", "reach", "ratio", "draw", "prompt"), ("condition", "ratio", "item")
TOKEN = ("condition", "shown_target")
_RIGHT = "whether the right choice has the highest sum of ln p, widest reach"
_WITH_SENTENCE: tuple[Condition, ...] = ("words", "positions")
WORDS = {
    "tokens": "swapped tokens (T)",
    "words": "swapped words (T)",
    "positions": "swapped positions (P)",
    "key_positions": "swapped positions of keys alone (P = F)",
    "jitter": "jittered distances (F)",
    "position_part": "swapped positions in the position part alone (F')",
}


def _curves(result: Any) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Return a panel a reach, and one of the cloze, with a curve a condition."""
    data, conditions = result.trained, result.trained["condition"].values.tolist()
    panels = {
        f"rise of the loss, {reach}": [
            (WORDS[name], "change", {"condition": name, "reach": reach, "target": "unmoved"}) for name in conditions
        ]
        for reach in data["reach"].values.tolist()
    }
    if "cloze_accuracy" in data:
        of_cloze = [(WORDS[name], "cloze_accuracy", {"condition": name}) for name in conditions]
        panels[f"accuracy of the cloze, chance {1 / N_CHOICES:.0%}"] = of_cloze
    return panels


@dataclass(frozen=True)
class Perturbation(Measure):
    """change(rho) = loss disturbed - loss, on the same targets, with a share rho of the prompt out of order.

    The loss after tokens of the text (T), positions of q and k (P) or rotated features (F) were moved, by the share of
    tokens that moved. 95 % intervals are over prompts, each the mean over draws. Beside it stands the accuracy in a
    cloze made from the text, with a share of its context moved; its intervals are over items.

    Conditions: "tokens" and "words" (T: the text itself is swapped, targets move with it), "positions" (P: only the
    position index of queries and keys), "key_positions" (P on keys, which is also F: each key rotated as another
    position), "jitter" (F: pairs see i - j + u), "position_part" (F': the position part f sees the swapped index,
    content and residual do not). One seeded draw of disjoint swaps per prompt, draw and ratio, the same for all
    conditions but words; the swaps of a lower ratio are among those of a higher one. The first token and a suffix are
    never moved. Targets: "all", "unmoved" (places whose token, or position, was not swapped), "suffix" (the clean end).

    The cloze: passages of 40 words, to be finished with their own last word among four of their words, the context
    disturbed under the same conditions, at the widest reach.

    Args:
        ratios: shares of tokens to move, in [0, 1].
        conditions: all that the model can have, if left out: only the text's where scores know no distance.
        reaches: how far the swapped are apart, any of "adjacent", "window" (within `window`), and anything ("uniform").
            A jitter moves by up to 1, `window`, or the length of the prompt.
        n_draws: draws per prompt.
        window: tokens, of the reach "window".
        clean: share of the prompt left in order at its end.
        n_cloze: cloze items, as many as the text has and the model's context holds, 0 for none; many of a text overlap.
            Random inits get 200 of them.
        cloze_conditions: of the cloze, as far as the loss has them; None for all of the loss.

    Raises:
        InputError: unusable prompts, and swapped text where layers or heads are chosen.
        UnsupportedModelError: a condition asked for that the model cannot have.

    Source: that few swaps hardly matter, and that index and feature level are alike, is claimed by Han & Ji 2025 (arXiv
    2503.13305); their exact definitions are not known, these are ours. Choices are scored as in lm-evaluation-harness.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> measure = Perturbation(ratios=(0, 0.5), conditions=("tokens",), reaches=("uniform",), n_cloze=0)
        >>> result = measure("mini", bundled_text(), length=32, n_prompts=2, nulls=0, progress=False)
        >>> none, half = (result.numbers("change", ratio=ratio).value for ratio in (0, 0.5))
        >>> none, half > 0
        (0.0, True)
    """

    ratios: Annotated[Sequence[Share], Each()] = (0.0, 0.05, 0.1, 0.2, 0.5)
    conditions: Annotated[Sequence[Condition], Each()] | None = None
    reaches: Annotated[Sequence[Reach], Each()] = ("uniform",)
    n_draws: Count = 1
    window: Count = 8
    clean: Annotated[Real, Within(0, 1, "a share, 0 or more and below 1", excluded=("high",))] = 0.25
    n_cloze: Whole = 30
    cloze_conditions: Annotated[Sequence[Condition], Each()] | None = ("words",)

    question = "How much order does the model need?"
    one_length = True
    matrices = 6
    rows = ("condition", "reach", "ratio", "target")
    variables = {
        "change": Variable("rise of the loss", "nats", "loss disturbed - loss", (*DIMS, "target")),
        "moved": Variable("share moved", "", "of tokens (jitter: of pairs) that were really moved", DIMS),
        "loss": Variable("loss", "nats", "per token, nothing moved", ("prompt",)),
        "token_change": Variable("change of the loss", "nats", "per token, first prompt", TOKEN),
        "token_text": Variable("tokens shown", dims=TOKEN),
        "cloze_accuracy": Variable.share("cloze accuracy", _RIGHT, CLOZE, interval=False),
        "cloze_log_likelihood": Variable("ln p of the right choice", "nats", "per token", CLOZE, bounds=(-np.inf, 0)),
    }
    token_view = tokens_by_condition(WORDS)
    figures = {
        "curves": lines(
            _curves,
            "ratio",
            title="Loss as order is lost",
            subtitle="loss in nats, of targets that were not moved; sentences and table: of all",
            x_title="share of tokens (jitter: of pairs) moved",
        )
    }
    words = WORDS
    legend = (
        "rise: of the loss over all targets, moved or not, nats; low, high: its 95% interval; less P: less the rise of "
        "swapped positions, from and to its interval; cloze: accuracy."
    )

    @property
    def _widest(self) -> str:
        """Swaps over any distance where those were run."""
        return "uniform" if "uniform" in self.reaches else str(self.reaches[-1])

    def usual(self) -> Mapping[str, Any]:
        return {"reach": self._widest, "target": "all"}

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"target": TARGETS}

    def refuse(self, run: Run) -> None:
        conditions_for(run.session, self.conditions, **run.where)
        self.cloze_items(run)

    def of_model(self, run: Run) -> xr.Dataset:
        conditions = conditions_for(run.session, self.conditions, **run.where)
        ratios = [float(ratio) for ratio in self.ratios]
        loss = run.loss  # of the model in order
        n_clean = round(self.clean * run.tokens.shape[1])
        suffix = torch.arange(loss.shape[1]) >= loss.shape[1] - n_clean

        def cell(condition: str, reach: str, ratio: float, draw: int) -> Mapping[str, Any]:
            rows, change, moved, shares = self.disturbed(run, condition, reach, ratio, draw)
            by_target = [
                [float(changes[targets].mean()) for targets in (slice(None), ~is_moved[1:], suffix)]
                for changes, is_moved in zip(change, moved, strict=True)
            ]
            return {
                "change": by_target,
                "moved": shares,
                "token_change": change[0, :CROP],
                "token_text": run.texts(rows[0, 1 : CROP + 1]),
            }

        axes = {"condition": conditions, "reach": list(self.reaches), "ratio": ratios, "draw": range(self.n_draws)}
        data = run.grid(cell, pure=True, **axes)
        ratio = min([ratio for ratio in ratios if ratio] or ratios, key=lambda ratio: abs(ratio - SHOWN))
        tokens_shown = data[["token_change", "token_text"]].sel(reach=self._widest, ratio=ratio, draw=0, drop=True)
        data = data.assign(tokens_shown).assign(loss=("prompt", loss.mean(-1).numpy()))
        data = data.merge(self.cloze(run, conditions, ratios), join="outer")  # NaN where the cloze leaves one out
        return data.reindex(condition=conditions).assign_attrs(shown=f", {ratio:.0%} moved")  # the join sorts them

    def disturbed(
        self, run: Run, condition: str, reach: str, ratio: float, number: int
    ) -> tuple[Int[Tensor, "prompt pos"], Float[Tensor, "prompt target"], Bool[Tensor, "prompt pos"], list[float]]:
        """Return prompts as the model reads them, the change of the loss of each token, which were moved, and the share
        of each prompt that was."""
        n_prompts, n = run.tokens.shape
        if not ratio:
            return (
                run.tokens,
                torch.zeros_like(run.loss),
                torch.zeros_like(run.tokens, dtype=torch.bool),
                [0.0] * n_prompts,
            )
        first = (run.seed * self.n_draws + number) * n_prompts  # every prompt has draws of its own
        options: dict[str, Any] = {"window": self.window, "protected": [0, *range(n - round(self.clean * n), n)]}
        prompts, losses, moved, shares = [], [], [], []
        most = 1 if condition == "jitter" else BATCH  # of which each prompt has a matrix of distances
        at_once = prompts_at_once(run.session, n, most)
        for at in range(0, n_prompts, at_once):
            rows = run.tokens[at : at + at_once]
            drawn = [
                draw(run.session, row, condition, reach, ratio, seed=first + prompt, **options)
                for prompt, row in enumerate(rows, at)
            ]
            rows, hooks = disturb(run.session, rows, condition, drawn, **run.where)
            prompts.append(rows)
            losses.append(run.losses(rows, hooks))
            moved += [disturbance.moved for disturbance in drawn]
            shares += [disturbance.ratio for disturbance in drawn]
        return torch.cat(prompts), torch.cat(losses) - run.loss, torch.stack(moved), shares

    def cloze(self, run: Run, conditions: Sequence[str], ratios: Sequence[float]) -> xr.Dataset:
        """Return the scores of every cloze item; nothing where the text has none. Of random inits NaN for items beyond
        the first ITEMS_OF_INITS: they are at chance, which no more items make clearer."""
        items, scored = self.cloze_items(run)

        @cache
        def score(condition: str, ratio: float) -> Mapping[str, Any]:
            options: dict[str, Any] = {"reach": self._widest, "window": self.window, "where": run.where}
            by_name = score_items(run.session, scored, condition, ratio, seed=run.seed * len(items), **options)
            return {name: [*scores, *[math.nan] * (len(items) - len(scored))] for name, scores in by_name.items()}

        chosen = self._of_cloze(conditions)
        if not items or not chosen:
            return xr.Dataset()

        def cell(condition: str, ratio: float) -> Mapping[str, Any]:
            return score(condition if ratio else chosen[0], ratio)  # in order conditions are alike

        return run.grid(cell, pure=True, condition=chosen, ratio=ratios)

    def cloze_items(self, run: Run) -> tuple[list[EncodedItem], list[EncodedItem]]:
        """Return every cloze item, and those that this model gets."""
        items = encoded_items(run.session, run.prompts, self.n_cloze, run.seed)
        return items, items if run.init is None else items[: cloze.ITEMS_OF_INITS]

    def _of_cloze(self, conditions: Sequence[str]) -> list[str]:
        """Return those of the conditions that the cloze has."""
        return [name for name in conditions if self.cloze_conditions is None or name in self.cloze_conditions]

    @property
    def few_many_most(self) -> tuple[float, float, float]:
        """The ratios that sentences name: those run nearest to few and to many, other than 0, and the highest."""
        ratios = [float(ratio) for ratio in self.ratios if ratio] or [float(self.ratios[0])]
        few, many = (min(ratios, key=lambda ratio: abs(ratio - wanted)) for wanted in (FEW, MANY))
        return few, many, max(ratios)

    def findings(self, numbers: Numbers) -> list[str]:
        sentences, (few, many, most) = [], self.few_many_most
        for condition in (name for name in _WITH_SENTENCE if name in numbers.data["condition"].values):
            rises = {ratio: numbers("change", condition=condition, ratio=ratio) for ratio in sorted({few, many, most})}
            rises_text = ", ".join(f"{rise:+.3f} at {ratio:.0%} moved" for ratio, rise in rises.items())
            least, more = rises[few].value, rises[many].value
            if least > 0 and few < many:
                rises_text += f"; from {few:.0%} to {many:.0%} {more / least:.1f}-fold (proportional: {many / few:.1f})"
            sentences.append(f"The loss rises under {WORDS[condition]}, all targets, in nats: {rises_text}.")
        if "cloze_accuracy" not in numbers:
            return sentences
        least, n = float(min(self.ratios)), numbers.data.sizes["item"]
        done = numbers.data["cloze_accuracy"].dropna("condition", how="all")["condition"].values.tolist()
        in_order = numbers("cloze_accuracy", ratio=least, condition=done[0])
        moved = (
            f"{WORDS[name]} {numbers('cloze_accuracy', condition=name, ratio=most).with_interval:.0%}" for name in done
        )
        return [
            *sentences,
            f"A cloze of {n} passages of the text{cloze.fewer_of_inits(n) if numbers.inits else ''}, {least:.0%} of "
            "the "
            f"context moved: accuracy {in_order.plain:.0%}{in_order.null_in_brackets:.0%}; chance {1 / N_CHOICES:.0%}. "
            f"With {most:.0%} moved: {'; '.join(moved)}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition and ratio (few, many, most), widest reach, all targets: the rise in nats, less P's;
        cloze."""
        rows, conditions = [], numbers.data["condition"].values.tolist()
        for condition in conditions:
            for ratio in sorted({*self.few_many_most}):
                change, at = numbers.array("change", ratio=ratio), {"condition": condition, "ratio": ratio}
                rise = numbers("change", **at)
                row = {"condition": condition, "moved": f"{ratio:.0%}", "rise": rise.value}
                row |= {"low": rise.low, "high": rise.high}
                if "positions" in conditions:
                    gap = numbers.number(
                        (change - change.sel(condition="positions", drop=True)).sel(condition=condition)
                    )
                    row |= {"less P": gap.value, "from": gap.low, "to": gap.high}
                rows.append(
                    row | ({"cloze": numbers("cloze_accuracy", **at).value} if "cloze_accuracy" in numbers else {})
                )
        return pd.DataFrame(rows)
