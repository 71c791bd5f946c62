"""Coupling across models against a score, beside width, depth and parameters, and with what these explain taken out."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core.engine import drawn
from tl_posgen.core.formatting import counted, format_bound
from tl_posgen.core.measure import ENDS, Measure, Variable
from tl_posgen.core.null_models import check_seeds
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers, intervals_of
from tl_posgen.core.options import Count, Each, require
from tl_posgen.core.result import Result, joined
from tl_posgen.core.store import Parts
from tl_posgen.coupling.coupling import Coupling
from tl_posgen.coupling.numbers.overlap import NORMS, width_alone
from tl_posgen.coupling.score_table import SIZES, score_table
from tl_posgen.errors import check_seed
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.provenance import null_label
from tl_posgen.models.tokens import check_counts
from tl_posgen.report.figures import MARKS, NULL_COLOUR, Panels, error_bars, line, model_label, plain, sides
from tl_posgen.report.kinds import lines
from tl_posgen.stats.correlations import (
    correlation,
    correlation_excess,
    partial_correlation,
    pearson,
    rank_correlation,
    ranks,
)

WIDTHS = (64, 128, 256, 512)  # of the random Jacobians that the warning is shown on
QUANTITIES: dict[str, tuple[str, dict[str, str]]] = {  # -> variable of `Coupling`, and its labels
    "coupling": ("coupling", {}),
    "trace": ("coupling", {"version": "trace"}),
    "signed": ("coupling", {"version": "signed"}),
    "swapped": ("coupling", {"bases": "swapped"}),
    "chance": ("chance", {}),
    **{name: (name, {}) for name in ("line_shape_score", "expodistance", "growth_r2")},
}
LABELS = {
    "coupling": "coupling (Frobenius)",
    "trace": "coupling, trace normalisation",
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_r2": "R² of exponential growth",
}
_CONTROLS = ("d_model", "parameters")  # held fixed
_FEWEST = 4  # models for an interval of r; each control needs one more
_BY = {"values": correlation, "ranks": rank_correlation}  # label -> correlation of two columns with its interval
_SHARED = ["backend", "dtype", "length", "prompts", "seed", "null_seeds", "shuffled_seeds", "versions"]
_WITHIN: dict[str, Any] = {"bounds": (-1, 1)}
_INTERVAL = "Fisher's 95% interval"
_SIZE = "of the table, or counted in the model"
_SIZE_WORDS = {"d_model": "width", "n_layers": "depth", "parameters": "parameters"}
_NORM_WORDS = {"frobenius": "Frobenius", "trace": "trace normalisation"}
_NAMED_UP_TO = 12  # models whose points carry their name


def _scatter(result: Any) -> go.Figure:
    """Draw the score against every quantity, a row each: a point a model, with the regression line."""
    shown, score = sides(result), plain(result.measure.score)
    titles = []
    for name, (side, data, _) in product(LABELS, shown):
        value, low, high = map(float, data["r"].sel(quantity=name, by="values").values)
        number = Number(value, low, high)
        titles.append(f"{side}: r = {number.with_interval:.2f}" if number else f"{side}: r not defined")
    panels = Panels(titles, columns=len(shown), row_height=260, shared_yaxes="rows")
    for place, ((name, label), (_, data, _)) in enumerate(product(LABELS.items(), shown)):
        found = intervals_of(data["measured"].sel(quantity=name))
        x, y, names = found["value"].values, data["score"].values, [plain(one) for one in data["model_name"].values]
        points = go.Scatter(x=x, y=y, text=names, textposition="top center", textfont={"size": 10}, showlegend=False)
        points.update(mode="markers+text" if len(names) <= _NAMED_UP_TO else "markers")
        points.update(marker={"color": np.log2(data["d_model"].values), "coloraxis": "coloraxis", "size": 9})
        points.update(hovertemplate="%{text}: %{x:.3f}, %{y:.3f}<extra></extra>")
        panels.add(place, points.update(error_x=error_bars(*(found[end].values for end in ENDS))))
        if len(x) >= _FEWEST and np.isfinite(x).all():
            ends = np.array([x.min(), x.max()])
            fitted = np.polyval(np.polyfit(x, y, 1), ends)
            panels.add(place, line(ends, fitted, "regression line", NULL_COLOUR, dash="dash", showlegend=False))
        row, column = divmod(place, len(shown))
        top = f", top {result.measure.k}" if name in ("coupling", "trace") else ""
        panels.figure.update_xaxes(title_text=f"{label}{top}", row=row + 1, col=column + 1)
    panels.figure.update_yaxes(title_text=score, col=1)
    panels.figure.update_layout(coloraxis={"colorscale": MARKS, "colorbar": {"title": "log2 d", "thickness": 12}})
    missing = result.own.attrs["not_computed"]
    subtitle = "a point a model, 95% interval over prompts; dashed: regression line"
    subtitle += f"; not computed: {missing}" if missing else ""
    title = f"Coupling, straightness and growth against {score} · {model_label(result.own)}"
    return panels.finish(title, subtitle)


@dataclass(frozen=True)
class CouplingScores(Measure):
    r"""r(quantity, score) over models or checkpoints, beside r(ln size, score) and given ln d_model and ln parameters.

    Correlation over models of coupling, straightness and growth with a score, as they are and given ln d_model and ln
    parameters; beside them that of width, depth and parameters, which coupling is said to beat, by values and by ranks.
    The control matters: with the trace normalisation and K proportional to the width, random Jacobians already couple
    by about 1 - 1/sqrt(K), so wider models look coupled.

    Made by `coupling_scores`.

    Args:
        k: number of top singular vectors.
        score: column of the table of scores.
        widths: of the random Jacobians.

    Source: that coupling correlates with a score, and more than width, depth and parameters do, is of Aubry, Meng,
    Sugolov and Papyan, arXiv 2407.07810; intervals, ranks, the test of the excess, controls and warning are ours.
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
        "r": Variable(
            "correlation with the score",
            "",
            f"over models, Pearson's r or Spearman's of ranks, {_INTERVAL}",
            ("by", "quantity", "end"),
            **_WITHIN,
        ),
        "size_r": Variable(
            "correlation of the size", "", "of ln size with the score, as r", ("by", "size", "end"), **_WITHIN
        ),
        "excess": Variable(
            "excess of coupling's correlation",
            "",
            "|r| of coupling less |r| of ln size, with the score, Zou's 95% interval",
            ("by", "size", "end"),
            **_WITHIN,
        ),
        "partial_r": Variable(
            "correlation given size",
            "",
            f"given ln d_model and ln parameters, {_INTERVAL}",
            ("quantity", "end"),
            **_WITHIN,
        ),
        "width_coupling": Variable("coupling of random Jacobians", "", "independent Gaussian", ("norm", "width")),
        "width_r2": Variable("R² against 1/sqrt(width)", "", "of the coupling of random Jacobians", ("norm",)),
    }
    legend = (
        "r with the score over models, ranks: of their ranks, 95% interval in brackets; given size: the same given "
        "width and parameters; excess: |r| of coupling less that of this size."
    )
    figures = {
        "scatter": _scatter,
        "width": lines(
            {"": [(words, "width_coupling", {"norm": norm}) for norm, words in _NORM_WORDS.items()]},
            "width",
            title="Coupling of random Jacobians by width",
            subtitle="independent Gaussian matrices, K a share of d: with the trace normalisation width makes coupling",
            x_title="d",
            y_title="coupling",
        ),
    }

    def usual(self) -> Mapping[str, Any]:
        return {"by": "values"}

    def findings(self, own: Numbers) -> list[str]:
        sentences = []
        if r := own("r", quantity="coupling"):
            given = own("partial_r", quantity="coupling")
            held = f"; given width and size {given.with_interval:.3f}" if given else ""
            n_models = own.data.sizes["model_name"]
            sentences.append(
                f"Top-{self.k} coupling and {self.score} correlate at r = {r:.3f} over {n_models} models{held}."
            )
            sentences += [self._comparison(own, by) for by in _BY]
        if own.attrs["not_computed"]:
            sentences.append(f"Not computed: {own.attrs['not_computed']}.")
        frobenius, trace = (own.data["width_coupling"].sel(norm=norm).values for norm in NORMS)
        widths, bound = own.data["width"].values, format_bound(abs(frobenius).tolist())
        sentences.append(
            f"Warning: independent random Jacobians of width {widths[0]} to {widths[-1]} have a trace-normalised "
            f"coupling of {trace[0]:.2f} to {trace[-1]:.2f}, which 1/sqrt(width) explains with R² "
            f"{float(own('width_r2', norm='trace')):.4f}; Frobenius stays within {bound} of 0."
        )
        return sentences

    def _comparison(self, own: Numbers, by: str) -> str:
        """Return the sentence that sets coupling's correlation beside those of the sizes."""
        excesses = {words: own("excess", size=size, by=by) for size, words in _SIZE_WORDS.items()}
        excesses = {words: one for words, one in excesses.items() if one}
        if not excesses:
            return f"By {by} nothing is compared with: all models have one width, depth and number of parameters."
        each = [
            f"{words} {own('size_r', size=size, by=by).with_interval:.2f} "
            f"(|r| of coupling {excesses[words].with_interval:+.2f})"
            for size, words in _SIZE_WORDS.items()
            if words in excesses
        ]
        parts: dict[str, list[str]] = {"beats": [], "is beaten by": [], "is not told from": []}
        for words, one in excesses.items():
            verb = "beats" if one.low > 0 else "is beaten by" if one.high < 0 else "is not told from"
            parts[verb].append(words)
        told = (f"{verb} {' and '.join(filter(None, [', '.join(p[:-1]), p[-1]]))}" for verb, p in parts.items() if p)
        r = own("r", quantity="coupling", by=by).with_interval
        return (
            f"By {by}, over {own.data.sizes['model_name']} models, {self.score} correlates with coupling at {r:.2f}, "
            f"with {', '.join(each)}: coupling {', '.join(told)}."
        )

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a quantity: its correlation with the score, as it is, of ranks, and given width and size; of a
        size, how much coupling's is more."""

        def cells(name: str, by: str | None = None) -> list[str]:
            at = {} if by is None else {"by": by}
            numbers = [own(name, quantity=quantity, **at) for quantity in LABELS]
            numbers += [own(f"size_{name}", size=size, **at) if name == "r" else Number(np.nan) for size in SIZES]
            return [f"{number.with_interval:.3f}" if number else "-" for number in numbers]

        columns = {"r": cells("r", "values"), "ranks": cells("r", "ranks"), "given size": cells("partial_r")}
        beside = [own("excess", size=size) for size in SIZES]
        columns["excess"] = ["-"] * len(LABELS) + [f"{one.with_interval:+.3f}" if one else "-" for one in beside]
        names = [*LABELS, *(f"ln {name}" for name in SIZES)]
        return pd.DataFrame({"quantity": names, **columns})


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
    null_seeds: Sequence[int] = (0,),
    shuffled_seeds: Sequence[int] | None = None,
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    r"""r(quantity, score) over models or checkpoints, beside r(ln size, score) and given ln d_model and ln parameters.

    The quantities are coupling, its trace normalisation, line-shape score, expodistance and R^2 of growth, beside them
    signed, swapped and chance coupling. The sizes are ln d_model, ln n_layers and ln parameters; how much more coupling
    correlates than each has an interval of its own, as both are of the same scores. Width and size are held fixed
    because they can make the whole correlation: at a K that grows with d_model the trace normalisation gives
    1 - 1/sqrt(K) for random Jacobians (part of the result), and wider models score higher for reasons that have nothing
    to do with coupling. The nulls: random inits of the same shapes, and models of shuffled weights, against the same
    scores.

    Args:
        scores: CSV file or table. Columns: model (a name, a directory or "mini", as `load_model` takes), the score, and
            if wanted d_model, n_layers and parameters, which else are counted in the model.
        prompts: a text, or a list of texts: every model reads them with its own tokenizer, one model at a time.
        score: column of `scores`.
        tokenizer: for checkpoints without one: a directory with the tokenizer of all, or "mini".
        k: number of top singular vectors.
        backend, dtype, device: as in `load_model`; float32 at least where no dtype is given.
        length, n_prompts, consecutive, seed, null_seeds: as in `analyze`.
        shuffled_seeds: of the models of shuffled weights; one beside random inits if left out, () for none.
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
    table, null_seeds, seed = score_table(scores, score), check_seeds(null_seeds), check_seed(seed)
    check_counts(length, n_prompts)
    random = width_alone(widths)
    by_width = xr.Dataset(
        {"width_coupling": (("norm", "width"), random.coupling.numpy()), "width_r2": ("norm", random.r2.numpy())},
        {"norm": list(NORMS), "width": list(widths)},
    )
    cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
    shuffled = null_seeds[:1] and [0] if shuffled_seeds is None else check_seeds(shuffled_seeds, "shuffled_seeds")
    cut |= {"seed": seed, "null_seeds": null_seeds, "shuffled_seeds": shuffled}
    names = tqdm(table["model"], desc="coupling against scores", unit="model", disable=not progress)
    with Parts.kept_in(keep) as parts:
        models = (Pretrained(name, backend, dtype, device, tokenizer=tokenizer) for name in names)
        each = [Coupling(k=k)(model, prompts, keep=parts, progress=False, **cut) for model in models]

    def measured(found: Result, init: str) -> dict[str, Number]:
        numbers = Numbers(found.measure, found.sel(init=init))
        return {quantity: numbers(variable, **at) for quantity, (variable, at) in QUANTITIES.items()}

    sizes = pd.DataFrame([found.own.attrs for found in each], columns=list(SIZES))
    sides = {
        init: dataset_of(table, [measured(found, init) for found in each], sizes, score)
        for init in (TRAINED, *each[0].numbers.nulls)
    }
    sides[TRAINED] = sides[TRAINED].merge(by_width, combine_attrs="override")
    label = counted(len(table), "model")
    dataset = joined(measure, sides, [label, *map(null_label, each[0].numbers.nulls)])
    shared = {name: each[-1].provenance[name] for name in _SHARED} | drawn(length, n_prompts, consecutive)
    own = {"model": label, "models": table["model"].tolist(), "score": score, "k": k, "options": measure.options()}
    return Result(measure, dataset, shared | own)


def dataset_of(
    table: pd.DataFrame, measured: Sequence[Mapping[str, Number]], sizes: pd.DataFrame, score: str
) -> xr.Dataset:
    """Return the quantities of all models, and their correlations with the score: of values, of ranks, given ln sizes;
    those of ln sizes, and the excess of coupling's over them.

    Where there are too few models, or all have one size, they are NaN; the attribute `not_computed` says which. Sizes
    in the table count before those of the models.
    """
    known = {name: (table if name in table else sizes)[name].to_numpy(float) for name in SIZES}
    values = np.array([[[getattr(one[name], end) for one in measured] for name in QUANTITIES] for end in ENDS])
    short = [Path(name).name for name in table["model"]]
    names = short if len(set(short)) == len(short) else table["model"].tolist()
    y, columns, n = torch.tensor(table[score].to_numpy(float)), torch.tensor(values[0]), len(table)
    logs = torch.tensor(np.log([known[name] for name in SIZES]))
    controls = logs[[SIZES.index(name) for name in _CONTROLS]].mT
    varied, fewest = bool((controls != controls[0]).any()), _FEWEST + len(_CONTROLS)

    def if_known(x: Tensor, ends: Callable[[], tuple[float, ...]], needed: int = _FEWEST) -> tuple[float, ...]:
        return ends() if n >= needed and bool(x.isfinite().all()) else (np.nan,) * len(ENDS)

    def excess(x: Tensor, z: Tensor, by: str) -> tuple[float, ...]:
        between = pearson(ranks(x), ranks(z)) if by == "ranks" else pearson(x, z)
        return correlation_excess(_BY[by](x, y), _BY[by](z, y), float(between))

    def with_score(rows: Tensor) -> list[list[tuple[float, ...]]]:
        return [[if_known(x, lambda x=x, r=r: r(x, y).ends) for x in rows] for r in _BY.values()]

    of_size, coupled = ("by", "size", "end"), columns[list(QUANTITIES).index("coupling")]
    given = [
        if_known(x, lambda x=x: partial_correlation(x, y, controls).ends, fewest if varied else n + 1) for x in columns
    ]
    more = [[if_known(coupled, lambda z=z, by=by: excess(coupled, z, by)) for z in logs] for by in _BY]
    held = "the correlation given width and size"
    needed = {"the correlation and its line": _FEWEST, held: fewest}
    missing = [f"{what} (needs {least} models, {n} given)" for what, least in needed.items() if n < least]
    missing += [f"{held} (all models have the same)"] if not varied and n >= fewest else []
    arrays: dict[str, Any] = {
        "measured": (("end", "quantity", "model_name"), values),
        **{name: ("model_name", column) for name, column in {"score": y.numpy(), **known}.items()},
        "r": (("by", "quantity", "end"), with_score(columns)),
        "partial_r": (("quantity", "end"), given),
        "size_r": (of_size, with_score(logs)),
        "excess": (of_size, more),
    }
    labels = {
        "model_name": names,
        "quantity": list(QUANTITIES),
        "end": list(ENDS),
        "by": list(_BY),
        "size": list(SIZES),
    }
    return xr.Dataset(arrays, labels, {"not_computed": "; ".join(missing)})
