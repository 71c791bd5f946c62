"""Coupling of residual Jacobians across layers and tokens, linearity and growth of the residual stream."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling_prompt import Settings, one_prompt
from tl_posgen.experiments.loss import prompts_of_one_length
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.coupling import off_diagonal_mean
from tl_posgen.models.backend import Model
from tl_posgen.models.jacobians import DENSE_UP_TO
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result

PATH_MEASURES = ("line_shape_score", "expodistance", "growth_slope", "growth_r2")
HEADLINES = ("coupling", "chance", "trace", "swapped", *PATH_MEASURES, "linearisation")
_PER_PROMPT = (*PATH_MEASURES, "log_norm", "log_norm_first", "log_norm_line", "trajectory", "trajectory_explained")
_PER_PROMPT = (*_PER_PROMPT, "linearisation", "triplet_residual")


def coupling(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 4,
    layers: Sequence[int] | None = None,
    tokens: Literal["last"] | Sequence[int] = "last",
    k: Sequence[int] = (10,),
    token_wise: bool = False,
    chance_samples: int = 10,
    dense_up_to: int = DENSE_UP_TO,
    seed: int = 0,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""Do the blocks of a model act along the same directions, and do tokens move through it on straight lines?

    Coupling of two layers: 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F over the top K singular vectors of the residual
    Jacobians J1, J2 of one token (`maths.coupling`). Frobenius with fixed K is the headline. Beside it: the chance line
    (random orthonormal bases, J1's own spectrum), a randomly initialised model, the trace normalisation (for comparison
    with the published figure only) and the swapped version V2' J1 U2.

    Args:
        model: HookedTransformer or TransformerBridge, float32 at least, writing weights not centred.
        prompts, length, n_prompts: as in `analyze`.
        layers: all if not given.
        tokens: positions whose own Jacobian is taken; "last", or several, counted from 0 or negative from the end.
        k: numbers of top singular vectors.
        token_wise: also couple the tokens of each layer: "self" J_tt with J_t't', "same_input" J_{t1,t} with J_{t1,t'}
            for the first t1 of `tokens`, "same_output" J_{t,t2} with J_{t',t2} for the last. Needs two tokens.
        chance_samples: random bases per Jacobian for the chance line.
        dense_up_to: d_model up to which Jacobians are built as matrices.
        seed: of the chance line and of the bootstrap over prompts.
        null_seed: of the randomly initialised model; None skips it.
        progress: show a bar.

    Returns:
        Result "coupling", one row of `frame()` per k. Dataset variables:
        coupling, coupling_low, coupling_high, coupling_trace, coupling_swapped [k, layer, layer_2]: J1 of layer in the
            bases of layer_2; mean and 95 % bootstrap interval over prompts (NaN for one prompt).
        chance, chance_low, chance_high [k, layer]: mean and central 95 % of the chance line.
        mean_coupling, mean_trace, mean_swapped, mean_chance [k], each with _low and _high: over ordered pairs of
            different layers (chance: over layers and draws).
        alignment [lower_layer, row, column]: mean |A| of a layer in the bases of the next chosen one, for the
            largest k; singular_value [layer, row] beside it.
        triplet_residual [prompt, token, layer]: worst |Jv - su| or |J'u - sv| over s_1.
        token_coupling [kind, k, layer, token, token_2]: if token_wise.
        line_shape_score, expodistance, growth_slope, growth_r2 [prompt, position], over x^0, what enters the first
            block, to x^L, what leaves the last, before the final norm: with x^L left out the numbers differ.
            mean_<each>, with _low and _high: median over positions, then mean over prompts.
        log_norm, log_norm_line [prompt, state]: mean of ln |x^l| over positions, and of the fitted lines;
            log_norm_first: of the first token, which log_norm and the trajectories leave out.
        trajectory [prompt, position, state, component], trajectory_explained [prompt, component].
        linearisation [prompt, token]: cos(x^L, prod_l (I + J^l) x^0), mean_linearisation with _low and _high; only if
            all layers were chosen.

    Raises:
        InputError: unusable prompts; a layer, token or k that does not exist, one token for token_wise, weights
            processed by centring, half precision, fused kernels.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810, for coupling, line shape and growth; chance line,
    intervals, growth fit and linearisation check are ours.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.models.tokens import bundled_text
        >>> options = {"length": 16, "n_prompts": 1, "null_seed": None, "progress": False}
        >>> found = coupling(load_model("mini"), bundled_text(), k=[4], **options)
        >>> found.dataset.coupling.sizes["layer_2"]
        4
    """
    rows = prompts_of_one_length(model, prompts, length, n_prompts)
    settings = _checked(model, rows, layers, tokens, k, token_wise, chance_samples, dense_up_to, seed)
    dataset = _measure(model, rows, settings, model_label(model), progress)
    null = None
    if null_seed is not None:
        null = _measure(random_like(model, null_seed), rows, settings, null_label(null_seed), progress)
    provenance = provenance_of(model, list(rows), null_seed)
    return Result("coupling", dataset, null, provenance | {"tokens": settings.tokens, "seed": seed})


def headline(dataset: xr.Dataset, k: int) -> dict[str, float]:
    """The numbers that stand for a model or a checkpoint, each of `HEADLINES` with its _low and _high."""
    found = dataset.sel(k=k)
    names = [name + end for name in HEADLINES for end in ("", "_low", "_high")]
    return {name: float(found[f"mean_{name}"]) for name in names if f"mean_{name}" in found}


def _checked(
    model: Model,
    prompts: Tensor,
    layers: Sequence[int] | None,
    tokens: Literal["last"] | Sequence[int],
    k: Sequence[int],
    token_wise: bool,
    chance_samples: int,
    dense_up_to: int,
    seed: int,
) -> Settings:
    n_layers, d_model, length = model.cfg.n_layers, model.cfg.d_model, prompts.shape[1]
    chosen = list(range(n_layers)) if layers is None else sorted(set(layers))
    positions = [-1] if isinstance(tokens, str) else list(tokens)
    if isinstance(tokens, str) and tokens != "last":
        raise InputError(f"tokens {tokens!r}; give 'last' or a list of positions")
    for what, values, low, high in (
        ("layer", chosen, 0, n_layers - 1),
        ("token", positions, -length, length - 1),
        ("k", k, 1, d_model),
    ):
        wrong = [value for value in values if not low <= value <= high]
        if wrong or not len(values):
            raise InputError(f"{what} {wrong or 'list is empty'}: choose from {low} to {high}")
    positions = sorted({position % length for position in positions})
    if token_wise and len(positions) < 2:
        raise InputError("token_wise couples tokens with each other; give two positions or more in tokens")
    if chance_samples < 1:
        raise InputError(
            f"chance_samples {chance_samples}: at least 1, as coupling means nothing without its chance line"
        )
    return Settings(chosen, positions, sorted(set(k)), token_wise, chance_samples, dense_up_to, seed)


def _measure(
    model: Model, prompts: Int[Tensor, "prompt pos"], settings: Settings, label: str, progress: bool
) -> xr.Dataset:
    bar = tqdm(prompts, desc=f"coupling, {label}", unit="prompt", disable=not progress)
    found = xr.concat([one_prompt(model, prompt, settings) for prompt in bar], dim="prompt")
    assert isinstance(found, xr.Dataset)
    found = found.assign_coords(prompt=np.arange(len(prompts)))
    dataset = found[[name for name in _PER_PROMPT if name in found]]
    averaged = ["coupling", "coupling_trace", "coupling_swapped", "alignment", "singular_value"]
    dataset = dataset.assign(found[averaged].mean(["prompt", "token"])).assign(_chance(found))
    if settings.token_wise:
        dataset = dataset.assign(token_coupling=found["token_coupling"].mean("prompt"))
    dataset = dataset.assign(_with_interval("coupling", found["coupling"].mean("token"), settings.seed))
    for name, values in _per_prompt_headlines(found).items():
        dataset = dataset.assign(_with_interval(f"mean_{name}", values, settings.seed))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return dataset.assign_attrs(rows="k", model=label, d_model=model.cfg.d_model, parameters=n_parameters)


def _per_prompt_headlines(found: xr.Dataset) -> dict[str, xr.DataArray]:
    """One number per prompt (and k) for each of `HEADLINES` that was measured."""
    sources = {"coupling": "coupling", "trace": "coupling_trace", "swapped": "coupling_swapped"}
    numbers = {name: _different_layers(found[source].mean("token")) for name, source in sources.items()}
    numbers["chance"] = found["chance"].mean(["token", "layer", "sample"])
    # the median: expodistance has no mean where a norm hardly grows
    numbers |= {name: found[name].median("position") for name in PATH_MEASURES}
    if "linearisation" in found:
        numbers["linearisation"] = found["linearisation"].mean("token")
    return numbers


def _with_interval(name: str, values: xr.DataArray, seed: int) -> dict[str, xr.DataArray]:
    """The mean over prompts under its name, and the ends of its 95 % interval."""
    ends = bootstrap_interval(values.transpose("prompt", ...).values, seed=seed)
    mean = values.mean("prompt")
    return {name: mean} | {
        f"{name}_{end}": mean.copy(data=bound) for end, bound in zip(("low", "high"), ends, strict=True)
    }


def _chance(found: xr.Dataset) -> dict[str, xr.DataArray]:
    """The chance line of each layer's Jacobian: its mean and central 95 %."""
    chance = found["chance"].stack(draw=("prompt", "token", "sample"))
    ends = {
        f"chance_{end}": chance.quantile(share, "draw").drop_vars("quantile")
        for end, share in (("low", 0.025), ("high", 0.975))
    }
    return {"chance": chance.mean("draw")} | ends


def _different_layers(couplings: xr.DataArray) -> xr.DataArray:
    couplings = couplings.transpose(..., "layer", "layer_2")
    means = off_diagonal_mean(torch.from_numpy(couplings.values)).numpy()
    return couplings.isel(layer=0, layer_2=0, drop=True).copy(data=means)
