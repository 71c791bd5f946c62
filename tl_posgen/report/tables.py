"""Tables of a report: one row per head with every headline, the means, and the content of summary.json."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tl_posgen.measure import rows_of
from tl_posgen.report.sentences import means
from tl_posgen.result import Result
from tl_posgen.summary import jsonable

MOST_HEADS = 64  # rows of a terminal's table; a larger model gets a row per layer


def head_table(results: Mapping[str, Result], *, null: bool = False) -> pd.DataFrame:
    """Return one row per head: the headlines of each measure, or every scalar of a measure without headlines."""
    table = pd.DataFrame(columns=["layer", "head"])
    for name, result in results.items():
        if rows_of(result.dataset) != ("layer", "head") or (null and result.null is None):
            continue
        frame = result.frame(null=null, intervals=False)
        headlines = {key: one.headline for key, one in result.measure.variables.items() if one.headline}
        columns = headlines or {c: f"{name}_{c}" for c in frame.columns if c not in ("layer", "head")}
        columns = {old: new for old, new in columns.items() if old in frame}
        frame = pd.DataFrame(
            {"layer": frame["layer"], "head": frame["head"], **{new: frame[old] for old, new in columns.items()}}
        )
        table = frame if table.empty else table.merge(frame, on=["layer", "head"], how="outer")
    return table


def compact(result: Result, *, null: bool = False, most: int = 8) -> pd.DataFrame:
    """Return a table for a terminal: the result's own short table, or its headlines, or the first `most` columns.

    Large models get means over the heads of a layer.
    """
    table = result.table(null=null)
    if table is not None:
        return table
    frame = result.frame(null=null, intervals=False)
    declared = result.measure.variables.items()
    if headlines := {name: one.label for name, one in declared if one.headline and name in frame}:
        frame = pd.DataFrame(frame[["layer", "head", *headlines]])
        frame.columns = ["layer", "head", *headlines.values()]
        most = len(frame.columns)
    if {"layer", "head"} <= set(frame.columns) and frame.duplicated(["layer", "head"]).any():
        rows = list(frame.columns[: frame.columns.get_loc("layer")])
        measures = [name for name in frame.columns if name not in (*rows, "layer", "head")]
        frame = pd.DataFrame(frame.groupby(rows, sort=False)[measures].mean()).reset_index()
    elif list(frame.columns[:2]) == ["layer", "head"] and len(frame) > MOST_HEADS:
        frame = pd.DataFrame(frame.groupby("layer", as_index=False).mean()).assign(head="all")
    return frame.iloc[:, :most]


def head_means(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean of every measure over heads, without heads that have no value (constant scores)."""
    return means(table, *(name for name in table.columns if name not in ("layer", "head")))


def summary_of(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return summary.json: the model, each head's headlines and their means, and the summary of every measure."""
    table = head_table(results)
    heads = [{key: jsonable(float(value)) for key, value in row.items()} for row in table.to_dict("records")]
    for row in heads:
        row |= {"layer": int(row["layer"] or 0), "head": int(row["head"] or 0)}
    summary = {name: provenance.get(name) for name in ("model", "backend", "length", "prompts", "versions")}
    summary |= {"heads": heads, "mean": jsonable(head_means(table)), "null": None}
    null_table, seeds = head_table(results, null=True), provenance.get("null_seeds") or []
    if len(null_table):
        summary["null"] = {"seed": seeds[0] if seeds else None, "mean": jsonable(head_means(null_table))}
    summary["measures"] = {
        name: {
            "summary": jsonable(result.summary),
            "null": jsonable(result.null_summary.seeds if result.null_summary else []),
        }
        for name, result in results.items()
    }
    return summary
