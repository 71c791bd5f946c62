"""Coupling across models against a score, with what the models' width and size explain taken out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import xarray as xr

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling import headline
from tl_posgen.maths.coupling import NORMS, every_pair, off_diagonal_mean
from tl_posgen.maths.lanczos import dense_triplets
from tl_posgen.maths.partial_correlation import Correlation, correlation, partial_correlation, regression_line
from tl_posgen.results import Result

CONTROLS = ("d_model", "parameters")
FEWEST_MODELS = 4 + len(CONTROLS)


def headlines(results: Mapping[str, Result]) -> pd.DataFrame:
    """One row per model (or checkpoint): its name, its headline numbers, d_model and parameters.

    Args:
        results: "coupling" results by the name that the score table uses.
    """
    rows = [
        {"model": name, **headline(result.dataset), **{key: result.dataset.attrs[key] for key in CONTROLS}}
        for name, result in results.items()
    ]
    return pd.DataFrame(rows)


def coupling_scores(
    measured: pd.DataFrame,
    scores: str | os.PathLike | pd.DataFrame,
    *,
    measure: str,
    score: str = "score",
) -> Result:
    r"""r(measure, score) over models, and the same given ln d_model and ln parameters.

    Width and size are held fixed because they can make the whole correlation: at a K that grows with d_model the trace
    normalisation gives 1 - 1/sqrt(K) for random Jacobians (`width_alone`), and wider models score higher for reasons
    that have nothing to do with coupling.

    Args:
        measured: columns model, d_model, parameters and the measure; `headlines` makes it.
        scores: CSV file or table with columns model and the score; models in only one of the two are left out.
        measure: column of `measured`, such as "coupling_10".
        score: column of `scores`.

    Returns:
        Result "coupling_scores", one row a model: measure, score, d_model, parameters. Scalars: r and its 95 % interval
        r_low, r_high; partial_r, partial_low, partial_high; slope, intercept, r2 of the regression line.

    Raises:
        InputError: a file that is not there or cannot be read, a missing column, a model named twice, a score that is
            not a number, fewer than six models in both tables.

    Source: the correlation is that of Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810; the controls are ours.
    """
    table = _joined(measured, _score_table(scores), measure, score)
    x, y = (torch.tensor(table[name].to_numpy(dtype=float)) for name in (measure, score))
    controls = torch.from_numpy(np.log(table[list(CONTROLS)].to_numpy(dtype=float)))
    numbers: dict[str, float] = {}
    for prefix, found in (("", correlation(x, y)), ("partial_", partial_correlation(x, y, controls))):
        numbers |= _named(found, prefix)
    line = regression_line(x, y)
    numbers |= {"slope": line.slope, "intercept": line.intercept, "r2": line.r2}
    columns = {"measure": measure, "score": score, "d_model": "d_model", "parameters": "parameters"}
    arrays = {name: ("model", table[column].to_numpy(dtype=float)) for name, column in columns.items()}
    attributes = {"rows": "model", "measure": measure, "score": score, "controls": "ln d_model, ln parameters"}
    dataset = xr.Dataset({**arrays, **numbers}, {"model": table["model"].tolist()}, attributes)
    return Result("coupling_scores", dataset, provenance={"measure": measure, "score": score, "models": len(table)})


def width_alone(
    widths: Sequence[int], *, width_per_k: int = 8, members: int = 3, chance_samples: int = 5, seed: int = 0
) -> xr.Dataset:
    r"""Coupling of independent Gaussian Jacobians of growing width: a figure over models where there is nothing to see.

    K = d_model / width_per_k, as where K is a share of the width. The trace normalisation rises like 1 - 1/sqrt(K)
    towards 1; Frobenius stays near 0.

    Returns:
        coupling [norm, d_model], over ordered pairs of `members` Jacobians; k and one_minus_inverse_root_k [d_model].

    Example:
        >>> found = width_alone([64, 256])
        >>> found.coupling.sel(norm="trace").round(1).values.tolist()
        [0.7, 0.8]
        >>> bool(abs(found.coupling.sel(norm="frobenius")).max() < 0.06)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    ks, found = [width // width_per_k for width in widths], []
    for width, k in zip(widths, ks, strict=True):
        if k < 1:
            raise InputError(f"width {width} with width_per_k {width_per_k} leaves no singular vector; give wider ones")
        jacobians = torch.randn(members, width, width, generator=generator)
        triplets = [dense_triplets(jacobian, k) for jacobian in jacobians]
        pairs = every_pair([jacobian.matmul for jacobian in jacobians], triplets, chance_samples, generator)
        found.append([off_diagonal_mean(pairs.coupling(k, norm)).item() for norm in NORMS])
    arrays = {
        "coupling": (("norm", "d_model"), np.array(found).T),
        "k": ("d_model", ks),
        "one_minus_inverse_root_k": ("d_model", 1 - np.array(ks) ** -0.5),
    }
    return xr.Dataset(arrays, {"norm": list(NORMS), "d_model": list(widths)})


def _score_table(scores: str | os.PathLike | pd.DataFrame) -> pd.DataFrame:
    if isinstance(scores, pd.DataFrame):
        return scores
    if not Path(scores).is_file():
        raise InputError(f"{scores}: no such file; give a CSV with columns model and score")
    try:
        return pd.read_csv(scores, dtype={"model": str})
    except (ValueError, OSError) as error:
        raise InputError(f"{scores}: not a CSV table ({error})") from error


def _joined(measured: pd.DataFrame, scores: pd.DataFrame, measure: str, score: str) -> pd.DataFrame:
    for what, table, columns in (
        ("the measured table", measured, ("model", measure, *CONTROLS)),
        ("the score table", scores, ("model", score)),
    ):
        missing = [column for column in columns if column not in table]
        if missing:
            raise InputError(f"{what} has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}")
        twice = table["model"][table["model"].duplicated()].tolist()
        if twice:
            raise InputError(f"{what} names {twice[0]} twice; keep one row a model")
    numbers = pd.Series(pd.to_numeric(scores[score], errors="coerce"))
    wrong = scores["model"][numbers.isna()].tolist()
    if wrong:
        raise InputError(f"the score of {wrong[0]} is not a number; mend it or leave the row out")
    table = measured[["model", measure, *CONTROLS]].merge(
        pd.DataFrame({"model": scores["model"], score: numbers}), on="model"
    )
    table = table[np.isfinite(table[measure])]
    if len(table) < FEWEST_MODELS:
        raise InputError(f"{len(table)} models have both {measure} and {score}; two controls need {FEWEST_MODELS}")
    return table


def _named(found: Correlation, prefix: str) -> dict[str, float]:
    return {f"{prefix}r": found.r, f"{prefix or 'r_'}low": found.low, f"{prefix or 'r_'}high": found.high}
