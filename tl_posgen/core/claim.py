"""A claim of a paper: a predicate over numbers, its words, and the same words for random inits."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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


def judgement(verdict: Verdict, words: Callable[..., str], *results: Result, margin: str = "") -> Judgement:
    """Return a judgement whose words are made of the model's numbers, and once more of the random inits'.

    Args:
        words: from the `Numbers` of each result to a phrase.
        margin: how far the numbers that decide are from their thresholds, as `margin_of` gives it.
    """
    known = all(result.numbers.inits for result in results)
    null = words(*(result.numbers.of_inits for result in results)) if known else ""
    return Judgement(verdict, words(*(result.numbers for result in results)), null, margin)


def margin_of(quantity: str, value: float, *thresholds: float, digits: int = 2) -> str:
    """Return how far a number that decides a verdict is from the nearest of its thresholds.

    Example:
        >>> margin_of("r", 0.93, 0.95, 0.75), margin_of("r", math.nan, 0.95), margin_of("r", 0.8, math.nan)
        ('r 0.93, -0.02 from 0.95', 'r not defined', 'r 0.80, threshold not defined')
    """
    if math.isnan(value):
        return f"{quantity} not defined"
    known = [one for one in thresholds if not math.isnan(one)]
    if not known:
        return f"{quantity} {value:.{digits}f}, threshold not defined"
    nearest = min(known, key=lambda one: abs(one - value))
    return f"{quantity} {value:.{digits}f}, {value - nearest:+.{digits}f} from {nearest:.{digits}f}"


def margin_of_threshold(quantity: str, value: float, held: float, partly: float, digits: int = 2) -> str:
    """Return the margin of a number that `threshold` judges, and the verdict beyond the nearest threshold.

    Example:
        >>> margin_of_threshold("r", 0.93, 0.9, 0.6), margin_of_threshold("r", 0.88, 0.9, 0.6)
        ('r 0.93, +0.03 from 0.90; below that partly', 'r 0.88, -0.02 from 0.90; from there on held')
    """
    margin = margin_of(quantity, value, held, partly, digits=digits)
    if math.isnan(value):
        return margin
    is_held = abs(value - held) <= abs(value - partly)
    above, below = ("held", "partly") if is_held else ("partly", "not held")
    return f"{margin}; " + (
        f"below that {below}" if value >= (held if is_held else partly) else f"from there on {above}"
    )


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


def where_known(verdict: Verdict, *numbers: float) -> Verdict:
    """Return the verdict that rests on these numbers; open where one is not defined, such as the end of an interval."""
    return "open" if any(math.isnan(number) for number in numbers) else verdict


def first_checkpoint(step: int) -> str:
    """Say what stands for the null over training: step 0, or the first checkpoint that was given."""
    return "step 0 is the random initialisation" if step == 0 else f"step {step}, the first given, is no random init"


def threshold(value: float, held: float, partly: float) -> Verdict:
    """Return the verdict of a number, larger being better; open where it is not defined."""
    return where_known("held" if value >= held else "partly" if value >= partly else "not held", value)


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
