"""Loss of text across gaps of up to two turns of the plane in which most heads are longest: does it come back?

    python examples/clock/far_gaps.py --models mini DIRECTORY --texts "" FILE --out far_gaps.csv   # a minute a small model

A clock that ran out would stay wrong. One that came round stands at angles that the model knows: then text across a
whole turn should cost hardly more than across none, unchanged, and across three quarters of a turn most.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import tl_posgen
from tl_posgen.frequencies import Gap, PlaneUse
from tl_posgen.models.tokens import bundled_text, read_text

STEPS = 8  # gaps a turn


def rows_of(name: str, text: str, length: int, seeds: dict[str, tuple[int, ...]]) -> list[dict]:
    model = tl_posgen.load_model(name, backend="bridge")
    cut = {"length": length, "n_prompts": 4, "progress": False}
    planes = PlaneUse()(model, text, null_seeds=(), **cut)
    longest = int(planes.own["longest_plane"].isel(context=0, missing_dims="ignore").to_series().mode().iloc[0])
    at = {"layer": 0, "plane": longest, "context": planes.own["context"].values[0]}
    turn = float(at["context"] / planes.own["turns"].sel(at))
    gaps = [round(turn * step / STEPS) for step in range(2 * STEPS + 1)]
    result = Gap(gaps=gaps, rules=("hold_planes",))(model, text, null_seeds=seeds, **cut)
    rows = []
    for gap in gaps:
        row = {"model": Path(name).name.split(".")[0], "context": at["context"], "plane": longest, "gap": gap}
        row["turns"] = round(gap / turn, 3)
        for condition in ("unchanged", "hold_planes"):
            loss = result.numbers("loss", task="text", condition=condition, gap=gap)
            row |= {condition: loss.value, f"{condition}_low": loss.low, f"{condition}_high": loss.high}
            row |= {f"{condition}_{kind.replace(' ', '_')}": values[0] for kind, values in loss.by_null.items()}
        rows.append(row | {"alone": float(np.mean(result.own["alone"]))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mini"])
    parser.add_argument("--texts", nargs="+", default=[""], help="a file a model; an empty name for the bundled text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--no-null", action="store_true", help="no random init and no shuffled weights")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    seeds = {} if args.no_null else {"random init": (0,), "shuffled": (0,)}
    rows = []
    for name, text in zip(args.models, args.texts, strict=True):
        rows += rows_of(name, read_text(text) if text else bundled_text(), args.length, seeds)
        pd.DataFrame(rows).round(4).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
