"""Tables of a report: one row per head with every headline, the means, and the content of summary.json."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tl_posgen.core.files import jsonable
from tl_posgen.core.measure import HEAD, in_words
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result

MOST_HEADS = 64  # rows of a terminal's table; a larger model gets a row per layer
MOST_COLUMNS = 9  # of numbers there
NULLS = {"random init": "null_seeds", "shuffled": "shuffled_seeds"}  # kinds of null models, and their provenance


def head_table(results: Mapping[str, Result], of: str = TRAINED) -> pd.DataFrame:
    """Return one row per head: the headlines of each measure, or all per-head numbers of a measure without any."""
    table = pd.DataFrame(columns=list(HEAD))
    for result in results.values():
        frame = result.headline_frame(of)
        if frame is not None:
            table = frame if table.empty else table.merge(frame, on=list(HEAD), how="outer")
    return table


def compact(result: Result, of: str = TRAINED) -> pd.DataFrame:
    """Return a table for a terminal: the result's own short table, or its headlines under their labels.

    Large models get means over the heads of a layer.
    """
    table = short_table(result, of)
    if table is not None:
        return table
    frame = labelled(result, result.frame(init=result.numbers.by_null[of].labels[0] if of != TRAINED else TRAINED))
    if tuple(frame.columns[:2]) == HEAD and len(frame) > MOST_HEADS:
        frame = pd.DataFrame(frame.groupby("layer", as_index=False).mean()).assign(head="all")
    return frame.iloc[:, : MOST_COLUMNS + len(result.measure.rows)]


def short_table(result: Result, of: str = TRAINED) -> pd.DataFrame | None:
    """Return the result's own short table with conditions called as figures call them; None where it has none."""
    table = result.table(of)
    return None if table is None else with_words(result, table)


def with_words(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with its labels in the words of the measure."""
    words = result.measure.words
    texts = [str(name) for name, labels in result.own.coords.items() if labels.dtype.kind in "OUT"]
    named = [name for name in texts if name in frame] if words else []
    return frame.assign(**{name: [in_words(label, words) for label in frame[name]] for name in named})


def labelled(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of a result with its columns and conditions called as figures call them."""
    labels = {name: one.label for name, one in result.measure.variables.items()}

    def words(column: str) -> str:
        name, *more = column.split(", ")
        return ", ".join([labels.get(name, name), *(in_words(one, result.measure.words) for one in more)])

    return with_words(result, frame).rename(columns=lambda column: words(str(column)))


def head_means(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean of every measure over heads, without heads that have no value (constant scores)."""
    return {str(name): float(table[name].mean()) for name in table.columns if name not in HEAD}


def summary_of(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return summary.json: the model, each head's headlines and their means, and the summary of every measure."""
    table = head_table(results)
    heads = [{key: jsonable(float(value)) for key, value in row.items()} for row in table.to_dict("records")]
    for row in heads:
        row |= {"layer": int(row["layer"] or 0), "head": int(row["head"] or 0)}
    summary = {name: provenance.get(name) for name in ("model", "backend", "length", "prompts", "versions")}
    summary |= {"heads": heads, "mean": jsonable(head_means(table))}
    for kind, seeds in NULLS.items():
        null, known = head_table(results, kind), provenance.get(seeds)
        summary[kind] = {"seed": known[0] if known else None, "mean": jsonable(head_means(null))} if len(null) else None
    summary["measures"] = {name: result.as_summary() for name, result in results.items()}
    return summary
