"""The figure and the numbers of results.csv: rise of the loss and heads within the noise level, by edit.

python examples/in_distribution/draw.py [--json]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "encodings")]
from edits import EDITS, FROZEN
from figure import BOTTOM, HEIGHT, STYLE, WIDTH, Panel, limits  # pyright: ignore[reportMissingImports]

TIMES = 2  # of the training length, the prompts of the table and the figure
NULL = ", random init"
COMPARED = (("doubled", "noise"), ("doubled", "intact"), ("cut", "intact"), ("noise", "intact"))
COLOURS = {"mini": "#d1603d", "other models": "#3b6fb6"}


def summarise(rows: Any) -> dict[str, Any]:
    """Return the table of mini, and of every edit how many trained models rise less, or more, beyond chance.

    `edits` has a list of {windows, edit, of mini and its random init, over models}; counts are of models whose paired
    interval of the rise less that of the unedited model leaves out zero.
    """
    rows = rows[rows["times"] == TIMES]
    found = []
    for (windows, edit), one in rows.groupby(["windows", "edit"], sort=False):
        null = one["model"].str.endswith(NULL)
        trained = one[~null]
        of_mini = {name: one[one["model"] == f"mini{end}"] for name, end in {"mini": "", "random_init": NULL}.items()}
        rise = {"less": int((trained["more_high"] < 0).sum()), "more": int((trained["more_low"] > 0).sum())}
        medians = {f"median_{name}": float(trained[name].median()) for name in ("rise", "more", "within_noise")}
        known = {name: part.iloc[0].drop(["model", "edit"]) for name, part in of_mini.items() if len(part)}
        single = {name: part.astype(float).to_dict() for name, part in known.items()}
        counts = {"models": len(trained), **rise, "models_more": trained["model"][trained["more_low"] > 0].tolist()}
        found.append({"windows": bool(windows), "edit": str(edit), **counts, **medians, **single})
    models = [name for name in rows["model"].unique() if not name.endswith(NULL)]
    models.sort(key=lambda name: name != "mini")
    shape = {"times": TIMES, "prompts": int(rows["prompts"].iloc[0]), "models": models}
    return shape | {"edits": found, "further": further(rows)}


def further(rows: Any) -> list[dict[str, Any]]:
    """Return, without windows and with them, in how many trained models outputs are further from those inside (Frechet
    distance) under one edit than under another."""
    trained = rows[~rows["model"].str.endswith(NULL)]
    found = []
    for windows, one in trained.groupby("windows"):
        frechet = one.pivot(index="model", columns="edit", values="frechet")
        counts = {f"{edit} than {other}": int((frechet[edit] > frechet[other]).sum()) for edit, other in COMPARED}
        found.append({"windows": bool(windows), **counts})
    return found


def draw(rows: Any) -> str:
    """Return the SVG: a dot a trained model, a line at the mean of all."""
    rows = rows[(rows["times"] == TIMES) & ~rows["model"].str.endswith(NULL)]
    low, high, ticks = limits(rows["rise"].tolist(), 0.25)
    every, left = (*EDITS, *FROZEN), "Rise of the loss beyond the training length (nats)"
    right = "Heads within the noise level, without windows"
    panels = [
        (Panel(50, 400, left, low, high, ticks), "rise", False, every),
        (Panel(450, 690, "The same with LM-Infinite's windows", low, high, ticks), "rise", True, tuple(EDITS)),
        (Panel(740, 1095, right, 0, 1, [0, 0.25, 0.5, 0.75, 1]), "within_noise", False, every),
    ]
    for panel, column, windows, edits in panels:
        for edit, x in zip(edits, panel.places(len(edits)), strict=True):
            one = rows[(rows["windows"] == windows) & (rows["edit"] == edit)]
            for name, shift in (("other models", -6), ("mini", 6)):
                if values := one.loc[(one["model"] == "mini") == (name == "mini"), column].tolist():
                    panel.dots(x + shift, values, COLOURS[name])
            for line, word in enumerate(edit.split()):
                panel.text(x, BOTTOM + 14 + 12 * line, word)
    first = panels[0][0]
    first.text(first.left, HEIGHT - 14, "a dot a model, a line at their mean; orange: mini", "start")
    parts = "\n".join(part for panel, *_ in panels for part in panel.parts)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {STYLE}>'
    return f'{frame}<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{parts}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers")
    rows: Any = pd.read_csv(HERE / "results.csv")
    (HERE / "in_distribution.svg").write_text(draw(rows), encoding="utf-8")
    if parser.parse_args().json:
        print(json.dumps(summarise(rows)))


if __name__ == "__main__":
    main()
