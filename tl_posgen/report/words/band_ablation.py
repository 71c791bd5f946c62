"""What is said of a result named band_ablation."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Which frequencies does the running model need?"
QUESTION = (
    "RoPE planes dropped, frozen (theta = 0) or kept alone in all layers at once, Q and K cut to rank one or to their "
    "means, RoPE removed: the loss, and the slash scores that are left. Thirds: of the planes, fastest first. "
    "Wavelength: high < 32 tokens, medium up to the prompt's length, low above. Alone: each layer ablated by itself."
)
COLUMNS = ("loss_mean", "slash_heads", "slash_heads_kept", "slash_score", "slash_score_offline")
NAMES_OF_SPLITS = {"thirds": "A third of the planes", "wavelength": "A band by wavelength"}
NAMES = ("loss", "slash heads", "kept", "score", "score alone")


def found(result: Result) -> list[str]:
    """What each dropped band costs, and what is left of the slash when Q, K or RoPE itself are taken away."""
    arms, null = result.frame().set_index("arm"), None if result.null is None else result.frame(null=True)
    none = arms.loc["none"]
    random = "no null measured" if null is None else f"random init {int(null['slash_heads'].iloc[0])}"
    lines = []
    for split, dropped in arms[arms["kind"] == "drop"].groupby("split", sort=False):
        parts = [
            f"{row.band} {row.loss_mean - none['loss_mean']:+.3f} ({int(row.slash_heads_kept)} kept)"
            for row in dropped.itertuples()
        ]
        lines.append(f"{NAMES_OF_SPLITS[str(split)]} dropped in every layer, the loss changes by {', '.join(parts)}.")
    whole = [
        f"{name} {arms.at[kind, 'slash_score']:.3f} (loss {arms.at[kind, 'loss_mean']:.3f})"
        for kind, name in (("rank_one", "Q and K of rank one"), ("means", "their means"), ("no_rope", "RoPE removed"))
    ]
    lines.append(
        f"{int(none['slash_heads'])} heads are slash-dominant ({random}), mean score {none['slash_score']:.3f} (loss "
        f"{none['loss_mean']:.3f}); in the running model this becomes: {', '.join(whole)}."
    )
    if null is not None:
        lines.append(f"The random-init model's loss changes by {_largest_change(null):.4f} at most.")
    return lines


def _largest_change(frame: pd.DataFrame) -> float:
    return float((frame["loss_mean"] - frame["loss_mean"].iloc[0]).abs().max())


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row per arm, by thirds where bands were made in two ways: the page shows the others in its pictures."""
    frame = dataset[list(COLUMNS)].to_dataframe().reset_index()
    splits = [split for split in frame["split"].unique() if split]
    frame = frame[frame["split"].isin(["", *splits[:1]])]
    return frame[["arm", *COLUMNS]].rename(columns=dict(zip(COLUMNS, NAMES, strict=True))).reset_index(drop=True)
