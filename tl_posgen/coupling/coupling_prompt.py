"""Measurements on one prompt: couplings at every chosen token, and the paths of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.coupling.jacobians import ResidualJacobian, residual_jacobians, residual_streams
from tl_posgen.coupling.lanczos import SingularTriplets
from tl_posgen.coupling.overlap import Norm, Pairs, Side, every_pair
from tl_posgen.coupling.trajectories import expodistance, growth_fit, line_shape_score, principal_trajectories
from tl_posgen.models.model import Model
from tl_posgen.models.tokens import token_strings

ENTRIES_SHOWN = 10  # rows and columns of A that are kept of every pair of layers


@dataclass(frozen=True)
class Settings:
    """Settings of every prompt's measurement; the names are those of the options `Coupling` and `TokenCoupling`."""

    layers: list[int]
    tokens: list[int]
    ks: list[int]
    chance_samples: int
    dense_up_to: int
    seed: int

    def jacobians(self, model: Model, prompt: Tensor, pair: tuple[int, int], streams: Tensor) -> list[ResidualJacobian]:
        options = {"layers": self.layers, "streams": streams, "dense_up_to": self.dense_up_to}
        return residual_jacobians(model, prompt, *pair, **options)

    def pairs(self, jacobians: Sequence[ResidualJacobian]) -> tuple[Pairs, list[SingularTriplets]]:
        triplets = [jacobian.triplets(self.ks[-1], self.dense_up_to) for jacobian in jacobians]
        generator, products = torch.Generator().manual_seed(self.seed), [jacobian.matvec for jacobian in jacobians]
        return every_pair(products, triplets, self.chance_samples, generator), triplets

    def by_k(
        self, pairs: Pairs, norm: Norm = "frobenius", side: Side = "aligned", *, signed: bool = False
    ) -> np.ndarray:
        return np.stack([_numpy(pairs.coupling(k, norm, side, signed=signed)) for k in self.ks])


def one_prompt(model: Model, prompt: Int[Tensor, " pos"], settings: Settings) -> xr.Dataset:
    streams = residual_streams(model, prompt)
    found = [_one_token(model, prompt, token, streams, settings) for token in settings.tokens]
    texts = ("position", np.array(token_strings(model, prompt), dtype=object))
    data = xr.concat(found, dim="token").assign_coords(token=settings.tokens).merge(trajectories(streams))
    return data.assign(token_text=texts)


def _one_token(model: Model, prompt: Tensor, token: int, streams: Tensor, settings: Settings) -> xr.Dataset:
    """Return couplings, alignments and singular values of every pair of layers at one token."""
    jacobians = settings.jacobians(model, prompt, (token, token), streams)
    pairs, triplets = settings.pairs(jacobians)
    square, draws = ("k", "layer", "layer_2"), ("k", "layer", "sample")
    corner, blocks = (..., slice(ENTRIES_SHOWN), slice(ENTRIES_SHOWN)), ("layer", "layer_2", "row", "column")
    residuals = [torch.maximum(t.left_residual, t.right_residual).max() / t.values[0] for t in triplets]
    arrays = {
        "coupling": (square, settings.by_k(pairs)),
        "coupling_signed": (square, settings.by_k(pairs, signed=True)),
        "negative_share": (square, np.stack([_numpy(pairs.negative_share(k)) for k in settings.ks])),
        "coupling_trace": (square, settings.by_k(pairs, norm="trace")),
        "coupling_swapped": (square, settings.by_k(pairs, side="swapped")),
        "chance": (draws, settings.by_k(pairs, side="chance")),
        "chance_signed": (draws, settings.by_k(pairs, side="chance", signed=True)),
        "alignment": (blocks, _numpy(pairs.aligned[corner].abs())),
        "alignment_swapped": (blocks, _numpy(pairs.swapped[corner].abs())),
        "singular_value": (("layer", "rank"), _numpy(pairs.values)),
        "triplet_residual": (("layer",), _numpy(torch.stack(residuals))),
    }
    if len(settings.layers) == model.cfg.n_layers:
        x = streams[0, token]
        for jacobian in jacobians:
            x = x + jacobian.matvec(x[:, None])[:, 0]
        arrays["linearisation"] = ((), torch.cosine_similarity(x.double(), streams[-1, token].double(), dim=0).item())
    layers = settings.layers
    coords = {"k": settings.ks, "layer": layers, "layer_2": layers}
    return xr.Dataset(arrays, coords)


def trajectories(streams: Float[Tensor, "state pos d_model"]) -> xr.Dataset:
    """Return straightness and growth of every token's path x^0 .. x^L, the paths in their plane, and mean log-norms.

    The plane and the mean leave the first token out, since an attention sink's norm would dominate both.
    """
    paths = streams.transpose(0, 1)
    fit = growth_fit(paths)
    states = torch.arange(len(streams), dtype=torch.float64, device=fit.slope.device)
    lines = fit.intercept[:, None] + fit.slope[:, None] * states
    logs = paths.double().norm(dim=-1).log()
    plane = principal_trajectories(paths[1:])
    shown = torch.nn.functional.pad(plane.coordinates, (0, 0, 0, 0, 1, 0), value=torch.nan)
    of_position = {"line_shape_score": line_shape_score(paths), "expodistance": expodistance(paths)}
    of_position |= {"growth_slope": fit.slope, "growth_r2": fit.r2}
    of_state = {"log_norm": logs[1:].mean(0), "log_norm_first": logs[0], "log_norm_line": lines[1:].mean(0)}
    arrays = {
        **{name: ("position", _numpy(one)) for name, one in of_position.items()},
        **{name: ("state", _numpy(one)) for name, one in of_state.items()},
        "trajectory": (("position", "state", "component"), _numpy(shown)),
        "trajectory_explained": ("component", _numpy(plane.explained)),
    }
    return xr.Dataset(arrays, {"position": np.arange(len(paths)), "state": np.arange(len(streams))})


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
