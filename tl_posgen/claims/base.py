"""A claim, how it is judged, and the table of many."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import xarray as xr

from tl_posgen.results import Result

Verdict = Literal["held", "partly", "not held", "open"]
Procedure = Callable[[], Sequence[Result]]


class Finding(NamedTuple):
    """What was measured of a claim, in words with numbers; and the same for the null."""

    verdict: Verdict
    measured: str
    null: str


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        paper: "position", "slash" or "coupling". number: as numbered in the documentation.
        says: the claim, in our words.
        criterion: from when on we say it held; ours.
        needs: names of the results that it is read off.
        judge: those results, in order, to a finding.
    """

    paper: str
    number: int | str
    says: str
    criterion: str
    needs: tuple[str, ...]
    judge: Callable[..., Finding]

    @property
    def name(self) -> str:
        return f"{self.paper} {self.number}"


def judged(claims: Sequence[Claim], results: Mapping[str, Result], label: str, provenance: Mapping[str, Any]) -> Result:
    """Every claim whose results are there, as a Result named "claims": a row each, all of it words."""
    answered = [claim for claim in claims if set(claim.needs) <= set(results)]
    findings = [claim.judge(*(results[name] for name in claim.needs)) for claim in answered]
    columns = {
        "says": [claim.says for claim in answered],
        "verdict": [finding.verdict for finding in findings],
        "measured": [finding.measured for finding in findings],
        "null": [finding.null for finding in findings],
        "criterion": [claim.criterion for claim in answered],
    }
    data = {name: ("claim", values) for name, values in columns.items()}
    dataset = xr.Dataset(data, {"claim": [claim.name for claim in answered]}, {"rows": "claim", "model": label})
    return Result("claims", dataset, None, provenance)


def threshold(value: float, held: float, partly: float) -> Verdict:
    """The verdict of a measure of which more is better; open where it could not be taken."""
    if math.isnan(value):
        return "open"
    return "held" if value >= held else "partly" if value >= partly else "not held"


def both(say: Callable[..., str], *results: Result) -> tuple[str, str]:
    """The same words for the model and for its null."""
    nulls = [result.null for result in results]
    told = "no null measured" if any(null is None for null in nulls) else say(*nulls)
    return say(*(result.dataset for result in results)), told
