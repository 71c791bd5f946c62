"""The slash-dominant heads of a report, a row each: where, how strongly, on random tokens, and without RoPE."""

from collections.abc import Mapping

import pandas as pd

from tl_posgen.core.measure import HEAD
from tl_posgen.core.result import Result

LEGEND = (
    "slash score: mean attention paid that many tokens back; on random tokens: the same on i.i.d. uniform tokens; "
    "without RoPE: with nothing rotated in the head's own layer."
)
ELSEWHERE = {
    "on random tokens": ("slash_transfer", "source", "random"),
    "without RoPE": ("slash_ablation", "condition", "no_rope"),
}


def slash_heads(report: Mapping[str, Result]) -> pd.DataFrame:
    """Return a row a head whose slash score reaches kappa at one of the short distances, strongest first.

    Args:
        report: with `slash`, and `slash_transfer` and `slash_ablation` where their columns are wanted.

    Returns:
        layer, head, distance (of its highest score among those distances), slash score; the score there on random
        tokens, and with nothing rotated in the head's own layer. No rows where no head is slash-dominant.

    Example:
        >>> import tl_posgen
        >>> text = "Down, down, down. Would the fall never come to an end?"
        >>> report = tl_posgen.analyze("mini", text, measures=["slash", "slash_transfer"], null_seeds=())
        >>> slash_heads(report).columns.tolist()
        ['layer', 'head', 'distance', 'slash score', 'on random tokens']
    """
    data, kappa = report["slash"].own.sel(tokens="all", drop=True), report["slash"].measure.options()["kappa"]
    score = data["score"].sel(distance=data["short_distance"].values)
    columns = {"distance": score.fillna(-1).idxmax("distance").astype(int), "slash score": score.max("distance")}
    for heading, (name, dim, label) in ELSEWHERE.items():
        if name in report and label in report[name].own[dim]:
            other = report[name].own["score"].sel({"tokens": "all", dim: label, "distance": columns["distance"]})
            columns[heading] = other.reset_coords(drop=True)
    heads = columns["distance"].to_dataset(name="distance").assign(columns).to_dataframe(dim_order=list(HEAD))
    table = heads.reset_index()[[*HEAD, *columns]]
    kept = table[table["slash score"] >= kappa].sort_values("slash score", ascending=False, kind="stable")
    kept = pd.DataFrame(kept).reset_index(drop=True)
    kept.attrs |= {"title": f"slash-dominant heads: {data.attrs.get('model', 'model')}", "legend": LEGEND}
    return kept
