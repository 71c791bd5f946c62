"""A claim of a paper: a predicate over numbers, its words, and the same words for random inits."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.result import Result

Verdict = Literal["held", "partly", "detectable", "not held", "open"]  # detectable: beyond chance, and small
COLUMNS = ("says", "verdict", "margin", "again", "measured", "null", "criterion")
SHOWN = ("claim", *COLUMNS[:-1])  # in a table; criteria are long


class Judgement(NamedTuple):
    """A verdict, the numbers that it rests on in words, the same words for the random inits, and its margin."""

    verdict: Verdict
    measured: str
    null: str
    margin: str = ""

    def decided_by(self, *criteria: "Criterion") -> "Judgement":
        """Return the judgement with the margins of the numbers that decide; open where one of them is not defined."""
        is_open = any(one.verdict == "open" for one in criteria)
        margin = "; ".join(one.margin for one in criteria)
        return self._replace(verdict="open" if is_open else self.verdict, margin=margin)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        paper: "position", "slash" or "coupling".
        number: as numbered in the documentation.
        says: the claim, in our words.
        criterion: from which numbers on we say that it held; ours.
        needs: names of the measures that it reads. Where one is missing, the claim is open and says which.
        judge: from their results, in order, to a judgement. None of a claim that one model cannot show.
        options: of a measure, by its name, where the claim needs others than the usual ones.
    """

    paper: str
    number: int | str
    says: str
    criterion: str
    needs: tuple[str, ...]
    judge: Callable[..., Judgement] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.paper} {self.number}"


@dataclass(frozen=True)
class Criterion:
    """A number that decides a verdict, and all that it is compared with: the verdict and its margin follow.

    Attributes:
        quantity: what the margin calls it.
        value: the number.
        held, partly: thresholds of these verdicts; None for no such verdict.
        beyond: numbers, such as those of the random inits, each of which it has to exceed; None for no such test.
        otherwise: the verdict that no threshold gives, beyond those numbers.
        sign: 1 where larger is better; -1 where smaller is.
        alone: whether it alone decides: its margin then says which verdict lies past the nearest threshold.
        digits: of the margin.

    Example:
        >>> r = Criterion("r", 0.93, held=0.95, partly=0.75)
        >>> r.verdict, r.margin
        ('partly', 'r 0.93, -0.02 from 0.95')
        >>> [Criterion("r", value, held=0.9, partly=0.6, alone=True).margin for value in (0.93, 0.88)]
        ['r 0.93, +0.03 from 0.90; below that partly', 'r 0.88, -0.02 from 0.90; from there on held']
        >>> undefined = Criterion("r", math.nan, held=0.95), Criterion("r", 0.8, beyond=[])
        >>> [(one.verdict, one.margin) for one in undefined]
        [('open', 'r not defined'), ('open', 'r 0.80, threshold not defined')]
    """

    quantity: str
    value: float
    held: float | None = None
    partly: float | None = None
    beyond: Sequence[float] | None = None
    otherwise: Verdict = "not held"
    sign: int = 1
    alone: bool = False
    digits: int = 2

    @cached_property
    def null(self) -> float | None:
        """The number of `beyond` that is hardest to exceed, NaN of none or an undefined one; None without the test."""
        return None if self.beyond is None else self.sign * highest(self.sign * one for one in self.beyond)

    @property
    def thresholds(self) -> list[float]:
        """Every number that the value is compared with; NaN for one that is not defined."""
        return [one for one in (self.held, self.partly, self.null) if one is not None]

    @property
    def verdict(self) -> Verdict:
        """The best verdict whose threshold is reached; open where a number is not defined."""
        if any(math.isnan(one) for one in (self.value, *self.thresholds)):
            return "open"
        if self.null is not None and self.sign * self.value <= self.sign * self.null:
            return "not held"
        if self.held is not None and self.sign * self.value >= self.sign * self.held:
            return "held"
        is_part = self.partly is not None and self.sign * self.value >= self.sign * self.partly
        return "partly" if is_part else self.otherwise

    @property
    def holds(self) -> bool:
        return self.verdict == "held"

    @property
    def margin(self) -> str:
        """Distance of the number from the nearest of its thresholds, in words."""
        if math.isnan(self.value):
            return f"{self.quantity} not defined"
        words = f"{self.quantity} {self.value:.{self.digits}f}"
        known = [one for one in self.thresholds if not math.isnan(one)]
        if not known:
            return f"{words}, threshold not defined"
        nearest = min(known, key=lambda one: abs(one - self.value))
        words += f", {self.value - nearest:+.{self.digits}f} from {nearest:.{self.digits}f}"
        if not self.alone:
            return words
        above, below = ("held", "partly") if nearest == self.held else ("partly", "not held")
        return f"{words}; below that {below}" if self.value >= nearest else f"{words}; from there on {above}"


def joint_verdict(criteria: Iterable[Criterion]) -> Verdict:
    """Return the verdict of numbers that should all hold: that of the least; "detectable" where only some are beyond
    their nulls."""
    verdicts: set[Verdict] = {one.verdict for one in criteria}
    if len(verdicts) > 1 and "not held" in verdicts:
        return "detectable"
    return max(verdicts, key=get_args(Verdict).index)


def judgement(verdict: Verdict, words: Callable[..., str], *results: Result, by: Sequence[Criterion] = ()) -> Judgement:
    """Return a judgement whose words are made of the model's numbers, and once more of the random inits'.

    Args:
        words: from the `Numbers` of each result to a phrase.
        by: what decides, which gives the margin; where one of these is not defined, the verdict is open.
    """
    known = all(result.numbers.inits for result in results)
    null = words(*(result.numbers.of_inits for result in results)) if known else ""
    return Judgement(verdict, words(*(result.numbers for result in results)), null).decided_by(*by)


def each_init(own: Numbers) -> list[Numbers]:
    """Return the numbers of every random init as if it were the model: with intervals of its own."""
    alone = (own.dataset.sel(init=[one]).assign_coords(init=[TRAINED]) for one in own.inits)
    return [Numbers(own.measure, dataset) for dataset in alone]


def highest(values: Iterable[float]) -> float:
    """Return the highest of the random inits' values; NaN, which leaves a claim open, of none or an undefined one."""
    return float(np.max([*values] or [math.nan]))


def lowest(values: Iterable[float]) -> float:
    """Return the lowest of the random inits' values; NaN of none or an undefined one."""
    return float(np.min([*values] or [math.nan]))


def first_checkpoint(step: int) -> str:
    """Say what stands for the null over training: step 0, or the first checkpoint that was given."""
    return "step 0 is the random initialisation" if step == 0 else f"step {step}, the first given, is no random init"


# All claims of one model

BY_ITSELF = {  # measures that one model and one text do not give -> where they come from
    "emergence": "its checkpoints of training were not given (checkpoints=, --checkpoints)",
    "coupling_scores": "one model has no correlation with a score; `tl-posgen coupling-scores` takes a table of many",
}


def judged(
    claims: Sequence[Claim],
    results: Mapping[str, Result],
    label: str,
    provenance: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
    again: Mapping[str, str] | None = None,
) -> Result:
    """Return every claim as a row of a Result named "claims", all of it words.

    Args:
        reasons: why a measure could not be had.
        again: the verdicts at other numbers of prompts, by the claim's name.
    """
    judgements = [judgement_of(claim, results, {**BY_ITSELF, **(reasons or {})}) for claim in claims]
    columns = {name: [getattr(claim, name) for claim in claims] for name in ("says", "criterion")}
    columns |= {name: [getattr(one, name) for one in judgements] for name in Judgement._fields}
    if again is not None:
        columns["again"] = [again.get(claim.name, "no prompts") for claim in claims]
    data = {name: ("claim", columns[name]) for name in COLUMNS if name in columns}
    coords = {"claim": [claim.name for claim in claims], "init": [TRAINED], "init_label": ("init", [label])}
    measure = Claims()
    known = {name: value for name, value in provenance.items() if name != "options"}
    return Result(measure, measure.describe(xr.Dataset(data, coords)), known)


def judgement_of(claim: Claim, results: Mapping[str, Result], reasons: Mapping[str, str]) -> Judgement:
    """Return the claim's own judgement; open where what it needs is missing, or there is no random init."""
    lacking = [name for name in claim.needs if name not in results]
    if lacking or claim.judge is None:
        why = "; ".join(reasons.get(name, f"{name} cannot be had of this model") for name in lacking)
        return Judgement("open", f"not measured: {why}", "not measured")
    found = claim.judge(*(results[name] for name in claim.needs))
    return found._replace(verdict="open") if not found.null else found


@dataclass(frozen=True)
class Claims(Measure):
    """Verdicts on the claims of the papers.

    A row a claim, in our words: the verdict, how far the deciding number is from the nearest threshold, the numbers it
    rests on, and the same numbers for a randomly initialised model; where it was asked for, the verdicts at half and at
    twice the prompts. The criteria are ours and stand beside the verdicts.

    Source: the claims: the papers; how each is measured and judged: ours
    """

    question = "What the papers claim, on this model"
    rows = ("claim",)
    has_null = False
    variables = {
        "says": Variable("claim", "", "in our words", ("claim",), "says"),
        "verdict": Variable("verdict", "", "held, partly, detectable, not held, or open", ("claim",), "verdict"),
        "margin": Variable("margin", "", "of what decides, from the nearest threshold", ("claim",), "margin"),
        "again": Variable("again", "", "verdicts at half, at twice the prompts", ("claim",), "again"),
        "measured": Variable("measured", "", "the numbers it rests on", ("claim",), "measured"),
        "null": Variable("random init", "", "the same numbers of a random init", ("claim",), "null"),
        "criterion": Variable("criterion", "", "from when on we say it held; ours", ("claim",), "criterion"),
    }
    legend = "margin: how far what decides is from the nearest threshold; null: the same numbers of random inits"

    def findings(self, own: Numbers) -> list[str]:
        missing = not own.data["null"].values.all()
        return ["Without a random init, the claims that are judged against one are open."] if missing else []

    def table(self, own: Numbers) -> pd.DataFrame:
        return pd.DataFrame({name: own.data[name].values for name in SHOWN if name in own.data})
