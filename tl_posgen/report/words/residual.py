"""What is said of a result named residual."""

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.report.phrases import beside, head_with
from tl_posgen.results import Result

TITLE = "What do position + query + key leave?"
QUESTION = (
    "The residual of the least-squares three-axis fit. Its rows sum to zero and no gauge enters, so softmax sees it "
    "all. How much it is, how few directions hold it, and at which distances, RoPE planes and token pairs it sits."
)
ROWS = 12


def found(result: Result) -> list[str]:
    data = result.dataset
    most, least = (head_with(data, "share_no_first", largest=largest) for largest in (True, False))
    lines = [
        f"Position + query + key leave {beside(result, 'share', '{:.0%}')} of the score variance within rows, without "
        f"the first token {beside(result, 'share_no_first', '{:.0%}')}. Most: {most}; "
        f"least: {least}.",
        f"One singular direction holds {beside(result, 'top_share_no_first', '{:.0%}')} of what is left; its effective "
        f"rank is {beside(result, 'effective_rank_no_first', '{:.1f}')}.",
    ]
    if "plane_share_no_first" in data:
        lines.append(_planes(result))
    pairs = table(data) if "query_token_no_first" in data else None
    if pairs is not None and len(pairs):
        worst = pairs.iloc[0]
        lines.append(
            f"Kind of token pair that explains most in layer {worst['layer']} head {worst['head']}: query "
            f"{worst['query token']} on key {worst['key token']}, {worst['mean residual']:+.2f} logits over "
            f"{worst['pairs']} pairs, {worst['share']:.1%} of the head's residual."
        )
    return lines


def table(dataset: xr.Dataset) -> pd.DataFrame | None:
    """The strongest kind of token pair of each of the heads that leave most, first token left out."""
    if "query_token_no_first" not in dataset:
        return None
    first = dataset.isel(rank=0)
    query, key = (
        first.get(f"{side}_token_no_first_text", first[f"{side}_token_no_first"]) for side in ("query", "key")
    )
    heads = first["share_no_first"].to_series().dropna().sort_values(ascending=False).index[:ROWS]
    rows = []
    for layer, head in heads:
        here = {"layer": layer, "head": head}
        pair = first.sel(here)
        rows.append(
            {
                "layer": layer,
                "head": head,
                "left": float(pair["share_no_first"]),
                "query token": repr(query.sel(here).item()),
                "key token": repr(key.sel(here).item()),
                "mean residual": float(pair["pair_mean_no_first"]),
                "pairs": int(pair["pair_count_no_first"]),
                "share": float(pair["pair_share_no_first"]),
            }
        )
    return pd.DataFrame(rows)


def _planes(result: Result) -> str:
    def top(dataset: xr.Dataset) -> tuple[int, float]:
        shares = dataset["plane_share_no_first"].mean(("layer", "head"))
        plane = int(shares.argmax("plane"))
        return plane, float(shares[plane])

    plane, share = top(result.dataset)
    of_scores = float(result.dataset["score_plane_share_no_first"].mean(("layer", "head"))[plane])
    lengths = np.unique(result.dataset["wavelength"].isel(plane=plane).dropna("layer").values.round(1))
    null = "no null measured"
    if result.null is not None:
        same = float(result.null["plane_share_no_first"].mean(("layer", "head"))[plane])
        null = f"random init {same:.0%}"
    return (
        f"Of the residual, {share:.0%} ({null}) is in plane {plane} (wavelength {', '.join(f'{x:g}' for x in lengths)} "
        f"tokens), which holds {of_scores:.0%} of the scores within rows."
    )
