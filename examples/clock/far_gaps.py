"""Loss of text across gaps of up to two turns of one plane: does a model read again where the plane comes back?

    python examples/clock/far_gaps.py --models mini DIRECTORY --texts "" FILE --out far_gaps.csv   # a minute a small model

The plane is the one in which more heads are longest than in any other. Across a whole turn of it that plane stands where
it stands without a gap; other planes do so only where their angles divide its own.
"""

import argparse
from pathlib import Path

import pandas as pd

import tl_posgen
from tl_posgen.core.numbers import Numbers
from tl_posgen.frequencies import Gap, PlaneUse
from tl_posgen.models.tokens import bundled_text, read_text

STEPS = 8  # gaps a turn
CONDITIONS = ("unchanged", "hold_planes")


def rows_of(name: str, text: str, length: int, nulls: dict[str, tuple[int, ...]]) -> list[dict]:
    model = tl_posgen.load_model(name, backend="bridge")
    cut = {"length": length, "n_prompts": 4, "progress": False}
    planes = PlaneUse()(model, text, nulls=0, **cut)
    plane = int(planes.trained["longest_plane"].isel(context=0, missing_dims="ignore").to_series().mode().iloc[0])
    at = {"layer": 0, "plane": plane, "context": planes.trained["context"].values[0]}
    turn = float(at["context"] / planes.trained["turns"].sel(at))
    gaps = [round(turn * step / STEPS) for step in range(2 * STEPS + 1)]
    numbers = Gap(gaps=gaps, rules=("hold_planes",))(model, text, nulls=nulls, **cut).numbers
    label = Path(name).name.split(".")[0]
    rows = [
        {"model": label, "context": at["context"], "plane": plane, "gap": gap, "turns": round(gap / turn, 3)}
        for gap in gaps
    ]
    return [row | losses_of(numbers, row["gap"]) for row in rows]


def losses_of(numbers: Numbers, gap: int) -> dict[str, float]:
    """Return the loss of text across a gap, its rise over the loss without one, paired by prompt with a 95 % interval,
    and the loss of each null model; also the loss without the first half, and the rise of that."""
    found = {"alone": numbers("alone").value}
    nearest = numbers.array("loss", task="text", condition="unchanged", gap=0)
    found["alone_rise"] = numbers.number(numbers.array("alone") - nearest).value
    for condition in CONDITIONS:
        loss = numbers.array("loss", task="text", condition=condition, gap=gap)
        number, rise = numbers.number(loss), numbers.number(loss - nearest)
        found |= {condition: number.value, f"{condition}_rise": rise.value}
        found |= {f"{condition}_low": rise.low, f"{condition}_high": rise.high}
        found |= {f"{condition}_{kind.replace(' ', '_')}": values[0] for kind, values in number.by_null.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mini"])
    parser.add_argument("--texts", nargs="+", default=[""], help="a file a model; an empty name for the bundled text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--no-null", action="store_true", help="no random init and no shuffled weights")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    nulls = {} if args.no_null else {"random init": (0,), "shuffled": (0,)}
    rows = []
    for name, text in zip(args.models, args.texts, strict=True):
        rows += rows_of(name, read_text(text) if text else bundled_text(), args.length, nulls)
        pd.DataFrame(rows).round(4).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
