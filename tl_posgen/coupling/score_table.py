"""Table of models and their scores, read and checked before any model is loaded."""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from tl_posgen.core.options import require
from tl_posgen.errors import InputError

SIZES = ("d_model", "n_layers", "parameters")  # columns of the table, or counted in the models


def score_table(scores: str | os.PathLike | pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """Return the table of models and scores with checked numbers; InputError with the line in the file where a model
    is named twice or not at all, or a number is none."""
    require("scores", scores, str | os.PathLike | pd.DataFrame)
    require("score", score, str)
    if isinstance(scores, pd.DataFrame):
        table, where = scores.reset_index(drop=True), "the score table"
    else:
        table, where = _read_csv(scores), str(scores)
    missing = [column for column in ("model", score) if column not in table]
    if missing:
        raise InputError(f"{where} has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}")
    if not len(table):
        raise InputError(f"{where} has no row; give one a model")
    names = [name.strip() if isinstance(name, str) else "" for name in table["model"]]
    columns = [score, *(name for name in SIZES if name in table)]
    numbers = table[columns].apply(pd.to_numeric, errors="coerce")
    for place, (row, name) in enumerate(zip(table.index, names, strict=True)):
        line = f"{where}, line {row + 2}"
        if not name:
            raise InputError(f"{line}: no model named; give a name or a directory in the column model")
        if name in names[:place]:
            raise InputError(f"{line}: {name} is named a second time; keep one row a model")
        for column in columns:
            number, positive = numbers[column][row], column in SIZES
            if not np.isfinite(number) or (positive and number <= 0):
                kind = "a positive number" if positive else "a finite number"
                cell = table[column][row]
                raise InputError(f"{line}: {column} is {cell!r}, not {kind}; mend it or leave the row out")
    return table.assign(model=names, **{name: numbers[name].astype(float) for name in columns})


def _read_csv(path: str | os.PathLike) -> pd.DataFrame:
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
