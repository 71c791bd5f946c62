"""Coupling across models against a score, with what the models' width and size explain taken out."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from tqdm.auto import tqdm

from tl_posgen.collector import Variable
from tl_posgen.coupling.coupling import HEADLINES
from tl_posgen.coupling.coupling import MEASURE as COUPLING
from tl_posgen.coupling.coupling_figures import sides_with_summary
from tl_posgen.coupling.overlap import NORMS, width_alone
from tl_posgen.coupling.score_table import CONTROLS, score_table
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.provenance import null_label
from tl_posgen.null import check_seeds
from tl_posgen.options import require
from tl_posgen.parts import Parts
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, SCALE, Panels, finish, line, model_label
from tl_posgen.report.intervals import ENDS, error_bars, with_ends
from tl_posgen.report.sentences import at_most, null_of, with_interval
from tl_posgen.result import Result
from tl_posgen.stats.partial_correlation import correlation, partial_correlation, regression_line, unexplained
from tl_posgen.summary import NullSummary, Summary

LABELS = {
    "coupling": "coupling (Frobenius)",
    "trace": "coupling, trace normalisation",
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_r2": "R² of exponential growth",
}
NORM_WORDS = {"frobenius": "Frobenius", "trace": "trace normalisation"}
FEWEST = 4  # rows for an interval of r; each control needs one more
WIDTHS = (64, 128, 256, 512)  # of the random Jacobians that the warning is shown on
NAMED_UP_TO = 12  # models whose points carry their name


def coupling_scores(
    scores: str | os.PathLike | pd.DataFrame,
    prompts: Any,
    *,
    score: str = "score",
    tokenizer: str | os.PathLike | None = None,
    k: int = 10,
    backend: BackendChoice | str = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    length: int | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    widths: Sequence[int] = WIDTHS,
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    r"""r(measure, score) over models or checkpoints, and the same given ln d_model and ln parameters.

    The measures are coupling, its trace normalisation, line-shape score, expodistance and R^2 of growth. Width and size
    are held fixed because they can make the whole correlation: at a K that grows with d_model the trace normalisation
    gives 1 - 1/sqrt(K) for random Jacobians (`width_alone`, part of the result), and wider models score higher for
    reasons that have nothing to do with coupling. The null: randomly initialised models of the same shapes, against the
    same scores.

    Args:
        scores: CSV file or table. Columns: model (a name, a directory or "mini", as `load_model` takes), the score, and
            if wanted d_model and parameters, which else are counted in the model.
        prompts: a text, or a list of texts: every model reads them with its own tokenizer, one model at a time.
        score: column of `scores`.
        tokenizer: for checkpoints without one: a directory with the tokenizer of all, or "mini".
        k: number of top singular vectors.
        backend, dtype, device: as in `load_model`; float32 at least where no dtype is given.
        length, n_prompts, seed, null_seeds: as in `analyze`.
        widths: of the random Jacobians.
        keep: directory for finished models, as in `analyze`.

    Raises:
        InputError: a table that is not there or cannot be read, a missing column, a model named twice or not named, a
            score or size that is not a number (with its line in the file), unusable prompts.
        ModelError: a model that cannot be loaded.

    Source: the correlation is that of Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810; the controls are ours.
    """
    require("tokenizer", tokenizer, str | os.PathLike | None)
    require("k", k, int)
    require("widths", widths, Sequence[int])
    if not len(widths):
        raise InputError(f"widths = {widths!r}: give one at least, such as {WIDTHS}")
    table, null_seeds = score_table(scores, score), check_seeds(null_seeds)
    by_width = of_random_jacobians(widths)
    rows: list[list[dict[str, float]]] = [[] for _ in range(1 + len(null_seeds))]
    provenance: dict[str, Any] = {}
    cut = {"length": length, "n_prompts": n_prompts, "seed": seed, "null_seeds": null_seeds}
    with Parts.of(keep) as parts:
        for name in tqdm(table["model"], desc="coupling against scores", unit="model", disable=not progress):
            model = Pretrained(name, backend, dtype, device, tokenizer=tokenizer)
            found = COUPLING(model, prompts, k=k, keep=parts, progress=False, **cut)
            nulls = found.null_summary.seeds if found.null_summary else []
            for side, summary in zip(rows, [found.summary, *nulls], strict=True):
                side.append(
                    {name: summary[name] for name in (*(h + end for h in HEADLINES for end in ENDS), *CONTROLS)}
                )
            provenance = dict(found.provenance)
    kept = ("backend", "dtype", "length", "prompts", "seed", "null_seeds", "versions")
    label = f"{len(table)} models"
    known = {name: provenance[name] for name in kept} | {"model": label, "models": table["model"].tolist()}
    own, *nulls = (
        MEASURE.describe(correlated(table, pd.DataFrame(side), score).merge(by_width).assign_attrs(k=k, model=name))
        for side, name in zip(rows, [label, *map(null_label, null_seeds)], strict=True)
    )
    return Result("coupling_scores", own, tuple(nulls), known | {"score": score, "k": k})


def correlated(table: pd.DataFrame, measured: pd.DataFrame, score: str) -> xr.Dataset:
    """The measures of all models against the score, as they are and given the controls."""
    sizes = {name: (table if name in table else measured)[name].to_numpy(float) for name in CONTROLS}
    columns = {name: measured[name].to_numpy(float) for name in measured if name not in CONTROLS}
    y = table[score].to_numpy(float)
    short = [Path(name).name for name in table["model"]]
    coords = {"model": short if len(set(short)) == len(short) else table["model"].tolist(), "measure": list(LABELS)}
    data: dict[str, Any] = {name: ("model", values) for name, values in (columns | sizes | {"score": y}).items()}
    controls = torch.from_numpy(np.log(np.stack(list(sizes.values()), axis=1)))
    found = [against(torch.tensor(columns[name]), torch.tensor(y), controls) for name in LABELS]
    data |= {name: ("measure", [numbers[name] for numbers in found]) for name in found[0]}
    both = torch.from_numpy(np.stack([*(columns[name] for name in LABELS), y], axis=1))
    enough = len(y) > 1 + len(CONTROLS) and vary(controls)
    rest = unexplained(both, controls).numpy() if enough else np.full(both.shape, np.nan)
    data |= {"rest": (("model", "measure"), rest[:, :-1]), "rest_score": ("model", rest[:, -1])}
    attrs = {"rows": "model", "score": score, "not_computed": not_computed(len(y), vary(controls))}
    return xr.Dataset(data, coords, attrs)


def against(x: torch.Tensor, y: torch.Tensor, controls: torch.Tensor) -> dict[str, float]:
    """r and its line where there are enough rows, and r given the controls where these vary."""
    numbers: dict[str, float] = dict.fromkeys(OVER_MEASURE, np.nan)
    if len(x) >= FEWEST:
        plain, fitted = correlation(x, y), regression_line(x, y)
        numbers |= {"r": plain.r, "r_low": plain.low, "r_high": plain.high}
        numbers |= {"slope": fitted.slope, "intercept": fitted.intercept, "r2": fitted.r2}
    if len(x) >= FEWEST + len(CONTROLS) and vary(controls):
        held = partial_correlation(x, y, controls)
        numbers |= {"partial_r": held.r, "partial_r_low": held.low, "partial_r_high": held.high}
    return numbers


def vary(controls: torch.Tensor) -> bool:
    return bool((controls != controls[0]).any())


def not_computed(n: int, varied: bool) -> str:
    """What is NaN as there are too few models, or all have one size; "" for nothing."""
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST + len(CONTROLS)}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= fewest[held]:
        missing.append(f"{held} (all models have the same)")
    return "; ".join(missing)


def of_random_jacobians(widths: Sequence[int]) -> xr.Dataset:
    """Coupling of independent random Jacobians by width, labelled."""
    found = width_alone(widths)
    k, r2 = ("width", found.k.numpy()), ("norm", found.r2.numpy())
    arrays = {"width_coupling": (("norm", "width"), found.coupling.numpy()), "width_r2": r2, "width_k": k}
    data = xr.Dataset(arrays, {"norm": list(NORMS), "width": list(widths)})
    return data.assign(one_minus_inverse_root_k=1 - data["width_k"] ** -0.5)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """<measure>_r and more of every measure, and what random Jacobians show: width_<norm>_first and so on."""
    numbers: dict[str, Any] = {name: data.attrs[name] for name in ("k", "score", "not_computed")}
    numbers |= {"k": int(numbers["k"]), "models": data.sizes["model"]}
    for measure in data["measure"].values:
        of_measure = data.sel(measure=measure)
        numbers |= {f"{measure}_{name}": float(of_measure[name]) for name in OVER_MEASURE}
    numbers |= {"width_first": int(data["width"][0]), "width_last": int(data["width"][-1])}
    numbers["width_per_k"] = int(data["width"][0] // data["width_k"][0])
    for norm in data["norm"].values:
        values = data["width_coupling"].sel(norm=norm)
        numbers |= {f"width_{norm}_first": float(values[0]), f"width_{norm}_last": float(values[-1])}
        numbers |= {f"width_{norm}_most": float(abs(values).max())}
        numbers |= {f"width_{norm}_r2": float(data["width_r2"].sel(norm=norm))}
    return numbers


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    sentences = []
    if not np.isnan(own["coupling_r"]):
        given = with_interval(own, "coupling_partial_r")
        held = "" if np.isnan(own["coupling_partial_r"]) else f"; given width and size {given}"
        sentences.append(
            f"Top-{own['k']} coupling and {own['score']} correlate at r = {with_interval(own, 'coupling_r')} "
            f"({null_of(null, 'coupling_r')}) over {own['models']} models{held}."
        )
    if own["not_computed"]:
        sentences.append(f"Not computed: {own['not_computed']}.")
    sentences.append(
        f"Warning: independent random Jacobians of width {own['width_first']} to {own['width_last']} have a "
        f"trace-normalised coupling of {own['width_trace_first']:.2f} to {own['width_trace_last']:.2f}, which "
        f"1/sqrt(width) explains with R² {own['width_trace_r2']:.4f}; Frobenius stays within "
        f"{at_most(own, 'width_frobenius_most')} of 0."
    )
    return sentences


def table_of(data: xr.Dataset) -> pd.DataFrame:
    """One row a measure: its correlation with the score, as it is and given width and size."""
    own = summarise(data)

    def interval(key: str) -> str:
        return "-" if np.isnan(own[key]) else with_interval(own, key)

    names = [str(name) for name in data["measure"].values]
    columns = {"r": [interval(f"{name}_r") for name in names]}
    columns["given size"] = [interval(f"{name}_partial_r") for name in names]
    return pd.DataFrame({"measure": names, **columns, "slope": data["slope"].values, "R²": data["r2"].values})


def drawn(data: xr.Dataset) -> list[str]:
    """Nothing is given size where there are too few models, or all have one size."""
    return [kind for kind in MEASURE.figures if kind != "given_size" or bool(data["rest_score"].notnull().any())]


def scatter(result: Result) -> go.Figure:
    """The score against every measure, a row each: a point a model, with the regression line."""

    def draw(data: xr.Dataset, measure: str) -> list[go.Scatter]:
        x, found = data[measure].values, data.sel(measure=measure)
        ends = np.array([x.min(), x.max()])
        y = float(found["intercept"]) + float(found["slope"]) * ends
        fitted = line(ends, y, "regression line", NULL_COLOUR, dash="dash", showlegend=False, hoverinfo="skip")
        return [points(data, x, data["score"].values).update(error_x=error_bars(data, measure)), fitted]

    own = result.summary
    subtitle = "a point a model, 95% interval over prompts; dashed: regression line"
    subtitle += f"; not computed: {own['not_computed']}" if own["not_computed"] else ""
    return by_measure(result, "r", draw, "{}", f"Coupling, straightness and growth against {own['score']}", subtitle)


def given_size(result: Result) -> go.Figure:
    """The same with what ln d_model and ln parameters explain taken out of both."""

    def draw(data: xr.Dataset, measure: str) -> list[go.Scatter]:
        return [points(data, data["rest"].sel(measure=measure).values, data["rest_score"].values)]

    own = result.summary
    missing = f"not computed: {own['not_computed']}" if own["not_computed"] else ""
    subtitle = missing or "what ln d_model and ln parameters leave of both"
    return by_measure(result, "partial_r", draw, "rest of {}", f"{own['score']} given size", subtitle)


def by_measure(result: Result, r: str, draw: Any, axis: str, title: str, subtitle: str) -> go.Figure:
    """A row of panels a measure, the null's beside the models', under their correlation."""
    shown = sides_with_summary(result)

    def told(own: Summary, key: str) -> str:
        return "r not defined" if np.isnan(own[key]) else f"r = {with_interval(own, key, '.2f')}"

    titles = [f"{side}: {told(own, f'{name}_{r}')}" for name in LABELS for side, _, own in shown]
    panels = Panels(titles, columns=len(shown), row_height=260, shared_yaxes="rows")
    for row, (name, label) in enumerate(LABELS.items()):
        for column, (_, data, own) in enumerate(shown):
            panels.add(row * len(shown) + column, *draw(data, name))
            top = f", top {own['k']}" if name in ("coupling", "trace") else ""
            panels.figure.update_xaxes(title_text=axis.format(f"{label}{top}"), row=row + 1, col=column + 1)
    panels.figure.update_yaxes(title_text=axis.format(result.summary["score"]), col=1)
    panels.figure.update_layout(coloraxis={"colorscale": SCALE, "colorbar": {"title": "log2 d", "thickness": 12}})
    return panels.finish(f"{title} · {model_label(result.dataset)}", subtitle)


def width(result: Result) -> go.Figure:
    """Random Jacobians alone, by width."""
    data, own, figure = result.dataset, result.summary, go.Figure()
    widths = data["width"].values
    for colour, norm in zip(COLOURS, data["norm"].values, strict=False):
        name = f"{NORM_WORDS[norm]} (R² against 1/√d: {own[f'width_{norm}_r2']:.4f})"
        figure.add_trace(line(widths, data["width_coupling"].sel(norm=norm).values, name, colour, mode="lines+markers"))
    figure.add_trace(line(widths, data["one_minus_inverse_root_k"].values, "1 - 1/√K", NULL_COLOUR, dash="dot"))
    figure.update_xaxes(title_text="d", type="log", tickvals=widths, ticktext=[str(width) for width in widths])
    figure.update_yaxes(title_text="coupling")
    share = own["width_per_k"]
    subtitle = f"independent Gaussian matrices, K = d/{share}: with the trace normalisation width alone makes coupling"
    return finish(figure, "Coupling of random Jacobians by width · no model", subtitle)


def points(data: xr.Dataset, x: np.ndarray, y: np.ndarray) -> go.Scatter:
    """A point a model, coloured by its width."""
    names = [str(name) for name in data["model"].values]
    found = go.Scatter(x=x, y=y, text=names, textposition="top center", textfont={"size": 10}, showlegend=False)
    found.update(mode="markers+text" if len(names) <= NAMED_UP_TO else "markers")
    found.update(marker={"color": np.log2(data["d_model"].values), "coloraxis": "coloraxis", "size": 9})
    return found.update(hovertemplate="%{text}: %{x:.3f}, %{y:.3f}<extra></extra>")


FISHER = "of Fisher's 95% interval over models"
OVER_MEASURE = {
    **with_ends("r", "correlation with the score", "", "Pearson's r over models", ("measure",), FISHER),
    **with_ends("partial_r", "correlation given size", "", "given ln d_model and ln parameters", ("measure",), FISHER),
    "slope": Variable("slope", "", "of the score against the measure", ("measure",)),
    "intercept": Variable("intercept", "", "of the score against the measure", ("measure",)),
    "r2": Variable("R²", "", "share of the score's variance that the measure explains", ("measure",)),
}
VARIABLES = {
    **{
        key: one
        for name in HEADLINES
        for key, one in with_ends(name, LABELS.get(name, name), "", "as in coupling", ("model",)).items()
    },
    "score": Variable("score", "", "column of the table", ("model",)),
    "d_model": Variable("width", "", "of the table, or counted in the model", ("model",)),
    "parameters": Variable("parameters", "", "of the table, or counted in the model", ("model",)),
    **OVER_MEASURE,
    "rest": Variable("rest of a measure", "", "what the controls leave", ("model", "measure")),
    "rest_score": Variable("rest of the score", "", "what the controls leave", ("model",)),
    "width_coupling": Variable("coupling of random Jacobians", "", "independent Gaussian", ("norm", "width")),
    "width_r2": Variable("R² against 1/sqrt(width)", "", "of the coupling of random Jacobians", ("norm",)),
    "width_k": Variable("K of random Jacobians", "", "a share of the width", ("width",)),
    "one_minus_inverse_root_k": Variable("1 - 1/sqrt(K)", "", "at each width", ("width",)),
}

MEASURE = Measure(
    name="coupling_scores",
    question="Does coupling go with a better model?",
    explanation=(
        "Correlation over models of coupling, straightness and growth with a score, as they are and given ln d_model "
        "and ln parameters. The control matters: with the trace normalisation and K proportional to the width, random "
        "Jacobians already couple by about 1 - 1/sqrt(K), so wider models look coupled."
    ),
    source="Aubry et al. 2024 (arXiv 2407.07810); the controls and the warning: ours",
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"scatter": scatter, "given_size": given_size, "width": width},
    drawn=drawn,
    table=table_of,
    legend="r with the score over models, 95% interval in brackets; given size: the same given width and parameters.",
)
