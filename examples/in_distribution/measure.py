"""Is disentangling why outputs stay in distribution? Prompts beyond the training length, the interaction cut or not.

    python examples/in_distribution/measure.py [--models mini examples/shapes/deep ...] [--times 2]

Every model under every edit of `edits.py`, without and with LM-Infinite's windows: loss inside the training length and
beyond, its rise, how much more that is than without the edit (paired by prompt, 95 % interval), and the share of heads
whose outputs beyond are as close to those inside, under the same edit, as two halves of the prompts are there. A model's
rows in results.csv are replaced; those of other models, and of other lengths, stay.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

import tl_posgen
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.tokens import bundled_text, read_text
from tl_posgen.position import LengthExtrapolation
from tl_posgen.stats.intervals import mean_interval

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from edits import EDITS, FROZEN, edit_scores

WRITTEN = HERE / "results.csv"


def rows_of(name: str, model: Any, text: str, times: int, n_prompts: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each edit, without windows and with them."""
    inside = int(model.cfg.n_ctx)
    measure = LengthExtrapolation(inside=inside, times=times, conditions=("unchanged",))
    for windows in (False, True):
        intact = np.zeros(n_prompts)
        for edit in EDITS if windows else (*EDITS, *FROZEN):
            hooks = edit_scores(model, inside, edit, windows=windows)
            how = {"n_prompts": n_prompts, "nulls": 0, "progress": False}
            found = measure(model, text, fwd_hooks=hooks, **how)
            losses = found.trained["segment_loss"].sel(condition="unchanged").transpose("prompt", "segment").values
            rise = losses[:, 1:].mean(1) - losses[:, 0]
            intact = rise if edit == "intact" else intact
            numbers = measure.beyond(found.numbers, "unchanged")
            row = {"model": name, "times": times, "windows": windows, "edit": edit, "prompts": n_prompts}
            row |= {"loss_inside": losses[:, 0].mean(), "loss_beyond": losses[:, 1:].mean()}
            for column, values in {"rise": rise, "more": rise - intact}.items():
                low, high = mean_interval(values)
                row |= {column: values.mean(), f"{column}_low": float(low), f"{column}_high": float(high)}
            print(name, f"windows {windows}", edit, file=sys.stderr)
            yield row | {one: float(numbers[one]) for one in ("within_noise", "frechet", "norm_ratio")}


def written(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table as it is in the file now: these rows, and those of other models and lengths."""
    if WRITTEN.is_file():
        before: Any = pd.read_csv(WRITTEN)
        measured = set(zip(rows["model"], rows["times"], strict=True))
        again = [run in measured for run in zip(before["model"], before["times"], strict=True)]
        rows = pd.concat([before[~np.array(again)], rows])
    rows.to_csv(WRITTEN, index=False, float_format="%.4g")
    return pd.read_csv(WRITTEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mini"], help="names or directories")
    parser.add_argument("--text", help="file; Alice in Wonderland if left out")
    parser.add_argument("--times", type=int, default=2, help="length of prompts, in training lengths")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--random", action="store_true", help="the models' random inits (seed 0) instead")
    options = parser.parse_args()
    text = read_text(options.text) if options.text else bundled_text()
    for name in options.models:
        model, label = tl_posgen.load_model(name, backend="bridge"), Path(name).name
        if options.random:
            model, label = random_like(model, 0), f"{label}, random init"
        written(pd.DataFrame(rows_of(label, model, text, options.times, options.prompts)))


if __name__ == "__main__":
    main()
