"""Measure finished runs of train.py: does the clock stand, where, and what happens beyond the context?

    python examples/clock/measure.py --work build/contexts   # writes clock.csv, a row a run; minutes
    python examples/clock/measure.py --models mini DIRECTORY --text FILE --out clock.json   # of other models

Columns: context L, base, `half_turn` the fastest plane that makes at most half a turn in L, `longest` the mean over heads
of the longest plane, `at_half_turn` the share of heads where it is within a step of the half-turn plane (`chance`: of
planes), `sine` of the phase there and `amplitude` in logits, then of a random init and of shuffled weights; `inside` the
loss of the second half of L, `beyond` that of the tokens from L to 2 L, `held` the latter with the planes that make less
than a turn held at L / 2. 8 prompts of L tokens, for the losses 8 of 2 L.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch

import tl_posgen
from tl_posgen.errors import PosgenError
from tl_posgen.frequencies import PlaneUse
from tl_posgen.hooks import hold_planes
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from mini_model.train import HELD_OUT, read_book

HERE = Path(__file__).parent
HEADS = ("layer", "head")


def row_of(name: str, directory: Path | str, text: str, random_order: bool = False) -> dict[str, object]:
    """A row of the table, of the model in a directory."""
    model = tl_posgen.load_model(directory, backend="bridge")
    context = int(model.cfg.n_ctx)
    prompts = torch.stack(to_prompts(model, text, length=2 * context, n_prompts=8))
    if random_order:
        order = torch.rand(prompts[:, 1:].shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
        prompts = torch.cat([prompts[:, :1], prompts[:, 1:].gather(1, order)], dim=1)
    result = PlaneUse()(model, prompts[:, :context], progress=False)
    use = result.numbers
    theta = tl_posgen.models.geometry_of(model)[0].rope.inv_freq
    row: dict[str, object] = {"run": name, "context": context, "base": base_of(theta)}
    row |= {
        "half_turn": int(use.data["half_turn"].isel(context=0).max()),
        "longest": float(use.data["longest_plane"].mean()),
    }
    for column in ("at_half_turn", "sine", "amplitude"):
        number = use(column)
        row[column] = number.value
        row |= {f"{column}_{kind.replace(' ', '_')}": float(max(values)) for kind, values in number.by_null.items()}
    row["chance"] = float(use.data["chance"].isel(context=0).mean())
    losses = {"": token_losses(model, prompts)}
    try:
        losses["held"] = token_losses(model, prompts, hold_planes(model, "partial", at=context // 2))
    except PosgenError as reason:
        row["held"] = str(reason)
    row |= {
        "inside": float(losses[""][:, context // 2 : context].mean()),
        "beyond": float(losses[""][:, context:].mean()),
    }
    return row | ({"held": float(losses["held"][:, context:].mean())} if "held" in losses else {})


def base_of(theta: torch.Tensor) -> float:
    return float((theta[0] / theta[-1]) ** (len(theta) / (len(theta) - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/contexts"))
    parser.add_argument("--books", type=Path, help="directory of the books, for the one held out")
    parser.add_argument("--models", nargs="*", help="instead, other models")
    parser.add_argument("--text", type=Path, help="their text")
    parser.add_argument("--out", type=Path, default=HERE / "clock.csv")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8") if args.text else read_book(args.books / HELD_OUT[1])
    rows = []
    for name in args.models or ():
        rows.append(row_of(name, name, text))
        print(rows[-1], flush=True)
    for last in () if args.models else sorted(args.work.glob("*/checkpoints/step01000")):
        run = last.parents[1].name
        rows.append(row_of(run, last, text, random_order=run == "random_order"))
        print(rows[-1], flush=True)
    pd.DataFrame(rows).round(4).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
