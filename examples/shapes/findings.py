"""Ask of many models what was found on three: correlations over heads, and what fits recover of the loss.

    python examples/shapes/findings.py [--texts DIRECTORY] [--models mini examples/shapes/deep ...]

A row a finding, a column a model, random init (seed 0) in brackets; the last column counts the models with the sign that
most of them have. Rank correlations are over all heads of a model. Shares recovered, which have no random init here, are
of the loss between uniform attention and the unchanged model. Prompts are spread over the text.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

import tl_posgen
from tl_posgen.models.tokens import bundled_text, read_text
from tl_posgen.position import Substitution

HERE = Path(__file__).parent
CUT = {"length": 128, "n_prompts": 8, "progress": False}
PAIRS = (
    ("slash score with previous token", "slash_score", "previous_token"),
    ("r1 of K with slash score", "r1, k", "slash_score"),
    ("interaction share with slash score", "interaction", "slash_score"),
    ("r1 of K with interaction share", "r1, k", "interaction"),
    ("interaction share with previous token", "interaction", "previous_token"),
    ("interaction share with induction", "interaction", "induction"),
)
FITS = (
    ("three axes, all pairs alike: loss recovered", "three_axis"),
    ("three axes, near pairs: loss recovered", "three_axis_near_8"),
    ("f(q, i-j) + g(q, k), each query's profile: loss recovered", "query_profile"),
)


def findings_of(model: str, text: str) -> dict[str, tuple[float, float]]:
    """Return every finding of a model, and of its random init."""
    measures = ["profiles", Substitution(dummy_distances=(), widths=(8,)), "three_axis"]
    report = tl_posgen.analyze(model, text, measures=measures, **CUT)
    losses, r = report["substitution"].numbers, report["three_axis"].numbers("r_within_rows")
    heads = [report["profiles"].frame(init=init) for init in ("trained", 0)]
    found = {"r of three axes within rows, mean over heads": (r.value, r.inits[0])}
    for words, one, other in PAIRS:
        found[words] = tuple(table[one].corr(table[other], method="spearman") for table in heads)
    return found | {words: (losses("recovered", condition=name).value, np.nan) for words, name in FITS}


def cell(value: float, null: float) -> str:
    return f"{value:.2f}" + ("" if np.isnan(null) else f" ({null:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [str(path.parent) for path in sorted(HERE.glob("*/config.json"))]
    parser.add_argument("--models", nargs="+", default=["mini", *shapes], help="measured on Alice in Wonderland")
    parser.add_argument("--stories", nargs="*", default=[], help="directories of models measured on --text instead")
    parser.add_argument("--text", help="for --stories")
    options = parser.parse_args()
    if options.stories and not options.text:
        parser.error("--stories needs --text")
    found = {Path(name).name: findings_of(name, bundled_text()) for name in options.models}
    found |= {Path(name).name: findings_of(name, read_text(options.text)) for name in options.stories}
    table = pd.DataFrame(found)
    lines = [["", *table.columns, "one sign on"], ["---"] * (len(table.columns) + 2)]
    for words, row in table.iterrows():
        signs = np.sign([value for value, _ in row])
        most = max((signs > 0).sum(), (signs < 0).sum())
        lines.append([words, *(cell(*one) for one in row), f"{most} of {len(signs)}"])
    print("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


if __name__ == "__main__":
    main()
