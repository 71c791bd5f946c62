"""What planes and massive coordinates are worth for recall: random tokens that stand twice, and the text's loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Threshold, Within, require
from tl_posgen.core.run import Run
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.errors import InputError, check_seed
from tl_posgen.frequencies.numbers.coordinates import another_coordinate, largest_coordinate, with_coordinate_at
from tl_posgen.frequencies.numbers.copies import copied_rows, induction_hits, recall_of_copy
from tl_posgen.interventions import UNTOUCHED, Interventions
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import bars
from tl_posgen.rope.rotation import Rope
from tl_posgen.slash.band_ablation import ablate_bands
from tl_posgen.stats.intervals import bounds_of_difference

Where = Literal["mean", "zero"]
LEAST = 4  # tokens of a copy
SLOWEST, FASTEST, DRAWN, CONTROL = "slowest planes", "fastest planes", "random planes", "slowest planes, control heads"


@printing_call
def move_coordinate(model: Model | Session, value: Where, *, largest: bool = True, seed: int = 0) -> HookList:
    """Return hooks that put one coordinate of every head's rotated queries and keys at its mean over tokens, or at 0:
    the one that is largest over the prompt, which is massive if any is, or another one.

    Args:
        value: where it is put.
        largest: the largest coordinate; another one where False.
        seed: of the draw of another one.

    Raises:
        InputError: another value or seed. UnsupportedModelError: see `tl_posgen.hooks.replace_scores`.

    Source: Jin et al. 2025 (arXiv 2502.01563), as we read it; another coordinate beside it: ours.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> torch.equal(model.run_with_hooks(tokens, fwd_hooks=move_coordinate(model, "zero")), model(tokens))
        False
    """
    require("value", value, Where)
    require("largest", largest, bool)
    seed = check_seed(seed)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        moved = []
        for x in (capture.rotated_q, capture.rotated_k):
            coordinate = largest_coordinate(x) if largest else another_coordinate(x, 101 * capture.layer + seed)
            moved.append(with_coordinate_at(x, coordinate, value))
        return finished(capture.geometry.scale * moved[0] @ moved[1].mT, capture)

    return replace_scores(model, scores_of)


@dataclass(frozen=True)
class Recall(Interventions):
    r"""recall = share of tokens of a second copy that are predicted first, unchanged and without some of RoPE's planes.

    A prompt of random tokens that stand twice is predicted by looking its second half up in the first. Which planes
    does that need? In the heads that look up, some planes are dropped: the slowest, the fastest, as many at random; and
    the slowest in control heads, of the same layers, that do not look up. The loss of text stands beside the recall.

    Heads that look up have their largest attention on the token behind the earlier occurrence in at least `hits` of the
    queries of the second copy; the upper half of them by that rate are edited. Null models are edited in the heads
    of the model. Tokens are drawn from those of the prompts. In all heads, one coordinate of rotated queries and keys
    is put at its mean over tokens, or at zero: the largest, which is massive if any is, or another one.

    Args:
        half: tokens of a copy; fewer where the context or the prompts have fewer.
        n_copies: prompts of copied tokens.
        share: of the planes that is dropped.
        hits: the rate from which a head looks up.
        n_draws: draws of planes at random.

    Raises:
        InputError: prompts of several lengths, or of fewer than 4 different tokens.
        UnsupportedModelError: a model without rotary planes, or whose scores cannot be replaced.

    Source: claims of Bayram 2026 (arXiv 2606.21249), Chiang & Yogatama 2025 (arXiv 2502.11276) and Jin et al. 2025
    (arXiv 2502.01563), as we read them; random planes and control heads beside them: ours

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> found = Recall(half=8)("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> found.frame()["condition"].tolist()[-4:]
        ['largest at mean', 'largest at zero', 'another at mean', 'another at zero']
    """

    half: Annotated[int, Within(LEAST, words=f"a whole number, {LEAST} or more")] = 64
    n_copies: Count = 4
    share: Threshold = 0.25
    hits: Threshold = 0.1
    n_draws: Count = 2

    edits_all_layers = True
    question = "Which planes does recall need?"
    matrices = 7
    variables = {
        **Interventions.variables,
        "recall": Variable.share(
            "recall of the copy",
            "share of its tokens that are predicted first",
            ("condition", "item"),
            "recall",
            interval=False,
        ),
        "copy_loss": Variable("loss of the copy", "nats", "per token", ("condition", "item")),
        "hit_rate": Variable(
            "hits", "", "queries of the copy with the largest attention behind the earlier occurrence", HEAD
        ),
        "edited": Variable("edited head", "", "1: looks up and is edited", HEAD),
        "control": Variable("control head", "", "1: of the same layer, the fewest hits", HEAD),
    }
    whole_model = frozenset({"recall"})
    figures = {
        "recall": bars(
            {
                "recall of the copy": [("recall", "recall")],
                "rise of the loss of text, nats": [("rise", lambda numbers: numbers.measure.rise_of(numbers))],
            },
            "condition",
            title="Recall without some planes",
            subtitle="second copy of {half} random tokens; planes dropped in heads that look up, coordinates in all",
        )
    }
    legend = "loss, rise: of the text, in nats."

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Recall":
        n_unique = len(torch.unique(torch.cat([prompt[1:] for prompt in tokens])))
        half = min(self.half, n_unique, (int(session.model.cfg.n_ctx) - 1) // 2)
        if half < LEAST:
            raise InputError(f"{self.name}: prompts of {n_unique} different tokens: give longer ones, {LEAST} at least")
        return replace(self, half=half)

    def copies(self, run: Run) -> Int[Tensor, "row pos"]:
        """Return the prompts of tokens that stand twice, behind the first token of the text's first prompt."""
        pool = torch.unique(torch.cat([row[1:].cpu() for row in run.rows]))
        return copied_rows(pool, run.rows[0][:1].cpu(), self.half, self.n_copies, run.seed)

    def _hit_rates(self, run: Run) -> xr.DataArray:
        """Return the rate of hits of every head [layer, head]."""
        sums = run.sums()

        def add(layer: LayerCapture) -> None:
            assert layer.pattern is not None
            sums.add_layer(layer, {"hit_rate": induction_hits(layer.pattern, self.half)})

        run.capture(add, frozenset({"pattern"}), self.copies(run))
        return sums.mean("hit_rate")

    def chosen(self, hit_rate: xr.DataArray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the heads that are edited, and as many control heads: of each one's layer the head with the fewest
        hits that is not taken yet and does not look up."""
        rates = hit_rate.stack(place=HEAD).to_series().dropna().sort_values(ascending=False, kind="stable")
        places = [(int(layer), int(head)) for layer, head in rates.index]
        look_up = [at for at, rate in zip(places, rates, strict=True) if rate >= self.hits]
        edited, control = look_up[: (len(look_up) + 1) // 2], list[tuple[int, int]]()
        for layer, _ in edited:
            left = [at for at in reversed(places) if at[0] == layer and at not in look_up and at not in control]
            control += left[:1]
        return edited, control

    def conditions(self, run: Run) -> Mapping[str, Any]:
        rates = self._hit_rates(run) if run.trained is None else run.trained["hit_rate"]
        edited, control = self.chosen(rates)
        drop = partial(ablate_bands, run.session, "drop")
        conditions: dict[str, Any] = {}
        if edited:
            conditions |= {SLOWEST: drop(self._planes(-1), heads=edited), FASTEST: drop(self._planes(1), heads=edited)}
            draws = {f"{DRAWN}, draw {draw}": self._drawn(run.seed + draw) for draw in range(self.n_draws)}
            conditions |= {name: drop(planes, heads=edited) for name, planes in draws.items()}
        if control:
            conditions[CONTROL] = drop(self._planes(-1), heads=control)
        for name, largest in (("largest", True), ("another", False)):
            for value in get_args(Where):
                hooks = move_coordinate(run.session, value, largest=largest, seed=run.seed)
                conditions[f"{name} at {value}"] = hooks
        return conditions

    def _count(self, rope: Rope) -> int:
        return max(1, round(self.share * len(rope.inv_freq)))

    def _planes(self, end: int) -> Callable[[Rope], Bool[Tensor, " plane"]]:
        """Return what chooses the fastest planes of a layer; with the end -1 the slowest."""

        def planes(rope: Rope) -> Bool[Tensor, " plane"]:
            place = (-end * rope.inv_freq).argsort(stable=True).argsort(stable=True)
            return (place < self._count(rope)).cpu()

        return planes

    def _drawn(self, seed: int) -> Callable[[Rope], Bool[Tensor, " plane"]]:
        """Return what chooses as many planes at random, the same in all layers of so many planes."""

        def planes(rope: Rope) -> Bool[Tensor, " plane"]:
            order = np.random.default_rng(seed).permutation(len(rope.inv_freq))
            return torch.from_numpy(order < self._count(rope))

        return planes

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the loss of the text, and recall and loss of the copies."""

        def of_logits(logits: Tensor, rows: Tensor) -> list[list[float]]:
            pairs = (recall_of_copy(of_row, row, self.half) for of_row, row in zip(logits, rows, strict=True))
            return [[value.item() for value in pair] for pair in pairs]

        recall, loss = np.concatenate(run.passes(self.copies(run), of_logits, hooks)).T
        return {**super().under(run, hooks), "recall": recall, "copy_loss": loss}

    def of_model(self, run: Run) -> xr.Dataset:
        data, hit_rate = super().of_model(run), self._hit_rates(run)
        groups = self.chosen(hit_rate if run.trained is None else run.trained["hit_rate"])
        for name, heads in zip(("edited", "control"), groups, strict=True):
            mask = xr.zeros_like(hit_rate)
            for layer, head in heads:
                mask.loc[{"layer": layer, "head": head}] = 1
            data = data.assign({name: mask})
        return data.assign(hit_rate=hit_rate)

    def falls(self, numbers: Numbers, name: str = "recall") -> dict[str, Number]:
        """Return x(unchanged) - x(condition) by condition, of the recall or another variable by copy."""
        values = numbers.array(name, condition=None)
        fall = values.sel(condition=UNTOUCHED, drop=True) - values.drop_sel(condition=UNTOUCHED)
        return numbers.along(fall, "condition", bounds_of_difference(numbers.bounds_of(name)))

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition: recall and how far it falls, with the ends of the fall's interval; loss of the text
        and its rise."""
        recall = numbers.along(numbers.array("recall", condition=None), "condition")
        falls = self.falls(numbers)
        text = super().table(numbers)
        rows = []
        for name, number in recall.items():
            fall = falls.get(name, Number(np.nan))
            row = {"condition": name, "recall": number.value, "fall": fall.value}
            rows.append(row | {"fall_low": fall.low, "fall_high": fall.high})
        return pd.DataFrame(rows).merge(text[["condition", "loss", "rise"]], on="condition")

    def findings(self, numbers: Numbers) -> list[str]:
        heads = numbers.data["edited"].stack(place=HEAD)
        edited = [head_name(*at) for at in heads["place"].values[heads.values > 0]]
        falls, rises = self.falls(numbers), self.rises(numbers)
        falls_in_words = [
            f"{name} {fall.with_interval:+.2f} (text {rises[name].with_interval:+.3f} nats)"
            for name, fall in falls.items()
        ]
        looks = (
            f"{len(edited)} heads that look up are edited ({', '.join(edited[:4])})" if edited else "no head looks up"
        )
        return [
            f"{self.half} random tokens stand twice; {numbers('recall'):.0%} of the second copy, from its third token "
            "on, "
            f"are predicted; {looks}. Recall falls by: {'; '.join(falls_in_words)}."
        ]
