"""Coupling across models against a score, beside width, depth and parameters, and with what these explain taken out."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core.formatting import counted, format_bound
from tl_posgen.core.inits import joined
from tl_posgen.core.measure import ENDS, Measure, Variable
from tl_posgen.core.null_models import Nulls, seeds_by_kind
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers, at_init, grouped, mean_of
from tl_posgen.core.options import Count, Each, require
from tl_posgen.core.result import Result
from tl_posgen.core.store import Parts
from tl_posgen.coupling.coupling import Coupling
from tl_posgen.coupling.coupling_scores_figure import LABELS, draw_scatter
from tl_posgen.coupling.numbers.overlap import NORMS, width_alone
from tl_posgen.errors import InputError, check_seed
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.loading.null_kinds import null_label
from tl_posgen.models.tokens import check_counts, text_provenance
from tl_posgen.report.kinds import lines
from tl_posgen.stats.correlations import (
    Correlation,
    correlation,
    correlation_excess,
    partial_correlation,
    pearson,
)

WIDTHS = (64, 128, 256, 512)  # of the random Jacobians that the warning is shown on
SIZES = ("d_model", "n_layers", "parameters")  # columns of the table, or counted in the models
_CONTROLS = ("d_model", "parameters")  # held fixed
_FEWEST = 4  # models for an interval of r; each control needs one more
_SHARED = ["backend", "dtype", "length", "prompts", "seed", "nulls", "versions"]
_SIZE = "of the table, or counted in the model"
_SIZE_WORDS = {"d_model": "width", "n_layers": "depth", "parameters": "parameters"}
_NORM_WORDS = {"frobenius": "Frobenius", "trace": "trace normalisation"}


@dataclass(frozen=True)
class CouplingScores(Measure):
    r"""r(quantity, score) over models or checkpoints, beside r(ln size, score) and given ln d_model and ln parameters.

    Correlation over models of coupling, straightness and growth with a score, as they are and given ln d_model and ln
    parameters; beside them that of width, depth and parameters, which coupling is said to beat.
    The control matters: with the trace normalisation and K proportional to the width, random Jacobians already couple
    by about 1 - 1/sqrt(K), so wider models look coupled.

    Made by `coupling_scores`.

    Args:
        k: number of top singular vectors.
        score: column of the table of scores.
        widths: of the random Jacobians.

    Source: that coupling correlates with a score, and more than width, depth and parameters do, is of Aubry, Meng,
    Sugolov and Papyan, arXiv 2407.07810; intervals, the test of the excess, controls and warning are ours.
    """

    k: Count = 10
    score: str = "score"
    widths: Annotated[Sequence[Count], Each()] = WIDTHS

    question = "Does coupling go with a better model?"
    rows = ("model_name",)
    variables = {
        "measured": Variable(
            "quantity",
            "",
            "as in coupling, with its interval over prompts",
            ("end", "quantity", "model_name"),
            headline="measured",
        ),
        "score": Variable("score", "", "column of the table", ("model_name",), "score"),
        "d_model": Variable("width", "", _SIZE, ("model_name",), "d_model"),
        "n_layers": Variable("depth", "layers", _SIZE, ("model_name",), "n_layers"),
        "parameters": Variable("parameters", "", _SIZE, ("model_name",), "parameters"),
        "width_coupling": Variable("coupling of random Jacobians", "", "independent Gaussian", ("norm", "width")),
        "width_r2": Variable("R² against 1/sqrt(width)", "", "of the coupling of random Jacobians", ("norm",)),
    }
    legend = (
        "r with the score over models, 95% interval in brackets; given size: the same given width and parameters; "
        "excess: |r| of coupling less that of this size."
    )
    figures = {
        "scatter": draw_scatter,
        "width": lines(
            {"": [(label, "width_coupling", {"norm": norm}) for norm, label in _NORM_WORDS.items()]},
            "width",
            title="Coupling of random Jacobians by width",
            subtitle="independent Gaussian matrices, K a share of d: with the trace normalisation width makes coupling",
            x_title="d",
            y_title="coupling",
        ),
    }

    def _over_models(
        self, numbers: Numbers, function: Callable[..., Correlation], *names: str, least: int = _FEWEST
    ) -> Number:
        """Return what a function of columns over models gives, with its interval, and in the null models: columns of
        quantities, ln sizes, the score. NaN of fewer models, and where one has no value."""
        arrays = [numbers.array("measured", quantity=name) if name in LABELS else numbers.array(name) for name in names]
        correlations = []
        for init in [TRAINED, *numbers.nulls]:
            columns = [torch.tensor(mean_of(at_init(array, init)).values.astype(float)) for array in arrays]
            columns = [x.log() if name in SIZES else x for name, x in zip(names, columns, strict=True)]
            defined = len(columns[0]) >= least and all(bool(x.isfinite().all()) for x in columns)
            correlations.append(function(*columns) if defined else (np.nan, np.nan, np.nan))
        (value, low, high), *nulls = correlations
        return Number(value, low, high, grouped(numbers.nulls, [null[0] for null in nulls]))

    def r(self, numbers: Numbers, name: str) -> Number:
        """Return Pearson's r over models of a quantity, or of ln size, with the score, with Fisher's interval."""
        return self._over_models(numbers, correlation, name, "score")

    def given_sizes(self, numbers: Numbers, name: str) -> Number:
        """Return the correlation of a quantity with the score given ln d_model and ln parameters; NaN where all models
        have the same."""

        def partial(x: Tensor, y: Tensor, *controls: Tensor) -> Correlation:
            stacked = torch.stack(controls, 1)
            varied = bool((stacked != stacked[0]).any())
            return partial_correlation(x, y, stacked) if varied else Correlation(np.nan, np.nan, np.nan)

        return self._over_models(numbers, partial, name, "score", *_CONTROLS, least=_FEWEST + len(_CONTROLS))

    def excess(self, numbers: Numbers, size: str) -> Number:
        """Return |r| of coupling less |r| of ln size, both with the score, with Zou's interval."""

        def more(x: Tensor, z: Tensor, y: Tensor) -> Correlation:
            return correlation_excess(correlation(x, y), correlation(z, y), float(pearson(x, z)))

        return self._over_models(numbers, more, "coupling", size, "score")

    def not_computed(self, numbers: Numbers) -> list[str]:
        """Return what takes more models, or models of several sizes."""
        n = numbers.data.sizes["model_name"]
        held = "the correlation given width and size"
        fewest = _FEWEST + len(_CONTROLS)
        needed = {"the correlation": _FEWEST, held: fewest}
        missing = [f"{what} (needs {least} models, {n} given)" for what, least in needed.items() if n < least]
        alike = all(len(set(numbers.data[name].values.tolist())) == 1 for name in _CONTROLS)
        return missing + ([f"{held} (all models have the same)"] if alike and n >= fewest else [])

    def findings(self, numbers: Numbers) -> list[str]:
        sentences = []
        if r := self.r(numbers, "coupling"):
            r_given_sizes = self.given_sizes(numbers, "coupling")
            held = f"; given width and size {r_given_sizes:.3f}" if r_given_sizes else ""
            n_models = numbers.data.sizes["model_name"]
            sentences.append(
                f"Top-{self.k} coupling and {self.score} correlate at r = {r:.3f} over {n_models} models{held}."
            )
            excesses = {size: self.excess(numbers, size) for size in SIZES}
            if not any(excesses.values()):
                sentences.append("Nothing is compared with: all models have one width, depth and number of parameters.")
            for size, excess in excesses.items():
                if excess:
                    verb = "beats" if excess.low > 0 else "is beaten by" if excess.high < 0 else "is not told from"
                    sentences.append(
                        f"{_SIZE_WORDS[size].capitalize()} correlates with {self.score} at r = "
                        f"{self.r(numbers, size).with_interval:.2f}: coupling {verb} it, |r| of "
                        f"coupling {excess:+.2f}."
                    )
        if missing := self.not_computed(numbers):
            sentences.append(f"Not computed: {'; '.join(missing)}.")
        frobenius, trace = (numbers.data["width_coupling"].sel(norm=norm).values for norm in NORMS)
        widths, bound = numbers.data["width"].values, format_bound(abs(frobenius).tolist())
        sentences.append(
            f"Warning: independent random Jacobians of width {widths[0]} to {widths[-1]} have a trace-normalised "
            f"coupling of {trace[0]:.2f} to {trace[-1]:.2f}, which 1/sqrt(width) explains with R² "
            f"{float(numbers('width_r2', norm='trace')):.4f}; Frobenius stays within {bound} of 0."
        )
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a quantity: its correlation with the score, as it is and given width and size; of a size, how
        much coupling's is more."""
        nothing = [Number(np.nan)]
        columns = {
            "r": [self.r(numbers, name) for name in (*LABELS, *SIZES)],
            "given size": [self.given_sizes(numbers, name) for name in LABELS] + nothing * len(SIZES),
            "excess": nothing * len(LABELS) + [self.excess(numbers, size) for size in SIZES],
        }
        cells = {
            name: [f"{number.with_interval:.3f}" if number else "-" for number in column]
            for name, column in columns.items()
        }
        return pd.DataFrame({"quantity": [*LABELS, *(f"ln {name}" for name in SIZES)], **cells})


def coupling_scores(
    scores: str | os.PathLike | pd.DataFrame,
    prompts: Any,
    *,
    score: str = "score",
    k: int = 10,
    widths: Sequence[int] = WIDTHS,
    tokenizer: str | os.PathLike | None = None,
    backend: BackendChoice | str = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    length: int | None = None,
    n_prompts: int | None = None,
    consecutive: bool = False,
    seed: int = 0,
    nulls: Nulls = 1,
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    r"""r(quantity, score) over models or checkpoints, beside r(ln size, score) and given ln d_model and ln parameters.

    The quantities are coupling, its trace normalisation, line-shape score, expodistance and R^2 of growth. The sizes
    are ln d_model, ln n_layers and ln parameters; how much more coupling correlates than each has an interval of its
    own, as both are of the same scores. Width and size are held fixed because they can make the whole correlation: at a
    K that grows with d_model the trace normalisation gives 1 - 1/sqrt(K) for random Jacobians (part of the result), and
    wider models score higher for reasons that have nothing to do with coupling. The nulls: random inits of the same
    shapes, and models of shuffled weights, against the same scores.

    Args:
        scores: CSV file or table. Columns: model (a name, a directory or "mini", as `load_model` takes), the score, and
            if wanted d_model, n_layers and parameters, which else are counted in the model.
        prompts: a text, or a list of texts: every model reads them with its own tokenizer, one model at a time.
        score: column of `scores`.
        tokenizer: for checkpoints without one: a directory with the tokenizer of all, or "mini".
        k: number of top singular vectors.
        backend, dtype, device: as in `load_model`; float32 at least where no dtype is given.
        length, n_prompts, consecutive, seed: as in `analyze`.
        nulls: as in `analyze`; everything is repeated on shuffled weights too.
        widths: of the random Jacobians.
        keep: directory for finished models, as in `analyze`.

    Raises:
        InputError: a table that is not there or cannot be read, a missing column, a model named twice or not named, a
            score or size that is not a number (with its line in the file), unusable prompts.
        ModelError: a model that cannot be loaded.

    Source: the correlation, and that it is above those of the sizes, are of Aubry, Meng, Sugolov and Papyan, arXiv
    2407.07810; the rest is ours.
    """
    require("tokenizer", tokenizer, str | os.PathLike | None)
    measure = CouplingScores(k=k, score=score, widths=widths)
    table, nulls, seed = score_table(scores, score), seeds_by_kind(nulls), check_seed(seed)
    check_counts(length, n_prompts)
    random = width_alone(widths)
    by_width = xr.Dataset(
        {"width_coupling": (("norm", "width"), random.coupling.numpy()), "width_r2": ("norm", random.r2.numpy())},
        {"norm": list(NORMS), "width": list(widths)},
    )
    cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
    cut |= {"seed": seed, "nulls": nulls}
    names = tqdm(table["model"], desc="coupling against scores", unit="model", disable=not progress)
    with Parts.kept_in(keep) as parts:
        models = (Pretrained(name, backend, dtype, device, tokenizer=tokenizer) for name in names)
        results = [Coupling(k=k)(model, prompts, keep=parts, progress=False, **cut) for model in models]

    def measured(result: Result, init: str) -> dict[str, Number]:
        numbers = Numbers(result.measure, result.sel(init=init))
        return {name: numbers("coupling", version=name) if name == "trace" else numbers(name) for name in LABELS}

    sizes = pd.DataFrame([result.trained.attrs for result in results], columns=list(SIZES))
    sides = {
        init: dataset_of(table, [measured(result, init) for result in results], sizes, score)
        for init in (TRAINED, *results[0].numbers.nulls)
    }
    sides[TRAINED] = sides[TRAINED].merge(by_width, combine_attrs="override")
    label = counted(len(table), "model")
    dataset = joined(measure, sides, [label, *map(null_label, results[0].numbers.nulls)])
    shared = {name: results[-1].provenance[name] for name in _SHARED if name in results[-1].provenance}
    shared |= text_provenance(prompts, length, n_prompts, consecutive)
    settings = {"model": label, "models": table["model"].tolist(), "score": score, "k": k, "options": measure.options()}
    return Result(measure, dataset, shared | settings)


def dataset_of(
    table: pd.DataFrame, measured: Sequence[Mapping[str, Number]], sizes: pd.DataFrame, score: str
) -> xr.Dataset:
    """Return the quantities of all models, their scores and sizes; sizes in the table count before the models' own."""
    size_columns = {name: (table if name in table else sizes)[name].to_numpy(float) for name in SIZES}
    values = [[[getattr(numbers[name], end) for numbers in measured] for name in LABELS] for end in ENDS]
    short = [Path(name).name for name in table["model"]]
    names = short if len(set(short)) == len(short) else table["model"].tolist()
    columns = {"score": table[score].to_numpy(float), **size_columns}
    arrays = {"measured": (("end", "quantity", "model_name"), values)}
    arrays |= {name: ("model_name", column) for name, column in columns.items()}
    return xr.Dataset(arrays, {"model_name": names, "quantity": list(LABELS), "end": list(ENDS)})


def score_table(scores: str | os.PathLike | pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """Return the table of models and scores with checked numbers; InputError with the line in the file where a model
    is named twice or not at all, or a number is none."""
    require("scores", scores, str | os.PathLike | pd.DataFrame)
    require("score", score, str)
    if isinstance(scores, pd.DataFrame):
        table, where = scores.reset_index(drop=True), "the score table"
    else:
        if not Path(scores).is_file():
            raise InputError(f"{scores}: no such file; give a CSV with columns model and score")
        try:
            # blank lines are kept at first, so that every row knows its line
            cells = pd.read_csv(scores, dtype=str, keep_default_na=False, skip_blank_lines=False, skipinitialspace=True)
        except (ValueError, OSError) as error:
            raise InputError(f"{scores}: not a CSV table ({str(error).strip()})") from error
        if not isinstance(cells.index, pd.RangeIndex):  # pandas makes surplus leading cells the index
            raise InputError(f"{scores}: rows have more cells than there are columns; name every column")
        table, where = pd.DataFrame(cells[(cells != "").any(axis=1)]), str(scores)
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
