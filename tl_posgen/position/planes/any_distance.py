"""What RoPE could do and training did not: any function of distance, exactly, and what a model's own planes reach."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen import registry
from tl_posgen.collector import Variable
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.feed import one_pass
from tl_posgen.measure import Measure, Request
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.model import Model
from tl_posgen.models.tokens import to_prompts
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.position.distance.distance_table import distance_table
from tl_posgen.position.planes.inverse_dft import fit_frequencies, head_for_table
from tl_posgen.position.planes.planes import require_rope
from tl_posgen.procedure import Job
from tl_posgen.report.figures import COLOURS, Panels, finish, head_names, line, model_label, sides
from tl_posgen.report.sentences import beside, said
from tl_posgen.result import Result
from tl_posgen.rope.rotation import complex_frequencies, complex_planes
from tl_posgen.summary import Summary

INVERSE_DFT = "inverse DFT"
RCONDS = (1e-12, 1e-2)  # the best fit, whatever its logits, and one whose planes hardly cancel
Table = Float[Tensor, "query_token key_token distance"]

MOST = 2**12  # distances: the head by inverse DFT has half as many planes


@dataclass(frozen=True)
class AnyDistance(Options):
    r"""score(a, b, d) = F(a, b, d) for any F on d < N: with planes at theta_m = 2 pi m / N exactly, with a model's own
    frequencies as near as least squares gets; beside it how additive the model's heads are.

    So the architecture allows scores that entangle distance and content; that trained heads do not is learned. A fit
    with the model's own frequencies gives every token pair its own coefficients, so it is the nearest that the geometry
    allows; a head has one vector per token, which allows less. A row per (function, planes): planes are "inverse DFT",
    or those of a set of layers and an rcond. The null has only the heads.

    Args:
        n_distances: N.
        functions: name -> F, [distance] or [query_token, key_token, distance]; those of `example_functions`, drawn with
            `seed`, if left out. All on N distances.
        rconds: of the fits, see `fit_frequencies`: a larger one has a larger error and smaller logits.

    `layers` chooses whose frequencies are fitted, and whose heads are set beside; layers with the same frequencies are
    one. `heads` chooses among the heads alone.

    Raises:
        InputError: unusable prompts or functions, no rcond.
        UnsupportedModelError: a model without RoPE in the chosen layers.

    Source: that an inverse Fourier transform makes RoPE universal is argued by Han & Ji 2025 (arXiv 2503.13305); the
    construction, the fits and the comparison are our reconstruction.

    Example:
        >>> from tl_posgen.position.planes import any_distance
        >>> text = "Down, down, down. Would the fall never end?"
        >>> found = any_distance("mini", text, length=12, n_prompts=1, n_distances=16, null_seeds=(), progress=False)
        >>> bool((found.dataset["error"].sel(planes="inverse DFT") < 1e-6).all())
        True
    """

    n_distances: int = 64
    functions: Mapping[str, Tensor] | None = None
    rconds: Sequence[float] = RCONDS

    def check(self) -> None:
        check_whole("any_distance", 2, MOST, n_distances=self.n_distances)
        if not len(self.rconds) or not all(0 < rcond < 1 for rcond in self.rconds):
            raise InputError(
                f"any_distance: rconds={self.rconds!r}: give one at least, each between 0 and 1, such as (1e-12, 1e-2)"
            )
        self.tables(seed=0)

    def tables(self, seed: int) -> dict[str, Table]:
        """The functions as tables; InputError for one that is none."""
        functions = example_functions(self.n_distances, seed) if self.functions is None else self.functions
        if not isinstance(functions, Mapping) or not functions:
            raise InputError("functions: give name -> values of one function at least, or leave them out")
        return {str(name): as_table(str(name), values, self.n_distances) for name, values in functions.items()}


def example_functions(n_distances: int, seed: int, n_tokens: int = 8) -> dict[str, Tensor]:
    """A step, a spike, a sawtooth, noise, and noise of its own for every pair of tokens: as entangled as can be."""
    distance = torch.arange(n_distances, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    period = max(2, n_distances // 8)
    return {
        "step": (distance < n_distances // 2).double(),
        "spike": (distance == n_distances // 4).double(),
        "sawtooth": (distance % period) / period,
        "noise": torch.randn(n_distances, generator=generator, dtype=torch.float64),
        "token pairs": torch.randn(n_tokens, n_tokens, n_distances, generator=generator, dtype=torch.float64),
    }


def as_table(name: str, values: Any, n_distances: int) -> Table:
    """A function of distance is a table of one query and one key token."""
    if not isinstance(values, Tensor) or values.is_complex():
        raise InputError(f"function {name!r} is {values!r}: give a tensor of {n_distances} real values, one a distance")
    if values.ndim not in (1, 3) or values.shape[-1] != n_distances or not values.numel():
        raise InputError(
            f"function {name!r} of shape {tuple(values.shape)}: give [{n_distances}] values, one a distance, or "
            f"[query_token, key_token, {n_distances}]"
        )
    table = values.double().reshape(-1, 1, n_distances) if values.ndim == 1 else values.double()
    if not bool(table.isfinite().all()) or float(table.std(correction=0)) == 0:
        raise InputError(f"function {name!r}: its values must be finite and not all the same")
    return table


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, AnyDistance)
    frequencies = own_frequencies(model, job.layers)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)
    job.plan(len(tokens))
    scores = built(options.tables(job.seed), frequencies, options.rconds)
    variance = registry.request_of(Variance(n_distances=options.n_distances))
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads, "seed": job.seed}

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        found = one_pass(other, tokens, [variance], label=label, **where)["variance"]
        heads = xr.Dataset({"head_additive_r": (1 - found["interaction"]) ** 0.5}, attrs={"model": label})
        if other is not model:
            return heads
        attrs = {"rows": ["function", "planes"], "n_distances": options.n_distances, "model": label}
        return scores.merge(heads).assign_attrs(attrs)

    return job.result(request, model, tokens, of_model)


def own_frequencies(model: Model, layers: Sequence[int] | None) -> dict[str, Float[Tensor, " plane"]]:
    """'layers 0, 1, 2' -> their frequencies, zeros for what is not rotated; layers without RoPE are passed over."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for geometry in geometry_of(model, layers):
        if geometry.rope.rotary_dim:
            theta = tuple(complex_frequencies(geometry.rope, geometry.d_head).tolist())
            groups.setdefault(theta, []).append(geometry.layer)
    if not groups:
        raise UnsupportedModelError("any_distance: no chosen layer has RoPE, so there are no frequencies to fit with")
    return {layer_names(layers): torch.tensor(theta, dtype=torch.float64) for theta, layers in groups.items()}


def layer_names(layers: Sequence[int]) -> str:
    """'layers 0 to 4' for a run, 'layers 0, 2, 4' otherwise."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return ("layers " if len(layers) > 1 else "layer ") + ", ".join(map(str, layers))


def built(tables: Mapping[str, Table], frequencies: Mapping[str, Tensor], rconds: Sequence[float]) -> xr.Dataset:
    """Every function by inverse DFT and with each set of frequencies: errors, logits, and the first pair's curve."""
    functions: list[xr.Dataset] = []
    for name, table in tables.items():
        kinds = {INVERSE_DFT: exact_scores(table)}
        for (label, theta), rcond in product(frequencies.items(), rconds):
            fit = fit_frequencies(table, theta, rcond)
            kinds[f"{label}, rcond {rcond:g}"] = fit.fitted, float(fit.largest_logit.max()), len(theta)
        every, largest, n_planes = zip(*kinds.values(), strict=True)
        errors = [float((scores - table).square().mean().sqrt() / table.std(correction=0)) for scores in every]
        numbers = {"n_planes": n_planes, "error": errors, "largest_logit": largest}
        numbers |= {"largest_value": len(kinds) * [float(table.abs().max())], "additive_r": map(additive_r, every)}
        data: dict[str, Any] = {variable: ("planes", list(values)) for variable, values in numbers.items()}
        data["scores"] = (("planes", "distance"), torch.stack([scores[0, 0] for scores in every]).numpy())
        data["values"] = ("distance", table[0, 0].numpy())
        coords = {"function": name, "planes": list(kinds), "distance": range(table.shape[-1])}
        functions.append(xr.Dataset(data, coords))
    return xr.concat(functions, "function")


def exact_scores(table: Table) -> tuple[Table, float, int]:
    """The scores of the head made by inverse DFT, read off its queries and keys; its largest logit; its planes."""
    head = head_for_table(table)
    keys = head.k.expand(len(head.q), *head.k.shape)
    scores = distance_table(head.q, keys, head.rope, 1.0, torch.arange(table.shape[-1]))
    query, key = (complex_planes(x, head.rope).abs() for x in (head.q, head.k))
    return scores.mT, float((query @ key.mT).max()), len(head.rope.inv_freq)


def additive_r(table: Real[Tensor, "query_token key_token distance"]) -> float:
    """Correlation with the best f(q, d) + g(q, k), after the mean of each query is taken off, which softmax ignores."""
    centred = table.double() - table.double().mean((-2, -1), keepdim=True)
    left = centred - centred.mean(-1, keepdim=True) - centred.mean(-2, keepdim=True)
    return float(1 - left.square().sum() / centred.square().sum()) ** 0.5


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Of the null, which has only heads, their mean. `fit_*` are lists in the order of `fits`, `error_<function>` the
    error of the inverse DFT and those of the fits."""
    heads = {"head_additive_r": float(data["head_additive_r"].mean())}
    if "error" not in data:
        return heads
    exact, fits = data.sel(planes=INVERSE_DFT), data.drop_sel(planes=INVERSE_DFT)
    least = str(exact["additive_r"].idxmin().item())
    overshoot = fits["largest_logit"] / fits["largest_value"]
    return heads | {
        "n_functions": data.sizes["function"],
        "n_distances": int(data.attrs["n_distances"]),
        "exact_error": float(exact["error"].max()),
        "least_additive": least,
        "least_additive_r": float(exact["additive_r"].sel(function=least)),
        "least_additive_planes": int(exact["n_planes"].sel(function=least)),
        "fits": [str(planes) for planes in fits["planes"].values],
        "fit_planes": [int(n) for n in fits["n_planes"].max("function")],
        "fit_error_lowest": fits["error"].min("function").values.tolist(),
        "fit_error_highest": fits["error"].max("function").values.tolist(),
        "fit_overshoot": overshoot.max("function").values.tolist(),
        **{f"error_{name}": data["error"].sel(function=name).values.tolist() for name in data["function"].values},
    }


def findings(own: Summary, null: Any) -> list[str]:
    columns = ("fits", "fit_planes", "fit_error_lowest", "fit_error_highest", "fit_overshoot")
    fits = [
        f"With the model's own {n} planes ({name}) the relative error is {low:.2f} to {high:.2f}, with planes that add "
        f"up to as much as {overshoot:.2g} times the largest value."
        for name, n, low, high, overshoot in zip(*(own[column] for column in columns), strict=True)
    ]
    return [
        f"A head made by inverse DFT takes on each of {own['n_functions']} functions of {own['n_distances']} "
        f"distances, relative error at most {own['exact_error']:.0e}; for '{own['least_additive']}', which takes "
        f"{own['least_additive_planes']} planes, the correlation with f(q, d) + g(q, k) is "
        f"{own['least_additive_r']:.2f}.",
        *fits,
        f"Of the model's own heads that correlation is {beside(own, null, 'head_additive_r')}, mean over heads.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row per function and kind of planes, the first 20; of the null, which has only heads, a row per layer."""
    if "error" not in data:
        heads = data["head_additive_r"]
        return pd.DataFrame({"head_additive_r": heads.mean("head").to_series()}).reset_index().head(20)
    frame = data[["n_planes", "error", "largest_logit", "largest_value", "additive_r"]].to_dataframe().reset_index()
    # from 1e-15 to 1e9: three decimals would not do
    frame = frame.assign(**{name: frame[name].map("{:.2g}".format) for name in ("error", "largest_logit")})
    return frame.head(20)


def functions(result: Any) -> go.Figure:
    """Each function with the scores of the head made for it, and of the fits with the model's own frequencies."""
    data, summary = result.dataset, result.summary
    names = [str(name) for name in data["function"].values]
    errors = {name: ", ".join(said(error, ".2g") for error in summary[f"error_{name}"]) for name in names}
    look: dict[str, Any] = {"row_height": 130, "shared_xaxes": True, "vertical_spacing": 0.3 / len(names)}
    panels = Panels([f"{name}: errors {errors[name]}" for name in names], columns=1, **look)
    x = data["distance"].values
    for panel, name in enumerate(names):
        one = data.sel(function=name)
        panels.add(panel, line(x, one["values"].values, "the function", "black", width=5, opacity=0.25))
        for number, planes in enumerate(str(planes) for planes in data["planes"].values):
            look = {"mode": "lines+markers" if planes == INVERSE_DFT else "lines", "marker": {"size": 4}}
            look["hovertemplate"] = f"{planes}, distance %{{x}}: %{{y:.3f}}<extra></extra>"
            scores = one["scores"].sel(planes=planes).values
            panels.add(panel, line(x, scores, planes, COLOURS[number % len(COLOURS)], width=1.5, **look))
    panels.axes("distance").figure.update_annotations(font_size=11)
    panels.figure.update_layout(legend={"orientation": "h", "y": -0.06, "x": 0})
    subtitle = (
        "errors in the order of the legend, relative to the function's standard deviation; fits with the model's own "
        "frequencies, the larger rcond with smaller logits; of token pairs the first is drawn"
    )
    return panels.finish(f"RoPE can take on any function of distance · {model_label(data)}", subtitle)


def heads(result: Any) -> go.Figure:
    """How near each head's scores are to f(q, d) + g(q, k), beside the least additive of the functions."""
    figure, summary = go.Figure(), result.summary
    for side, data, colour in sides(result):
        values = data["head_additive_r"].to_series().dropna()
        box = go.Box(x=values.values, name=side, boxpoints="all", pointpos=0, jitter=0.6, fillcolor="rgba(0,0,0,0)")
        box.update(marker={"color": colour, "size": 6}, line={"width": 1}, text=head_names(values.index))
        figure.add_trace(box.update(hovertemplate="%{text}: %{x:.3f}<extra></extra>", showlegend=False))
    name = f"made by {INVERSE_DFT}:<br>{summary['least_additive']}"
    marker = {"symbol": "star", "size": 13, "color": COLOURS[1]}
    point = go.Scatter(x=[summary["least_additive_r"]], y=[name], mode="markers", marker=marker, showlegend=False)
    figure.add_trace(point.update(hovertemplate="%{x:.3f}<extra></extra>"))
    figure.update_xaxes(title_text="correlation of the scores with the best f(q, d) + g(q, k)", range=[0, 1.02])
    figure.update_yaxes(autorange="reversed")
    subtitle = "a point a head, over all (query, key, distance); below, the least additive of the functions"
    title = f"What was learned instead · {model_label(result.dataset)}"
    return finish(figure, title, subtitle).update_layout(margin={"l": 150})


ROW = ("function", "planes")
LARGEST = "largest sum_m |z^q_m z^k_m| of a token pair; far above |F|: planes that cancel"
VARIABLES = {
    "n_planes": Variable("planes", description="how many planes the head has", dims=ROW),
    "error": Variable("relative error", "", "root mean square, over the function's standard deviation", ROW),
    "largest_logit": Variable("largest logit", "logits", LARGEST, ROW),
    "largest_value": Variable("largest value", "logits", "of |F|", ROW),
    "additive_r": Variable("additive r", description="corr of the scores with the best f(q, d) + g(q, k)", dims=ROW),
    "scores": Variable("scores", "logits", "of the first token pair", (*ROW, "distance")),
    "values": Variable("the function", "logits", "F of the first token pair", ("function", "distance")),
    "head_additive_r": Variable("additive r of the model's heads", "", "sqrt(1 - kd - qkd), first token left out"),
}

MEASURE = Measure(
    name="any_distance",
    question="Could RoPE entangle position and content?",
    explanation=(
        "Planes at the frequencies 2 pi m / N give a head any function of distance, even one of its own for every pair "
        "of tokens. So what the architecture allows is set against the best fit with the model's own frequencies, and "
        "against what its heads have learned: scores that are nearly f(q, d) + g(q, k)."
    ),
    source="the argument: Han & Ji 2025 (arXiv 2503.13305); construction, fits and comparison: our reconstruction",
    options=AnyDistance,
    procedure=run,
    requires=require_rope,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"functions": functions, "heads": heads},
    table=table,
    legend=(
        "error: root mean square over the function's standard deviation; largest_logit: what the fit needs; "
        "additive_r: of the fit's scores."
    ),
)
