"""Coupling of residual Jacobians across layers and tokens, linearity and growth of the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.coupling import Norm, Pairs, Side, every_pair, off_diagonal_mean
from tl_posgen.maths.lanczos import SingularTriplets
from tl_posgen.maths.trajectories import cosine, expodistance, growth_fit, line_shape_score, principal_trajectories
from tl_posgen.models.backend import Model
from tl_posgen.models.jacobians import DENSE_UP_TO, ResidualJacobian, residual_jacobians, residual_streams
from tl_posgen.models.provenance import model_label, provenance_of
from tl_posgen.results import Result

TOKEN_KINDS = ("self", "same_input", "same_output")


@dataclass(frozen=True)
class Settings:
    """What is measured on every prompt; the words are those of `coupling`."""

    layers: list[int]
    tokens: list[int]
    ks: list[int]
    token_wise: bool
    chance_samples: int
    dense_up_to: int
    seed: int

    def triplets(self, jacobians: Sequence[ResidualJacobian]) -> list[SingularTriplets]:
        return [jacobian.triplets(self.ks[-1], self.dense_up_to) for jacobian in jacobians]

    def pairs(self, jacobians: Sequence[ResidualJacobian], triplets: Sequence[SingularTriplets]) -> Pairs:
        generator = torch.Generator().manual_seed(self.seed)
        return every_pair([jacobian.matvec for jacobian in jacobians], triplets, self.chance_samples, generator)


def coupling(
    model: Model,
    prompts: Int[Tensor, "prompt pos"],
    *,
    null_model: Model | None = None,
    layers: Sequence[int] | None = None,
    tokens: Literal["last"] | Sequence[int] = "last",
    k: Sequence[int] = (10,),
    token_wise: bool = False,
    chance_samples: int = 10,
    dense_up_to: int = DENSE_UP_TO,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    r"""Do the blocks of a model act along the same directions, and do tokens move through it on straight lines?

    Coupling of two layers: 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F over the top K singular vectors of the residual
    Jacobians J1, J2 of one token (`maths.coupling`). Frobenius with fixed K is the headline. Beside it: the chance line
    (random orthonormal bases, J1's own spectrum), a null model, the trace normalisation (for comparison with the
    published figure only) and the swapped version V2' J1 U2.

    Args:
        model: HookedTransformer or TransformerBridge, float32 at least, writing weights not centred.
        prompts: token ids.
        null_model: a randomly initialised model of the same shape (`random_like(model, seed)`).
        layers: all if not given.
        tokens: positions whose own Jacobian is taken; "last", or several, counted from 0 or negative from the end.
        k: numbers of top singular vectors.
        token_wise: also couple the tokens of each layer: "self" J_tt with J_t't', "same_input" J_{t1,t} with J_{t1,t'}
            for the first t1 of `tokens`, "same_output" J_{t,t2} with J_{t',t2} for the last. Needs two tokens.
        chance_samples: random bases per Jacobian for the chance line.
        dense_up_to: d_model up to which Jacobians are built as matrices.
        seed: of the chance line and of the bootstrap over prompts.
        progress: show a bar.

    Returns:
        Result "coupling", one row of `frame()` per k. Dataset variables:
        coupling, coupling_low, coupling_high, coupling_trace, coupling_swapped [k, layer, layer_2]: J1 of layer in the
            bases of layer_2; mean and 95 % bootstrap interval over prompts (NaN for one prompt).
        chance, chance_low, chance_high [k, layer]: mean and central 95 % of the chance line.
        mean_coupling (_low, _high), mean_trace, mean_swapped, mean_chance [k]: over ordered pairs of different layers.
        alignment [lower_layer, row, column]: mean |A| of a layer in the bases of the next chosen one, for the
            largest k; singular_value [layer, row] beside it.
        triplet_residual [prompt, token, layer]: worst |Jv - su| or |J'u - sv| over s_1.
        token_coupling [kind, k, layer, token, token_2]: if token_wise.
        line_shape_score, expodistance, growth_slope, growth_r2 [prompt, position], log_norm [prompt, state].
        trajectory [prompt, position, state, component], trajectory_explained [prompt, component]: the first token is
            left out, as an attention sink's norm would fill the picture.
        linearisation [prompt, token]: cos(x^L, prod_l (I + J^l) x^0); only if all layers were chosen.

    Raises:
        InputError: a layer, token or k that does not exist, one token for token_wise, weights processed by centring,
            half precision, fused kernels.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810, for coupling, line shape and growth; chance line,
    intervals, growth fit and linearisation check are ours.
    """
    settings = _checked(model, prompts, layers, tokens, k, token_wise, chance_samples, dense_up_to, seed)
    dataset = _measure(model, prompts, settings, model_label(model), progress)
    null = None
    if null_model is not None:
        null = _measure(null_model, prompts, settings, f"{model_label(model)}, random weights", progress)
    provenance = provenance_of(model, list(prompts), None)
    return Result("coupling", dataset, null, provenance | {"tokens": settings.tokens, "seed": seed})


def headline(dataset: xr.Dataset) -> dict[str, float]:
    """The numbers that stand for a model or a checkpoint: mean couplings per k, medians over tokens of the rest."""
    numbers = {
        f"{name}_{k}": float(dataset[f"mean_{name}"].sel(k=k))
        for k in dataset.k.values
        for name in ("coupling", "chance", "trace", "swapped")
    }
    tokens = ("line_shape_score", "expodistance", "growth_slope", "growth_r2")
    return numbers | {name: float(dataset[name].median()) for name in tokens}


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


def _measure(model: Model, prompts: Tensor, settings: Settings, label: str, progress: bool) -> xr.Dataset:
    bar = tqdm(prompts, desc=f"coupling, {label}", unit="prompt", disable=not progress)
    found = xr.concat([_one_prompt(model, prompt, settings) for prompt in bar], dim="prompt")
    found = found.assign_coords(prompt=np.arange(len(prompts)))
    kept = ("line_shape_score", "expodistance", "growth_slope", "growth_r2", "log_norm", "trajectory")
    kept = (*kept, "trajectory_explained", "linearisation", "triplet_residual")
    averaged = found.mean(["prompt", "token"])
    dataset = found[[name for name in kept if name in found]]
    dataset = dataset.assign(
        averaged[["coupling", "coupling_trace", "coupling_swapped", "alignment", "singular_value"]]
    )
    dataset = dataset.assign(_intervals(found, settings.seed))
    if settings.token_wise:
        dataset = dataset.assign(token_coupling=found["token_coupling"].mean("prompt"))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return dataset.assign_attrs(rows="k", model=label, d_model=model.cfg.d_model, parameters=n_parameters)


def _intervals(found: xr.Dataset, seed: int) -> dict[str, xr.DataArray]:
    """Bootstrap intervals over prompts, the chance line's central 95 %, and means over pairs of different layers."""
    per_prompt = found["coupling"].mean("token")
    chance = found["chance"].stack(draw=("prompt", "token", "sample"))
    arrays = {"chance": chance.mean("draw"), "mean_chance": chance.mean(["draw", "layer"])}
    for end, share in (("low", 0.025), ("high", 0.975)):
        arrays[f"chance_{end}"] = chance.quantile(share, "draw").drop_vars("quantile")
    for name, variable in (("coupling", "coupling"), ("trace", "coupling_trace"), ("swapped", "coupling_swapped")):
        arrays[f"mean_{name}"] = _different_layers(found[variable]).mean(["prompt", "token"])
    for name, values in (("coupling", per_prompt), ("mean_coupling", _different_layers(per_prompt))):
        for end, bound in zip(("low", "high"), bootstrap_interval(values.values, seed=seed), strict=True):
            arrays[f"{name}_{end}"] = values.isel(prompt=0, drop=True).copy(data=bound)
    return arrays


def _different_layers(couplings: xr.DataArray) -> xr.DataArray:
    means = off_diagonal_mean(torch.from_numpy(couplings.values)).numpy()
    return couplings.isel(layer=0, layer_2=0, drop=True).copy(data=means)


def _one_prompt(model: Model, prompt: Int[Tensor, " pos"], settings: Settings) -> xr.Dataset:
    streams = residual_streams(model, prompt)
    found = [_one_token(model, prompt, token, streams, settings) for token in settings.tokens]
    couplings = xr.concat([dataset for dataset, _ in found], dim="token").assign_coords(token=settings.tokens)
    dataset = couplings.merge(_trajectories(streams))
    if settings.token_wise:
        own = [jacobians for _, jacobians in found]
        dataset["token_coupling"] = _token_wise(model, prompt, streams, settings, own)
    return dataset


def _one_token(
    model: Model, prompt: Tensor, token: int, streams: Tensor, settings: Settings
) -> tuple[xr.Dataset, list[ResidualJacobian]]:
    """Every pair of layers at one token, and the Jacobians they were taken from."""
    jacobians = residual_jacobians(model, prompt, token, layers=settings.layers, streams=streams)
    triplets = settings.triplets(jacobians)
    pairs = settings.pairs(jacobians, triplets)
    next_layer = torch.arange(len(settings.layers) - 1)
    square, values = ("k", "layer", "layer_2"), pairs.values
    residuals = [torch.maximum(t.left_residual, t.right_residual).max() / t.values[0] for t in triplets]
    arrays = {
        "coupling": (square, _by_k(pairs, settings)),
        "coupling_trace": (square, _by_k(pairs, settings, norm="trace")),
        "coupling_swapped": (square, _by_k(pairs, settings, of="swapped")),
        "chance": (("k", "layer", "sample"), _by_k(pairs, settings, of="chance")),
        "alignment": (("lower_layer", "row", "column"), _numpy(pairs.aligned[next_layer, next_layer + 1].abs())),
        "singular_value": (("layer", "row"), _numpy(values)),
        "triplet_residual": (("layer",), _numpy(torch.stack(residuals))),
    }
    if len(settings.layers) == model.cfg.n_layers:
        x = streams[0, token]
        for jacobian in jacobians:
            x = x + jacobian.matvec(x[:, None])[:, 0]
        arrays["linearisation"] = ((), cosine(x, streams[-1, token]).item())
    layers = settings.layers
    coords = {"k": settings.ks, "layer": layers, "layer_2": layers, "lower_layer": layers[:-1]}
    return xr.Dataset(arrays, coords), jacobians


def _token_wise(
    model: Model, prompt: Tensor, streams: Tensor, settings: Settings, own: list[list[ResidualJacobian]]
) -> xr.DataArray:
    """Every pair of tokens in each layer, in the three ways of `TOKEN_KINDS`."""

    def take(source: int, target: int) -> list[ResidualJacobian]:
        if source == target:
            return own[settings.tokens.index(source)]
        return residual_jacobians(model, prompt, source, target, settings.layers, streams=streams)

    first, last = settings.tokens[0], settings.tokens[-1]
    members = {
        "self": own,
        "same_input": [take(first, target) for target in settings.tokens],
        "same_output": [take(source, last) for source in settings.tokens],
    }
    kinds = []
    for kind in TOKEN_KINDS:
        layers = list(zip(*members[kind], strict=True))
        kinds.append(
            np.stack([_by_k(settings.pairs(tokens, settings.triplets(tokens)), settings) for tokens in layers], axis=1)
        )
    dims = ("kind", "k", "layer", "token", "token_2")
    coords = {"kind": list(TOKEN_KINDS), "token": settings.tokens, "token_2": settings.tokens}
    return xr.DataArray(np.stack(kinds), coords, dims)


def _by_k(pairs: Pairs, settings: Settings, norm: Norm = "frobenius", of: Side = "aligned") -> np.ndarray:
    return np.stack([_numpy(pairs.coupling(k, norm, of)) for k in settings.ks])


def _trajectories(streams: Float[Tensor, "state pos d_model"]) -> xr.Dataset:
    paths = streams.transpose(0, 1)
    fit = growth_fit(paths)
    plane = principal_trajectories(paths[1:] if len(paths) > 1 else paths)
    shown = torch.full((len(paths), *plane.coordinates.shape[1:]), torch.nan, dtype=torch.float64)
    shown[-len(plane.coordinates) :] = plane.coordinates.cpu()
    arrays = {
        "line_shape_score": (("position",), _numpy(line_shape_score(paths))),
        "expodistance": (("position",), _numpy(expodistance(paths))),
        "growth_slope": (("position",), _numpy(fit.slope)),
        "growth_r2": (("position",), _numpy(fit.r2)),
        "log_norm": (("state",), _numpy(streams.double().norm(dim=-1).log().mean(dim=1))),
        "trajectory": (("position", "state", "component"), _numpy(shown)),
        "trajectory_explained": (("component",), _numpy(plane.explained)),
    }
    return xr.Dataset(arrays, {"position": np.arange(len(paths)), "state": np.arange(len(streams))})


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
