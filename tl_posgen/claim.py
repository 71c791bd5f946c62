"""A claim of a paper, how it is judged on one model, and the table of many."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.measure import Measure
from tl_posgen.report.figures import finish, model_label
from tl_posgen.report.sentences import NO_NULL
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary

Verdict = Literal["held", "partly", "not held", "open"]
COLUMNS = ("says", "verdict", "measured", "null", "criterion")


class Judgement(NamedTuple):
    """What was measured of a claim, in words with numbers; and the same for the random init."""

    verdict: Verdict
    measured: str
    null: str


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        paper: "position", "slash" or "coupling".
        number: as numbered in the documentation.
        says: the claim, in our words.
        criterion: from when on we say it held; ours.
        needs: names of the measures that it is read off. Where one is missing, the claim is open and says what lacks.
        judge: their results, in order, to a judgement; every number comes from `Result.summary`. None of a claim that
            one model cannot show.
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


def judged(
    claims: Sequence[Claim],
    results: Mapping[str, Result],
    label: str,
    provenance: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
) -> Result:
    """Every claim as a row of a Result named "claims", all of it words.

    Args:
        reasons: why a measure could not be had.
    """
    judgements = [judgement_of(claim, results, {**BY_ITSELF, **(reasons or {})}) for claim in claims]
    columns = {name: [getattr(claim, name) for claim in claims] for name in ("says", "criterion")}
    columns |= {name: [getattr(one, name) for one in judgements] for name in Judgement._fields}
    data = {name: ("claim", columns[name]) for name in COLUMNS}
    dataset = xr.Dataset(data, {"claim": [claim.name for claim in claims]}, {"rows": "claim", "model": label})
    return Result("claims", MEASURE.describe(dataset), (), provenance)


BY_ITSELF = {  # measures that one model and one text do not give -> what does
    "emergence": "its checkpoints of training were not given (checkpoints=, --checkpoints)",
    "coupling_scores": "one model has no correlation with a score; `tl-posgen coupling-scores` takes a table of many",
}


def judgement_of(claim: Claim, results: Mapping[str, Result], reasons: Mapping[str, str]) -> Judgement:
    """The claim's own judgement; open where what it needs could not be had, or there is no random init beside it."""
    lacking = [name for name in claim.needs if name not in results]
    if lacking or claim.judge is None:
        why = "; ".join(reasons.get(name, f"{name} cannot be had of this model") for name in lacking)
        return Judgement("open", f"not measured: {why}", "not measured")
    found = claim.judge(*(results[name] for name in claim.needs))
    return found._replace(verdict="open") if found.null == NO_NULL else found


def highest(null: NullSummary | None, key: str) -> float:
    """The highest value of a number over the random inits; without one nothing is judged, see `judgement_of`."""
    return math.nan if null is None else float(np.max([seed[key] for seed in null.seeds]))


def lowest(null: NullSummary | None, key: str) -> float:
    """The lowest value of a number over the random inits; NaN, as `highest`, where one has none."""
    return math.nan if null is None else float(np.min([seed[key] for seed in null.seeds]))


def where_known(verdict: Verdict, *numbers: float | None) -> Verdict:
    """The verdict that rests on these numbers; open where one could not be had, such as the end of an interval."""
    return "open" if any(number is None or math.isnan(number) for number in numbers) else verdict


def threshold(value: float, held: float, partly: float) -> Verdict:
    """The verdict of a number of which more is better; open where it could not be had."""
    if value is None:
        return "open"
    return where_known("held" if value >= held else "partly" if value >= partly else "not held", value)


def both(say: Callable[..., str], *results: Result) -> tuple[str, str]:
    """The same words for the model's summaries and for those of its random init."""
    nulls = [result.null_summary for result in results]
    told = NO_NULL if any(null is None for null in nulls) else say(*nulls)
    return say(*(result.summary for result in results)), told


FILLS = {"held": "#d7eddf", "partly": "#f6ecd0", "not held": "#f6d9d0", "open": "#e8eaee"}
WIDTHS = {"claim": 70, "says": 260, "verdict": 60, "measured": 320, "null": 320}
CHARACTERS_PER_PIXEL = 1 / 6.4


def claims_table(result: Result) -> go.Figure:
    """A row a claim, coloured by its verdict; the null's numbers are its last column."""
    dataset = result.own
    cells, lines = [], [1] * dataset.sizes["claim"]
    for name, width in WIDTHS.items():
        texts = [textwrap.wrap(str(text), int(width * CHARACTERS_PER_PIXEL)) for text in dataset[name].values]
        lines = [max(most, len(text)) for most, text in zip(lines, texts, strict=True)]
        cells.append(["<br>".join(text) for text in texts])
    fill = [FILLS[str(verdict)] for verdict in dataset["verdict"].values]
    table = go.Table(
        columnwidth=list(WIDTHS.values()),
        header={"values": [f"<b>{name}</b>" for name in WIDTHS], "align": "left"},
        cells={"values": cells, "align": "left", "fill_color": [fill], "height": 20, "font": {"size": 11}},
    )
    subtitle = "verdicts by criteria of ours; null: randomly initialised model of the same shape"
    title = f"Claims · {model_label(dataset)}"
    return finish(go.Figure(table), title, subtitle, height=180 + 15 * sum(lines) + 11 * len(lines))


def rows(dataset: xr.Dataset) -> pd.DataFrame:
    """A row a claim, whole."""
    return pd.DataFrame({name: dataset[name].values for name in ("claim", *COLUMNS)})


MEASURE = Measure(
    name="claims",
    question="What the papers claim, on this model",
    explanation=(
        "A row a claim, in our words: the verdict, the numbers it rests on, and the same numbers for a randomly "
        "initialised model. The criteria are ours and stand beside the verdicts."
    ),
    source="the claims: the papers; how each is measured and judged: ours",
    variables={
        "says": Variable("claim", description="in our words", dims=("claim",)),
        "verdict": Variable("verdict", description="held, partly, not held, or open", dims=("claim",)),
        "measured": Variable("measured", description="the numbers it rests on", dims=("claim",)),
        "null": Variable("random init", description="the same numbers of a random init", dims=("claim",)),
        "criterion": Variable("criterion", description="from when on we say it held; ours", dims=("claim",)),
    },
    summarise=lambda data: {
        str(claim): str(verdict) for claim, verdict in zip(data["claim"].values, data["verdict"].values, strict=True)
    },
    figures={"table": claims_table},
    table=rows,
)
