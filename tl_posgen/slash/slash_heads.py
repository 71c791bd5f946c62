"""Tables of slash-dominant heads: found in a model, and those of a report with their scores in other measures."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tl_posgen.core.engine import Prompts
from tl_posgen.core.measure import HEAD
from tl_posgen.core.options import Whole, require
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.models import open_session, to_prompts
from tl_posgen.models.loading.load import AnyModel
from tl_posgen.slash.dominance import thresholds
from tl_posgen.slash.numbers.slash_scores import SHORT_DISTANCES, SHORT_KAPPA
from tl_posgen.slash.slash import Slash

_LEGEND = {  # heading -> its meaning
    "slash score": "mean attention paid that many tokens back",
    "ratio": "slash score over that of uniform attention over the visible keys",
    "on random tokens": "slash score on i.i.d. uniform tokens",
    "without RoPE": "slash score with nothing rotated in the head's own layer",
}
_ELSEWHERE = {
    "on random tokens": ("slash_transfer", "source", "random"),
    "without RoPE": ("slash_ablation", "condition", "no_rope"),
}


def find_slash_heads(
    model: AnyModel,
    prompts: Prompts,
    *,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = tuple(SHORT_DISTANCES),
    length: int | None = None,
    n_prompts: int | None = None,
    consecutive: bool = False,
    **settings: Any,
) -> pd.DataFrame:
    r"""All (head, D) with SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}] >= kappa, strongest first.

    Where uniform attention reaches kappa itself, as in short prompts, twice its score is asked for. Intervals over
    prompts and random inits are those of the measure `slash`.

    Args:
        model, prompts, length, n_prompts, consecutive, settings: as in `analyze`, such as heads, layers, progress.
        kappa: the score that makes a head slash-dominant, in (0, 1].
        distances: D to look at: 0 is the token itself, 1 the previous one.

    Returns:
        A row per find: layer, head, distance, score, and ratio, the score over that of uniform causal attention. Other
        measures and interventions take it as `heads=`.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], or a distance that no prompt reaches.

    Source: the definition is Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances, and the comparison
    with uniform attention, are ours.

    Example:
        >>> import tl_posgen
        >>> heads = tl_posgen.find_slash_heads("mini", "Down, down, down. Would the fall never end?", kappa=0.2)
        >>> heads.columns.tolist(), bool(heads["score"].is_monotonic_decreasing)
        (['layer', 'head', 'distance', 'score', 'ratio'], True)
    """
    require("distances", distances, Sequence[Whole])
    measure, session = Slash(kappa=kappa, distances=sorted(set(distances))), open_session(model)
    first = settings.get("first")
    tokens = to_prompts(session, prompts, length, n_prompts, consecutive=consecutive, first=first)
    if max(distances) >= (longest := max(len(prompt) for prompt in tokens)):
        raise InputError(f"distance {max(distances)}: the longest prompt has {longest} tokens; give longer prompts")
    cut = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
    data = measure(session, prompts, **{**cut, "nulls": 0, **settings}).sel(tokens="all")
    finds = data[["score"]].assign(ratio=data["score"] / data["uniform"])
    finds = finds.where(finds["score"] >= thresholds(measure.kappa, data["uniform"])).sel(distance=measure.distances)
    table = finds.reset_coords(drop=True).to_dataframe(dim_order=[*HEAD, "distance"]).reset_index()
    return _strongest_first(table[[*HEAD, "distance", "score", "ratio"]], "score")


def slash_heads(report: Mapping[str, Result]) -> pd.DataFrame:
    """Return a row a head whose slash score reaches kappa at one of the short distances, strongest first.

    Args:
        report: with `slash`, and `slash_transfer` and `slash_ablation` where their columns are wanted.

    Returns:
        layer, head, distance (of its highest score among those distances), slash score, and ratio, the score over that
        of uniform attention; the score there on random tokens, and with nothing rotated in the head's own layer. The
        attribute `legend` explains these headings. No rows where no head is slash-dominant.

    Example:
        >>> import tl_posgen
        >>> text = "Down, down, down. Would the fall never come to an end?"
        >>> report = tl_posgen.analyze("mini", text, measures=["slash", "slash_transfer"], nulls=0)
        >>> slash_heads(report).columns.tolist()
        ['layer', 'head', 'distance', 'slash score', 'ratio', 'on random tokens']
    """
    data, kappa = report["slash"].trained.sel(tokens="all", drop=True), report["slash"].measure.options()["kappa"]
    score = data["score"].where(data["score"] >= thresholds(kappa, data["uniform"]))
    score = score.sel(distance=data["short_distance"].values)
    columns = {"distance": score.fillna(-1).idxmax("distance").astype(int), "slash score": score.max("distance")}
    ratio = (score / data["uniform"]).sel(distance=columns["distance"])
    columns["ratio"] = ratio.reset_coords(drop=True)
    for heading, (name, dim, label) in _ELSEWHERE.items():
        if name in report and label in report[name].trained[dim]:
            scores = (
                report[name].trained["score"].sel({"tokens": "all", dim: label}).reindex(distance=score["distance"])
            )
            columns[heading] = scores.sel(distance=columns["distance"]).reset_coords(drop=True)
    heads = columns["distance"].to_dataset(name="distance").assign(columns).to_dataframe(dim_order=list(HEAD))
    table = _strongest_first(heads.reset_index()[[*HEAD, *columns]], "slash score")
    legend = "; ".join(f"{heading}: {meaning}" for heading, meaning in _LEGEND.items() if heading in columns)
    table.attrs |= {"title": f"slash-dominant heads: {data.attrs.get('model', 'model')}", "legend": f"{legend}."}
    return table


def _strongest_first(table: Any, column: str) -> pd.DataFrame:
    """Return the rows that have a score in this column, highest first."""
    rows = table.dropna(subset=[column]).sort_values(column, ascending=False, kind="stable")
    return pd.DataFrame(rows).reset_index(drop=True)
