"""Table of models and their scores, read and checked before any model is loaded."""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from tl_posgen.core.options import require
from tl_posgen.errors import InputError

SIZES = ("d_model", "n_layers", "parameters")  # columns of the table, or counted in the models
CONTROLS = ("d_model", "parameters")  # held fixed


def score_table(scores: str | os.PathLike | pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """Return the table of models and scores with checked numbers; InputError with the line in the file where a model
    is named twice or not at all, or a number is none."""
    require("scores", scores, str | os.PathLike | pd.DataFrame)
    require("score", score, str)
    if isinstance(scores, pd.DataFrame):
        table, where = scores.reset_index(drop=True), "the score table"
    else:
        table, where = read_csv(scores), str(scores)
    missing = [column for column in ("model", score) if column not in table]
    if missing:
        raise InputError(f"{where} has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}")
    if not len(table):
        raise InputError(f"{where} has no row; give one a model")
    names = [name.strip() if isinstance(name, str) else "" for name in table["model"]]
    lines = [f"{where}, line {row + 2}" for row in table.index]
    for place, (line, name) in enumerate(zip(lines, names, strict=True)):
        if not name:
            raise InputError(f"{line}: no model named; give a name or a directory in the column model")
        if name in names[:place]:
            raise InputError(f"{line}: {name} is named a second time; keep one row a model")
    columns = [score, *(name for name in SIZES if name in table)]
    return table.assign(model=names, **{name: numbers(table[name], lines) for name in columns})


def numbers(column: pd.Series, lines: list[str]) -> list[float]:
    """Return the numbers of a column, sizes above 0; refuse other cells by their line."""
    found, positive = [], column.name in SIZES
    for line, cell in zip(lines, column, strict=True):
        try:
            found.append(float(cell))
        except (TypeError, ValueError):
            found.append(np.nan)
        if not np.isfinite(found[-1]) or (positive and found[-1] <= 0):
            kind = "a positive number" if positive else "a finite number"
            raise InputError(f"{line}: {column.name} is {cell!r}, not {kind}; mend it or leave the row out")
    return found


def read_csv(path: str | os.PathLike) -> pd.DataFrame:
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give a CSV with columns model and score")
    try:
        # blank lines are kept at first, so that every row knows its line
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False, skipinitialspace=True)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a CSV table ({str(error).strip()})") from error
    if not isinstance(table.index, pd.RangeIndex):  # pandas makes surplus leading cells the index
        raise InputError(f"{path}: rows have more cells than there are columns; name every column")
    return pd.DataFrame(table[(table != "").any(axis=1)])
