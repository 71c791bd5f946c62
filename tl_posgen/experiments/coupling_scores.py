"""Coupling across models against a score, with what the models' width and size explain taken out."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling import coupling, headline
from tl_posgen.maths.coupling import NORMS, every_pair, off_diagonal_mean
from tl_posgen.maths.lanczos import dense_triplets
from tl_posgen.maths.partial_correlation import correlation, partial_correlation, regression_line, unexplained
from tl_posgen.models.checkpoints import load_checkpoint
from tl_posgen.models.load import BackendChoice, load_model
from tl_posgen.models.provenance import null_label
from tl_posgen.results import Result

MEASURES = ("coupling", "trace", "line_shape_score", "expodistance", "growth_r2")
CONTROLS = ("d_model", "parameters")
FEWEST = 4  # rows for an interval of r; each control needs one more
WIDTHS = (64, 128, 256, 512)  # of the random Jacobians that the warning is shown on


def coupling_scores(
    scores: str | os.PathLike | pd.DataFrame,
    prompts: Any,
    *,
    score: str = "score",
    tokenizer: str | os.PathLike | None = None,
    k: int = 10,
    length: int | None = 256,
    n_prompts: int | None = 4,
    backend: BackendChoice | str = "auto",
    seed: int = 0,
    null_seed: int | None = 0,
    widths: Sequence[int] = WIDTHS,
    progress: bool = True,
) -> Result:
    r"""r(measure, score) over models or checkpoints, and the same given ln d_model and ln parameters.

    Width and size are held fixed because they can make the whole correlation: at a K that grows with d_model the trace
    normalisation gives 1 - 1/sqrt(K) for random Jacobians (`width_alone`, part of the result), and wider models score
    higher for reasons that have nothing to do with coupling.

    Args:
        scores: CSV file or table. Columns: model (a name, a directory or "mini", as `load_model` takes), the score, and
            if wanted d_model and parameters, which else are counted in the model.
        prompts: a text, or a list of texts: every model reads them with its own tokenizer, one model at a time.
        score: column of `scores`.
        tokenizer: for checkpoints without one: a directory with the tokenizer of all, or "mini".
        k, length, n_prompts, seed, null_seed: as in `coupling`.
        widths: of the random Jacobians.

    Returns:
        Result "coupling_scores" with the measures coupling, trace, line_shape_score, expodistance, growth_r2. Over
        model: each of them with _low and _high, chance, score, d_model, parameters. Over measure: r and partial_r, each
        with its 95 % interval, slope, intercept and r2 of the regression line. Over (measure, model): rest, and over
        model rest_score: what the controls leave. width_coupling, width_r2 and more over width: `width_alone`.
        attrs["not_computed"] says which of these are NaN, as there are too few models or all have one size.
        The null holds the same of randomly initialised models of the same shapes, against the same scores.

    Raises:
        InputError: a table that is not there or cannot be read, a missing column, a model named twice or not named, a
            score or size that is not a number (with its line in the file), unusable prompts.
        ModelError: a model that cannot be loaded.

    Source: the correlation is that of Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810; the controls are ours.
    """
    table = score_table(scores, score)
    options = {"k": [k], "length": length, "n_prompts": n_prompts, "seed": seed, "null_seed": null_seed}
    sides: tuple[list[dict], list[dict]] = ([], [])
    provenance = {}
    for name in tqdm(table["model"], desc="coupling against scores", unit="model", disable=not progress):
        model = load_model(name, backend) if tokenizer is None else load_checkpoint(name, tokenizer, backend)
        found = coupling(model, prompts, **options, progress=False)
        provenance[name] = found.provenance
        for rows, dataset in zip(sides, (found.dataset, found.null), strict=True):
            if dataset is not None:
                rows.append({**headline(dataset, k), **{control: dataset.attrs[control] for control in CONTROLS}})
    demonstration = width_alone(widths).rename({"coupling": "width_coupling", "d_model": "width", "k": "width_k"})
    datasets = [
        correlated(table, pd.DataFrame(rows), score).assign_attrs(k=k).merge(demonstration) if rows else None
        for rows in sides
    ]
    dataset, null = datasets
    assert dataset is not None
    dataset.attrs["model"] = f"{len(table)} models"
    if null is not None:
        assert null_seed is not None
        null.attrs["model"] = null_label(null_seed)
    last = provenance[table["model"].iloc[-1]]
    known = {key: last[key] for key in ("backend", "dtype", "length", "prompts", "versions", "null_seed")}
    known |= {"model": f"{len(table)} models", "models": table["model"].tolist(), "score": score, "k": k}
    return Result("coupling_scores", dataset, null, known)


def correlated(table: pd.DataFrame, measured: pd.DataFrame, score: str) -> xr.Dataset:
    """The measures of all models against the score, as they are and given the controls."""
    sizes = {
        name: table[name].to_numpy(float) if name in table else measured[name].to_numpy(float) for name in CONTROLS
    }
    columns = {name: measured[name].to_numpy(float) for name in measured if name not in CONTROLS}
    y = table[score].to_numpy(float)
    dataset = xr.Dataset({name: ("model", values) for name, values in (columns | sizes | {"score": y}).items()})
    short = [Path(name).name for name in table["model"]]
    dataset = dataset.assign_coords(model=short if len(set(short)) == len(short) else table["model"].tolist())
    controls = torch.from_numpy(np.log(np.stack(list(sizes.values()), axis=1)))
    found = [_against(torch.tensor(columns[name]), torch.tensor(y), controls) for name in MEASURES]
    for name in found[0]:
        dataset[name] = ("measure", [numbers[name] for numbers in found])
    both = torch.from_numpy(np.stack([*(columns[name] for name in MEASURES), y], axis=1))
    rest = (
        unexplained(both, controls).numpy()
        if len(y) > 1 + len(CONTROLS) and _vary(controls)
        else np.full(both.shape, np.nan)
    )
    dataset["rest"] = (("model", "measure"), rest[:, :-1])
    dataset["rest_score"] = ("model", rest[:, -1])
    dataset = dataset.assign_coords(measure=list(MEASURES))
    return dataset.assign_attrs(rows="model", score=score, not_computed=_not_computed(len(y), _vary(controls)))


def _against(x: torch.Tensor, y: torch.Tensor, controls: torch.Tensor) -> dict[str, float]:
    names = ("r", "r_low", "r_high", "partial_r", "partial_low", "partial_high", "slope", "intercept", "r2")
    numbers: dict[str, float] = {name: float("nan") for name in names}
    if len(x) >= FEWEST:
        plain, line = correlation(x, y), regression_line(x, y)
        numbers |= {"r": plain.r, "r_low": plain.low, "r_high": plain.high}
        numbers |= {"slope": line.slope, "intercept": line.intercept, "r2": line.r2}
    if len(x) >= FEWEST + len(CONTROLS) and _vary(controls):
        held = partial_correlation(x, y, controls)
        numbers |= {"partial_r": held.r, "partial_low": held.low, "partial_high": held.high}
    return numbers


def _vary(controls: torch.Tensor) -> bool:
    return bool((controls != controls[0]).any())


def _not_computed(n: int, varied: bool) -> str:
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST + len(CONTROLS)}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= fewest[held]:
        missing.append(f"{held} (all models have the same)")
    return "; ".join(missing)


def width_alone(
    widths: Sequence[int], *, width_per_k: int = 8, members: int = 3, chance_samples: int = 5, seed: int = 0
) -> xr.Dataset:
    r"""Coupling of independent Gaussian Jacobians of growing width: a figure over models where there is nothing to see.

    K = d_model / width_per_k, as where K is a share of the width. The trace normalisation rises like 1 - 1/sqrt(K)
    towards 1; Frobenius stays near 0.

    Returns:
        coupling [norm, d_model], over ordered pairs of `members` Jacobians; k and one_minus_inverse_root_k [d_model];
        width_r2 [norm], of the line of coupling against 1 / sqrt(d_model), NaN for fewer than three widths.

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
    couplings, inverse_root = np.array(found).T, torch.tensor(widths, dtype=torch.float64) ** -0.5
    lines = [regression_line(inverse_root, torch.from_numpy(row)).r2 for row in couplings]
    arrays = {
        "coupling": (("norm", "d_model"), couplings),
        "k": ("d_model", ks),
        "one_minus_inverse_root_k": ("d_model", 1 - np.array(ks) ** -0.5),
        "width_r2": ("norm", lines if len(widths) > 2 else [np.nan] * len(lines)),
    }
    return xr.Dataset(arrays, {"norm": list(NORMS), "d_model": list(widths)})


def score_table(scores: str | os.PathLike | pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """The table of models and scores, its numbers checked, before any model is loaded."""
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
    lines = [f"{where}, line {row + 2}" for row in table.index]
    for place, (line, name) in enumerate(zip(lines, names, strict=True)):
        if not name:
            raise InputError(f"{line}: no model named; give a name or a directory in the column model")
        if name in names[:place]:
            raise InputError(f"{line}: {name} is named a second time; keep one row a model")
    controls = [name for name in CONTROLS if name in table]
    numbers = {name: _numbers(table[name], lines, positive=name in controls) for name in (score, *controls)}
    return table.assign(model=names, **numbers)


def _numbers(column: pd.Series, lines: list[str], positive: bool) -> list[float]:
    numbers = []
    for line, cell in zip(lines, column, strict=True):
        try:
            numbers.append(float(cell))
        except (TypeError, ValueError):
            numbers.append(np.nan)
        if not np.isfinite(numbers[-1]) or (positive and numbers[-1] <= 0):
            kind = "a positive number" if positive else "a finite number"
            raise InputError(f"{line}: {column.name} is {cell!r}, not {kind}; mend it or leave the row out")
    return numbers


def _read_csv(path: str | os.PathLike) -> pd.DataFrame:
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give a CSV with columns model and score")
    try:
        # blank lines are kept at first, so that every row knows its line
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False, skipinitialspace=True)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a CSV table ({str(error).strip()})") from error
    return pd.DataFrame(table[(table != "").any(axis=1)])
