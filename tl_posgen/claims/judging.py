"""Verdicts on claims: numbers beside their thresholds and what would speak against them, and the table of a model."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import xarray as xr

from tl_posgen.core.formatting import format_number, in_brackets
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.number import Number, mean_of_nulls
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.result import Result
from tl_posgen.models.loading.null_kinds import NULL_KINDS

Verdict = Literal["held", "partly", "detectable", "not held", "open"]  # detectable: beyond chance, and small
_BY_ITSELF = {  # measures that one model and one text do not give -> where they come from
    "emergence": "its checkpoints of training were not given (checkpoints=, --checkpoints)",
    "coupling_scores": "one model has no correlation with a score; `tl-posgen coupling-scores` takes a table of many",
}


class Judgement(NamedTuple):
    """A verdict, the numbers that it rests on in words, the same words for each kind of null models, and its margin."""

    verdict: Verdict
    measured: str
    null: str
    margin: str = ""


@dataclass(frozen=True)
class Criterion:
    """A number that decides a verdict, and all that it is compared with: the verdict and its margin follow.

    Where a null does as well the verdict is "not held", whatever thresholds the number reaches: it then does not tell
    the model from one that has learned nothing.

    Attributes:
        quantity: what the margin calls it.
        value: the number, which thresholds are for.
        held, partly: thresholds of these verdicts; None for no such verdict.
        beyond: numbers by the name of a null, such as `Number.by_null`, each of which has to be exceeded; None for no
            such test.
        end: what has to exceed them: the end of the number's interval; None for the number itself.
        otherwise: the verdict that no threshold gives, beyond the nulls.
        sign: 1 where larger is better; -1 where smaller is.
        digits: of the margin and of what was measured.
        number: of which the value is; what was measured is told from it, of the null models too.
        by_end: the end of the number's interval that the value is, "low" or "high"; "" where it is the number itself.
        basis: what the number rests on, such as "98 dominant heads"; stands behind it in brackets.

    Example:
        >>> r = Criterion("r", 0.93, 0.95, 0.75, {"random init": [0.8], "shuffled": [0.4]}, end=0.91)
        >>> r.verdict, r.margin
        ('partly', 'r 0.93, -0.02 from 0.95 (low end 0.91, +0.11 from random init 0.80)')
        >>> Criterion("r", 0.98, 0.95, beyond={"random init": [0.98], "shuffled": [0.4]}, end=0.97).verdict
        'not held'
        >>> undefined = Criterion("r", math.nan, held=0.95), Criterion("r", 0.8, beyond={})
        >>> [(one.verdict, one.margin) for one in undefined]
        [('open', 'r not defined'), ('open', 'r 0.80, null models not defined')]
    """

    quantity: str
    value: float
    held: float | None = None
    partly: float | None = None
    beyond: Mapping[str, Sequence[float]] | None = None
    end: float | None = None
    otherwise: Verdict = "not held"
    sign: int = 1
    digits: int = 2
    number: Number | None = None
    by_end: str = ""
    basis: str = ""

    @classmethod
    def of(cls, quantity: str, number: Number, held: float | None = None, **fields: Any) -> "Criterion":
        """Return the criterion of a number whose interval has to lie beyond each of its nulls, all kinds."""
        end = number.high if fields.get("sign") == -1 else number.low
        return cls(quantity, number.value, held, **{"beyond": number.by_null, "end": end, "number": number, **fields})

    @classmethod
    def without_nulls(cls, quantity: str, number: Number, held: float | None = None, **fields: Any) -> "Criterion":
        """Return the criterion of a number that thresholds alone decide."""
        return cls.of(quantity, number, held, beyond=None, end=None, **fields)

    @classmethod
    def beside(cls, quantity: str, number: Number, **fields: Any) -> "Criterion":
        """Return a number that stands beside criteria and decides nothing, unless it is not defined."""
        return cls.without_nulls(quantity, number, otherwise="held", **fields)

    @classmethod
    def of_end(cls, quantity: str, number: Number, held: float, end: str = "low", **fields: Any) -> "Criterion":
        """Return the criterion of one end of a number's interval, which thresholds are for too."""
        fixed = {"beyond": number.by_null, "number": number, "by_end": end, **fields}
        return cls(quantity, getattr(number, end), held, **fixed)

    @property
    def leaves(self) -> "list[Criterion]":
        return [self]

    def sentence(self, kind: str = "") -> str:
        """Return the number with its interval, or the mean over null models of a kind, in words; "" without it."""
        if self.number is None or (kind and kind not in self.number.by_null):
            return ""
        number = mean_of_nulls(self.number.by_null[kind]) if kind else self.number
        return f"{self.quantity} {number.with_interval:.{self.digits}f}{in_brackets('' if kind else self.basis)}"

    @cached_property
    def null(self) -> tuple[str, float]:
        """Name and value of the null that is hardest to exceed; NaN of none or an undefined one."""
        nulls = [(name, value) for name, values in (self.beyond or {}).items() for value in values]
        undefined = [(name, value) for name, value in nulls if math.isnan(value)]
        return max(undefined or nulls, key=lambda null: self.sign * null[1], default=("null models", math.nan))

    @property
    def is_beyond(self) -> bool | None:
        """Whether the number exceeds every null; None where that is not asked, or not defined."""
        reached = self.value if self.end is None else self.end
        if self.beyond is None or math.isnan(reached) or math.isnan(self.null[1]):
            return None
        return self.sign * reached > self.sign * self.null[1]

    @property
    def verdict(self) -> Verdict:
        """The best verdict whose threshold is reached, beyond the nulls; open where a number is not defined."""
        if math.isnan(self.value) or (self.beyond is not None and self.is_beyond is None):
            return "open"
        if self.is_beyond is False:
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
        """Distance of the number from the nearest threshold, and from the null that is hardest to exceed, in words."""
        form = f".{self.digits}f"
        margin = f"{self.by_end and f'{self.by_end} end of '}{self.quantity} {format_number(self.value, form)}"
        if math.isnan(self.value):
            return margin
        if thresholds := [threshold for threshold in (self.held, self.partly) if threshold is not None]:
            nearest = min(thresholds, key=lambda threshold: abs(threshold - self.value))
            margin += f", {self.value - nearest:+{form}} from {nearest:{form}}"
        if self.beyond is None:
            return margin
        (name, null), reached = self.null, self.value if self.end is None else self.end
        from_null = f"{reached - null:+{form}} from {name} {null:{form}}"
        if not math.isfinite(null):
            from_null = "no null model has any" if null == null else f"{name} not defined"
        if self.end is None:
            return f"{margin}, {from_null}"
        side = "low end" if self.sign > 0 else "high end"
        return (
            f"{margin} ({side} not defined)"
            if math.isnan(self.end)
            else f"{margin} ({side} {self.end:{form}}, {from_null})"
        )


@dataclass(frozen=True)
class Group:
    """Criteria that decide a verdict together: open where one is, and not held where a null does as well in one.

    Attributes:
        ruled: the verdict of their numbers otherwise.
        criteria: of which each gives its margin.
        name: in front of the margins, or in their place.
    """

    ruled: Verdict
    criteria: Sequence["Criterion | Group"] = ()
    name: str = ""
    otherwise = "not held"

    @classmethod
    def of(cls, held: bool, partly: bool, criteria: Sequence["Criterion | Group"], name: str = "") -> "Group":
        """Return the group of numbers that are held, or partly, where these conditions are met."""
        return cls("held" if held else "partly" if partly else "not held", criteria, name)

    @property
    def is_beyond(self) -> bool | None:
        return False if any(criterion.is_beyond is False for criterion in self.criteria) else None

    @property
    def verdict(self) -> Verdict:
        if "open" in (self.ruled, *(criterion.verdict for criterion in self.criteria)):
            return "open"
        return "not held" if self.is_beyond is False else self.ruled

    @property
    def margin(self) -> str:
        margins = [criterion.margin for criterion in self.criteria]
        return f"{self.name}: {', '.join(margins)}" if self.name and margins else self.name or "; ".join(margins)

    @property
    def leaves(self) -> list[Criterion]:
        return [leaf for criterion in self.criteria for leaf in criterion.leaves]

    def sentence(self, kind: str = "") -> str:
        """Return what was measured, of the model or of null models, in words."""
        if not self.criteria:
            return "" if kind else self.name
        has_groups = any(isinstance(criterion, Group) for criterion in self.criteria)
        measured = ("; " if has_groups else ", ").join(
            filter(None, (criterion.sentence(kind) for criterion in self.criteria))
        )
        return f"{self.name}{'' if kind else f', {self.verdict}'}: {measured}" if self.name and measured else measured


def joint_verdict(criteria: Sequence[Criterion | Group]) -> Verdict:
    """Return the verdict of numbers that should all hold: that of the least; where they know "detectable", this if only
    some are beyond their nulls; open without any."""
    verdicts: set[Verdict] = {criterion.verdict for criterion in criteria} or {"open"}
    is_mixed = "not held" in verdicts and len(verdicts) > 1 and "open" not in verdicts
    if is_mixed and any(criterion.otherwise == "detectable" for criterion in criteria):
        return "detectable"
    return max(verdicts, key=get_args(Verdict).index)


def or_lacking(by_null: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the nulls, -inf for one without a value, for what a null model need not have, such as slash-dominant
    heads: where it lacks them it does not do as well."""
    return {kind: [-math.inf if math.isnan(value) else value for value in values] for kind, values in by_null.items()}


def ends_of_nulls(numbers: Numbers, name: str, end: str, **labels: str) -> dict[str, list[float]]:
    """Return, by kind, one end of the interval that a number has in each null model, as if it were the model."""

    def alone(label: str) -> Numbers:
        return Numbers(numbers.measure, numbers.dataset.sel(init=[label]).assign_coords(init=[TRAINED]))

    return {
        kind: [getattr(alone(label)(name, **labels), end) for label in nulls.labels]
        for kind, nulls in numbers.by_null.items()
    }


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: a row of the table. The functions take the `Result` of each measure that it needs, in order.

    Attributes:
        name: the paper, "position", "slash" or "coupling", or "frequency", and the number in the documentation.
        says: the claim, in our words.
        criterion: from which numbers on we say that it held, in words; ours. The thresholds are given as "{name}".
        needs: names of the measures that it reads. Where one is missing, the claim is open and says which.
        by: the criteria, which should all hold, of results and of thresholds by name; None of a claim that one model
            cannot show.
        lacks: why results say nothing on the claim; "" where they do.
        options: of a measure, by its name, where the claim needs others than the usual ones.
        own_null: whether it has a null of its own, such as the first checkpoint, in the place of null models.
        inits: random inits that it has to be beyond, where any are asked for; further seeds where they are fewer.
        thresholds: of the verdicts, by the names that they have in `criterion` and as arguments of `by`.
    """

    name: str
    says: str
    criterion: str
    needs: tuple[str, ...]
    by: Callable[..., Sequence[Criterion | Group]] | None = None
    lacks: Callable[..., str] = lambda *_: ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own_null: bool = False
    inits: int = 1
    thresholds: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        criterion = self.criterion.format(inits=self.inits, **self.thresholds) if self.thresholds else self.criterion
        object.__setattr__(self, "criterion", criterion)


def judge(claim: Claim, results: Mapping[str, Result], reasons: Mapping[str, str] | None = None) -> Judgement:
    """Return the judgement of a claim; open where what it needs is missing or not defined, or there is no null.

    Args:
        reasons: why a measure could not be had.
    """
    lacking = [name for name in claim.needs if name not in results]
    if lacking or claim.by is None:
        all_reasons = {**_BY_ITSELF, **(reasons or {})}
        why = "; ".join(all_reasons.get(name, f"{name} cannot be had of this model") for name in lacking)
        return Judgement("open", f"not measured: {why}", "not measured")
    needed = [results[name] for name in claim.needs]
    if why := claim.lacks(*needed):
        return Judgement("open", why, "not measured")
    criteria = claim.by(*needed, **claim.thresholds)
    leaves = [leaf for criterion in criteria for leaf in criterion.leaves]
    nulls = {kind: ", ".join(filter(None, (criterion.sentence(kind) for criterion in criteria))) for kind in NULL_KINDS}
    null = "; ".join(f"{kind}: {sentences}" for kind, sentences in nulls.items() if sentences)
    if claim.own_null:
        null = ", ".join(
            dict.fromkeys(f"{name} {value:.3f}" for leaf in leaves for name, (value,) in (leaf.beyond or {}).items())
        )
    elif all(leaf.beyond is None for leaf in leaves):
        null = null or "not judged"
    null = re.sub(" not defined(?=, [^,;]* not defined)", "", null)  # once for neighbours
    margin = "; ".join(criterion.margin for criterion in criteria)
    measured = "; ".join(filter(None, (criterion.sentence() for criterion in criteria))) or margin
    return Judgement(joint_verdict(criteria) if null else "open", measured, null, margin)


def claims_result(
    claims: Sequence[Claim],
    results: Mapping[str, Result],
    label: str,
    provenance: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
) -> Result:
    """Return every claim as a row of a Result named "claims", all of it words.

    Args:
        label: name of the model.
        reasons: why a measure could not be had.
    """
    rows = [
        {"says": claim.says, "criterion": claim.criterion, **judge(claim, results, reasons)._asdict()}
        for claim in claims
    ]
    data = {name: ("claim", [row[name] for row in rows]) for name in Claims.variables}
    coords = {"claim": [claim.name for claim in claims], "init": [TRAINED], "init_label": ("init", [label])}
    without_options = {name: value for name, value in provenance.items() if name != "options"}
    return Result(Claims(), Claims().describe(xr.Dataset(data, coords)), without_options)


@dataclass(frozen=True)
class Claims(Measure):
    """Verdicts on the claims of the papers.

    A row a claim, in our words: the verdict, how far the deciding number is from the nearest threshold and from the
    null that is hardest to exceed, the numbers it rests on, and the same numbers of null models: random inits and, for
    what a single pass gives, shuffled weights. Where one of them does as well, the claim is not held. The criteria
    are ours and stand beside the verdicts.

    Source: the claims: the papers; how each is measured and judged: ours
    """

    question = "What the papers claim, on this model"
    rows = ("claim",)
    has_null = False
    variables = {
        "says": Variable("claim", "", "in our words", ("claim",), "says"),
        "verdict": Variable("verdict", "", "held, partly, detectable, not held, or open", ("claim",), "verdict"),
        "margin": Variable("margin", "", "of what decides, from threshold and null", ("claim",), "margin"),
        "measured": Variable("measured", "", "the numbers it rests on", ("claim",), "measured"),
        "null": Variable("null models", "", "the same numbers of null models", ("claim",), "null"),
        "criterion": Variable("criterion", "", "from when on we say it held; ours", ("claim",), "criterion"),
    }
    legend = (
        "margin: how far what decides is from the nearest threshold, and from the null that is hardest to exceed; "
        "null: the same numbers of null models"
    )

    def findings(self, numbers: Numbers) -> list[str]:
        missing = not numbers.data["null"].values.all()
        return ["Without null models, the claims that are judged against them are open."] if missing else []

    def table(self, numbers: Numbers) -> pd.DataFrame:
        columns = ("claim", *list(self.variables)[:-1])  # criteria are long
        return pd.DataFrame({name: numbers.data[name].values for name in columns if name in numbers.data})
