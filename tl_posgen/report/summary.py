"""The headline numbers of a report: the per-head table, the means, and what goes into summary.json."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from tl_posgen.report.findings import words_of
from tl_posgen.results import Result, rows_of

SHARES = tuple(f"share_{term}" for term in ("q", "k", "d", "qk", "qd", "kd", "qkd"))
MOST_HEADS = 64  # rows of a terminal's table; a larger model gets a row a layer
# result -> {column of its frame: name in the table and in summary.json}
HEADLINES: dict[str, dict[str, str]] = {
    "three_axis": {"r": "three_axis_r", "r_no_first": "three_axis_r_no_first", "r_visible": "three_axis_r_visible"},
    "mean_key": {"mean_key_r": "mean_key_r"},
    "variance": {share: share for share in SHARES},
    "planes": {"score_sum": "plane_score_sum", "additive": "plane_additive"},
    "residual": {"share": "residual_share", "std": "residual_std"},
    "slash": {"best_score": "slash_score", "best_distance": "slash_distance", "previous_token": "slash_previous_token"},
}


def head_table(results: Mapping[str, Result], *, null: bool = False) -> pd.DataFrame:
    """One row per head: the headlines of the known measures, every scalar of the others."""
    table = pd.DataFrame(columns=["layer", "head"])
    for name, result in results.items():
        if rows_of(result.dataset) != ("layer", "head") or (null and result.null is None):
            continue
        frame = result.frame(null=null)
        columns = HEADLINES.get(name) or {c: f"{name}_{c}" for c in frame.columns if c not in ("layer", "head")}
        frame = pd.DataFrame(
            {"layer": frame["layer"], "head": frame["head"], **{new: frame[old] for old, new in columns.items()}}
        )
        table = frame if table.empty else table.merge(frame, on=["layer", "head"], how="outer")
    return table


def compact(result: Result, *, null: bool = False, most: int = 8) -> pd.DataFrame:
    """A table for a terminal: the result's own short one; else the first `most` columns, and means over many heads."""
    short = short_table(result, null=null)
    if short is not None:
        return short
    frame = result.frame(null=null)
    if {"layer", "head"} <= set(frame.columns) and frame.duplicated(["layer", "head"]).any():
        rows = list(frame.columns[: frame.columns.get_loc("layer")])
        measures = [name for name in frame.columns if name not in (*rows, "layer", "head")]
        frame = pd.DataFrame(frame.groupby(rows, sort=False)[measures].mean()).reset_index()
    elif list(frame.columns[:2]) == ["layer", "head"] and len(frame) > MOST_HEADS:
        frame = pd.DataFrame(frame.groupby("layer", as_index=False).mean()).assign(head="all")
    return frame.iloc[:, :most]


def short_table(result: Result, *, null: bool = False) -> pd.DataFrame | None:
    """What the words of a result choose for its table (`table(dataset)`), or None where they choose nothing."""
    dataset = result.null if null else result.dataset
    table = getattr(words_of(result.name), "table", None)
    return None if table is None or dataset is None else table(dataset)


def means(table: pd.DataFrame) -> dict[str, float | None]:
    """The mean of every measure over heads; a head without a value (constant scores) is left out."""
    return {str(name): _number(table[name].mean()) for name in table.columns if name not in ("layer", "head")}


def summary_of(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> dict[str, Any]:
    table = head_table(results)
    heads = [{key: _number(value) for key, value in row.items()} for row in table.to_dict("records")]
    for row in heads:
        row |= {"layer": int(row["layer"] or 0), "head": int(row["head"] or 0)}
    summary = {name: provenance.get(name) for name in ("model", "backend", "length", "prompts", "versions")}
    summary |= {"heads": heads, "mean": means(table), "null": None}
    null_table = head_table(results, null=True)
    if len(null_table):
        summary["null"] = {"seed": provenance.get("null_seed"), "mean": means(null_table)}
    return summary


def _number(value: Any) -> float | None:
    """A JSON number; NaN and infinity, which JSON lacks, become null."""
    return float(value) if math.isfinite(value) else None
