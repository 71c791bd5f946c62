"""Coupling of residual Jacobians across layers, linearity and growth of the residual stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.coupling.coupling_figures import FIGURES, drawn, of_k
from tl_posgen.coupling.coupling_prompt import Settings, one_prompt
from tl_posgen.coupling.jacobians import DENSE_UP_TO, passes_of
from tl_posgen.coupling.path_tokens import TOKENS
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.selection import chosen
from tl_posgen.models.tokens import check_numbers
from tl_posgen.options import Options
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import beside, null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

OF_K = {  # headline -> what its mean is over
    "coupling": "ordered pairs of different layers",
    "chance": "layers and random bases",
    "signed": "ordered pairs of different layers, signed A",
    "chance_signed": "layers and random bases, signed A",
    "negative_share": "ordered pairs of different layers: negative diagonal entries of A",
    "trace": "ordered pairs of different layers, trace normalisation",
    "swapped": "ordered pairs of different layers, left in right singular vectors",
}
OF_PATHS = {
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_slope": "growth of ln |x| a layer",
    "growth_r2": "R² of growth",
}
HEADLINES = (*OF_K, *OF_PATHS, "linearisation")
BOUNDS: dict[str, tuple[float, float]] = dict.fromkeys(OF_K, (-np.inf, 1.0))  # 1 - |difference| / |A|
BOUNDS |= {"negative_share": (0.0, 1.0), "growth_r2": (0.0, 1.0)}
PER_PROMPT = (
    *OF_PATHS,
    *("log_norm", "log_norm_first", "log_norm_line", "trajectory", "trajectory_explained", "token_text"),
    *("linearisation", "triplet_residual"),
)
AVERAGED = (
    *("coupling", "coupling_signed", "coupling_trace", "coupling_swapped", "negative_share"),
    *("alignment", "alignment_swapped", "singular_value"),
)


@dataclass(frozen=True)
class Coupling(Options):
    r"""coupling = 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F over the top K singular vectors of two layers' Jacobians.

    J = d f^l(X)_t / d x_t is the residual Jacobian of one token of the block X + f^l(X), J2 = U2 S2 V2'. Frobenius with
    fixed K is the headline. Beside it: the chance line (random orthonormal bases, J1's own spectrum), the same of
    A = U2' J1 V2 with its signs and how many of its diagonal entries are negative, the trace normalisation (for
    comparison with the published figure only) and the swapped version V2' J1 U2. Line-shape score,
    expodistance and growth are of every token's path x^0 .. x^L, x^0 what enters the first block and x^L what leaves
    the last, before the final norm: with x^L left out the numbers differ. Intervals are 95% over prompts, Student's.

    The model must be float32 at least, its writing weights not centred.

    Args:
        k: numbers of top singular vectors, or one.
        tokens: positions whose own Jacobian is taken; "last", or several, counted from 0 or negative from the end.
        chance_samples: random bases per Jacobian for the chance line.
        dense_up_to: d_model up to which Jacobians are built as matrices.

    Raises:
        InputError: prompts of different lengths; a token or k that does not exist, heads chosen, weights processed by
            centring, half precision, fused kernels.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810, for coupling (its printed formula is signed, the authors'
    code takes |A|), line shape and growth; chance line, intervals, growth fit and linearisation check are ours.

    Example:
        >>> import tl_posgen
        >>> from tl_posgen.coupling import coupling
        >>> text = tl_posgen.models.tokens.bundled_text()
        >>> found = coupling("mini", text, length=16, n_prompts=1, k=4, null_seeds=(), progress=False)
        >>> found.dataset.coupling.sizes["layer_2"], 0 < found.summary["coupling"] < 0.2
        (4, True)
    """

    k: int | Sequence[int] = (10,)
    tokens: Literal["last"] | Sequence[int] = "last"
    chance_samples: int = 10
    dense_up_to: int = DENSE_UP_TO

    def check(self) -> None:
        check_ks(self)
        if not len(self.tokens):
            raise InputError("tokens is empty: give 'last' or a list of positions")


def ks_of(options: Any) -> list[int]:
    """Every k, smallest first."""
    k = options.k
    return sorted({int(one) for one in k}) if isinstance(k, Sequence | np.ndarray) else [int(k)]


def check_ks(options: Any) -> None:
    """Refuse options of a coupling, of layers or tokens, that cannot be."""
    if not (ks := ks_of(options)) or min(ks) < 1:
        raise InputError(f"k = {options.k!r}: give a number of singular vectors such as 10, or several")
    if options.chance_samples < 1:
        raise InputError(f"chance_samples = {options.chance_samples}: coupling needs its chance line; give 1 or more")
    if options.dense_up_to < 0:
        raise InputError(f"dense_up_to = {options.dense_up_to}: give a d_model, or 0 to build no matrix")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    assert isinstance(request.options, Coupling)
    refuse_heads(model, job)
    rows = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    asked = request.options.tokens
    tokens = [-1] if isinstance(asked, str) else [int(token) for token in asked]
    settings = chosen_of(model, rows.shape[1], request.options, tokens, job)
    job.plan(len(rows) * passes_of(rows.shape[1], settings.tokens))

    def of_model(model: Model, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        return measure(model, rows, settings, label)

    return job.result(request, model, list(rows), of_model)


def refuse_heads(model: Model, job: Job) -> None:
    if job.heads is not None:
        raise InputError("coupling is of whole blocks: leave heads out, and choose layers")
    check_numbers(model, job.length, job.n_prompts)


def chosen_of(model: Model, length: int, options: Any, tokens: Sequence[int], job: Job) -> Settings:
    """What is measured on every prompt; InputError for what this model and these prompts do not have."""
    layers, d_model, ks = chosen(job.layers, model.cfg.n_layers, "layer"), model.cfg.d_model, ks_of(options)
    for what, values, low, high in (("token", tokens, -length, length - 1), ("k", ks, 1, d_model)):
        if wrong := [value for value in values if not low <= value <= high]:
            raise InputError(f"{what} {wrong}: choose from {low} to {high}")
    positions = sorted({token % length for token in tokens})
    return Settings(layers, positions, ks, options.chance_samples, options.dense_up_to, job.seed)


def measure(model: Model, prompts: Int[Tensor, "prompt pos"], settings: Settings, label: str) -> xr.Dataset:
    """Every prompt through one model: per prompt, means over prompts, and their intervals."""
    number = pd.RangeIndex(len(prompts), name="prompt")
    found = xr.concat([one_prompt(model, prompt, settings) for prompt in prompts], number)
    assert isinstance(found, xr.Dataset)
    dataset = found[[name for name in PER_PROMPT if name in found]]
    dataset = dataset.assign(found[list(AVERAGED)].mean(["prompt", "token"])).assign(chance_line(found["chance"]))
    of_prompts = {"coupling": found["coupling"].mean("token")}
    of_prompts |= {f"mean_{name}": values for name, values in headlines(found).items()}
    for name, array in of_prompts.items():
        first, bounds = array.transpose("prompt", ...), BOUNDS.get(name.removeprefix("mean_"))
        dataset = dataset.assign(mean_and_ends(name, first.values, tuple(map(str, first.dims[1:])), bounds))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return dataset.assign_attrs(rows="k", model=label, d_model=model.cfg.d_model, parameters=n_parameters)


def headlines(found: xr.Dataset) -> dict[str, xr.DataArray]:
    """One number per prompt (and k) for each of `HEADLINES` that was measured."""
    sources = {"coupling": "coupling", "signed": "coupling_signed", "negative_share": "negative_share"}
    sources |= {"trace": "coupling_trace", "swapped": "coupling_swapped"}
    different = found["layer"] != found["layer_2"]
    pairs = ("layer", "layer_2")
    numbers = {name: found[source].mean("token").where(different).mean(pairs) for name, source in sources.items()}
    numbers |= {name: found[name].mean(["token", "layer", "sample"]) for name in ("chance", "chance_signed")}
    # the median: expodistance has no mean where a norm hardly grows
    numbers |= {name: found[name].median("position") for name in OF_PATHS}
    if "linearisation" in found:
        numbers["linearisation"] = found["linearisation"].mean("token")
    return numbers


def chance_line(chance: xr.DataArray) -> dict[str, xr.DataArray]:
    """The chance line of each layer's Jacobian: its mean and central 95%."""
    draws = ["prompt", "token", "sample"]
    low, high = (chance.quantile(share, draws).drop_vars("quantile") for share in (0.025, 0.975))
    return {"chance": chance.mean(draws), "chance_low": low, "chance_high": high}


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Every headline with its interval: of the first k under its name, of a further one as coupling_k30."""
    ks = [int(k) for k in data["k"].values]
    numbers: dict[str, Any] = {"k": ks, "blocks": data.sizes["state"] - 1}
    numbers |= {name: int(data.attrs[name]) for name in ("d_model", "parameters")}
    for name, end in product(HEADLINES, ENDS):
        found = data.get(f"mean_{name}{end}")
        if name in OF_K:
            numbers |= {of_k(name, k, ks) + end: float(data[f"mean_{name}{end}"].sel(k=k)) for k in ks}
        else:
            numbers[name + end] = None if found is None else float(found)
    return numbers


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    def told(key: str) -> str:
        return f"{with_interval(own, key)} ({null_of(null, key)})"

    sentences = []
    for k in own["k"]:
        coupled, chance, swapped, signed, signed_chance, negative = (
            of_k(name, k, own["k"])
            for name in ("coupling", "chance", "swapped", "signed", "chance_signed", "negative_share")
        )
        sentences.append(
            f"Top-{k} coupling over pairs of layers is {told(coupled)}; random bases with the same spectra reach "
            f"{said(own[chance], '.3f')}. Left in right singular vectors: {told(swapped)}. With the signs of A: "
            f"{told(signed)}, random bases {said(own[signed_chance], '.3f')}; of its diagonal entries "
            f"{beside(own, null, negative, '.0%')} are negative, and half by chance."
        )
    sentences.append(
        f"Token trajectories have a line-shape score of {told('line_shape_score')}, where 1 is a straight line; an "
        f"exponential in the layer explains {told('growth_r2')} of the growth of ln |x|, with an expodistance of "
        f"{told('expodistance')}."
    )
    if own["linearisation"] is not None:
        sentences.append(f"The linearised blocks end at a cosine of {told('linearisation')} with the model's.")
    return sentences


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row a K, each headline with its 95% interval."""
    own = summarise(data)
    shown = ("coupling", "chance", "signed", "swapped", *("line_shape_score", "expodistance", "growth_r2"))
    labels = {"line_shape_score": "line-shape score", "growth_r2": "growth R²"}

    def cell(name: str, k: int) -> str:
        return with_interval(own, of_k(name, k, own["k"]) if name in OF_K else name)

    kept = {name: labels.get(name, name) for name in (*shown, "linearisation") if own.get(name) is not None}
    return pd.DataFrame([{"K": k, **{label: cell(name, k) for name, label in kept.items()}} for k in own["k"]])


def of_means(described: Mapping[str, str], dims: tuple[str, ...]) -> dict[str, Variable]:
    """The declarations of `mean_<headline>` and its interval."""
    declared = [
        with_ends(f"mean_{name}", f"mean {OF_PATHS.get(name, name)}", "", words, dims)
        for name, words in described.items()
    ]
    return {key: one for of_one in declared for key, one in of_one.items()}


SQUARE, PATH, LOG_NORM = ("k", "layer", "layer_2"), ("prompt", "position"), ("prompt", "state")
BLOCKS, TRIPLETS = ("layer", "layer_2", "row", "column"), ("prompt", "token", "layer")
TRAJECTORY = ("prompt", "position", "state", "component")
DRAWS = "of the central 95% of draws"
FORMULA = "1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F, J1 of layer, bases of layer_2"
VARIABLES = {
    **with_ends("coupling", "coupling", "", FORMULA, SQUARE),
    "coupling_signed": Variable("signed coupling", "", "the same of A in place of |A|", SQUARE),
    "negative_share": Variable("negative diagonal entries", "", "share of the diagonal of A", SQUARE),
    "coupling_trace": Variable("coupling, trace normalisation", "", "1 - || |A| - S ||_F / sum s", SQUARE),
    "coupling_swapped": Variable("swapped coupling", "", "the same of V2' J1 U2", SQUARE),
    **with_ends("chance", "coupling in random bases", "", "mean over draws, J1's own spectrum", ("k", "layer"), DRAWS),
    "alignment": Variable("alignment", "", "mean |U2' J1 V2|, J1 of layer, bases of layer_2, top 10", BLOCKS),
    "alignment_swapped": Variable("swapped alignment", "", "mean |V2' J1 U2|", BLOCKS),
    "singular_value": Variable("singular value", "", "of each layer's Jacobian, mean over prompts", ("layer", "rank")),
    "triplet_residual": Variable("residual of triplets", "", "worst |Jv - su| or |J'u - sv| over s_1", TRIPLETS),
    "line_shape_score": Variable("line-shape score", "", "L / || sum_l unit(x^l - x^{l-1}) ||", PATH),
    "expodistance": Variable("expodistance", "", "Var_l(alpha) / mean_l(alpha)^2, alpha = ln |x^l| / |x^{l-1}|", PATH),
    "growth_slope": Variable("growth a layer", "nats", "slope of ln |x^l| against l", PATH),
    "growth_r2": Variable("R² of growth", "", "of ln |x^l| against l", PATH),
    "log_norm": Variable("ln |x|", "nats", "mean over positions without the first", LOG_NORM),
    "log_norm_line": Variable("fitted ln |x|", "nats", "mean of the fitted lines", LOG_NORM),
    "log_norm_first": Variable("ln |x| of the first token", "nats", "", LOG_NORM),
    "trajectory": Variable("path in its plane", "", "principal components of x^l, first token left out", TRAJECTORY),
    "token_text": Variable("token", dims=PATH),
    "trajectory_explained": Variable("explained by a component", "", "share of variance", ("prompt", "component")),
    "linearisation": Variable("linearisation", "", "cos(x^L, prod_l (I + J^l) x^0)", ("prompt", "token")),
    **of_means({name: f"over {over}" for name, over in OF_K.items()}, ("k",)),
    **of_means(dict.fromkeys(OF_PATHS, "median over positions, mean over prompts"), ()),
    **of_means({"linearisation": "over tokens and prompts"}, ()),
}

MEASURE = Measure(
    name="coupling",
    question="Do the layers act along the same directions?",
    explanation=(
        "Coupling of the residual Jacobians of two layers at the last token: 1 - || |A| - S ||_F / ||S||_F, top K "
        "singular vectors: 1 for shared ones, about 0 for unrelated ones. Beside it random bases with the same spectra "
        "and a random-init model; then how straight tokens move and how evenly their norms grow. 95% intervals over "
        "prompts."
    ),
    source="Aubry et al. 2024 (arXiv 2407.07810); chance line, intervals, growth fit and linearisation: ours",
    options=Coupling,
    procedure=run,
    precise=True,
    matrices=5,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    drawn=drawn,
    table=table,
    tokens=TOKENS,
    legend=(
        "K: number of top singular vectors; coupling: of residual Jacobians across layers; chance: in random bases; "
        "signed: with the signs of A; swapped: left in right singular vectors; 95% intervals over prompts in brackets."
    ),
)
