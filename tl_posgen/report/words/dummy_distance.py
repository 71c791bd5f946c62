"""What is said of a result named dummy_distance."""

import pandas as pd
import xarray as xr

from tl_posgen.report.phrases import beside, head_with
from tl_posgen.results import Result

TITLE = "Does the key part stay when the distance changes?"
QUESTION = (
    "Each query meets each key at every distance d, and the table is split into a distance part, a key part and their "
    "interaction. Then the running model sees every pair at one distance, or no distance beyond a limit. Ours, after "
    "the controlled-distance claim of Han & Ji 2025."
)
STAYS = 0.9  # correlation of key parts from which on we say that they are the same


def found(result: Result) -> list[str]:
    data = result.dataset
    reference, *others = data["d0"].values.tolist()
    lines = [
        f"Distance part and key part together correlate with the table at {beside(result, 'additive_r')}. Of its "
        f"variance the distance takes {beside(result, 'distance_share', '{:.0%}')}, the key alone "
        f"{beside(result, 'key_share', '{:.0%}')}, both together {beside(result, 'interaction_share', '{:.0%}')}, most "
        f"in {head_with(data, 'interaction_share', largest=True)}."
    ]
    if others:
        words = ", ".join(f"{agreement(data, d0)} at {d0:g}{null_of(result, d0)}" for d0 in others)
        mean = float(data["key_agreement"].sel(d0=others).mean())
        verdict = "stays" if mean >= STAYS else "does not stay"
        lines.append(
            f"The key part {verdict} when the distance changes: its correlation with the one at {reference:g} is "
            f"{words} (mean over heads; {STAYS} would count as staying)."
        )
    at, limit = data["loss_at"].idxmin().item(), data["limit"].values[0]
    best, frozen = float(data["loss_at"].min()), float(data["loss_beyond"].isel(limit=0))
    return [
        *lines,
        f"The model's loss of {beside(result, 'loss')} becomes {best:.3f} at best with every pair at one "
        f"distance ({at:g}), and {frozen:.3f} with distances above {limit:g} seen as {limit:g}.",
    ]


def agreement(dataset: xr.Dataset, d0: int | float) -> str:
    return f"{float(dataset['key_agreement'].sel(d0=d0).mean()):.2f}"


def null_of(result: Result, d0: int | float) -> str:
    return "" if result.null is None else f" (random init {agreement(result.null, d0)})"


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row per dummy distance, then one per limit: agreement of the key part over heads, and the loss."""
    loss, rows = float(dataset["loss"]), []
    for d0 in dataset["d0"].values:
        heads, now = dataset["key_agreement"].sel(d0=d0), float(dataset["loss_at"].sel(d0=d0))
        ends = (f"{float(heads.mean()):.3f}", f"{float(heads.min()):.3f}")
        rows.append((f"every pair at {d0:g}", *ends, now, now - loss))
    for limit in dataset["limit"].values:
        now = float(dataset["loss_beyond"].sel(limit=limit))
        rows.append((f"beyond {limit:g} as at {limit:g}", "", "", now, now - loss))
    return pd.DataFrame(rows, columns=["pairs", "key_agreement", "lowest_head", "loss", "rise"])
