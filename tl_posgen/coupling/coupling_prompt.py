"""Couplings at every chosen token of one prompt, and the paths of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.coupling.jacobians import ResidualJacobian, residual_jacobians, residual_streams
from tl_posgen.coupling.numbers.lanczos import SingularTriplets
from tl_posgen.coupling.numbers.overlap import Norm, Pairs, Side, every_pair
from tl_posgen.coupling.numbers.trajectories import expodistance, growth_fit, line_shape_score, principal_trajectories
from tl_posgen.models.model import Model
from tl_posgen.models.tokens import token_strings

ENTRIES_SHOWN = 10  # rows and columns of A that are kept of every pair of layers
VERSIONS: dict[str, tuple[Norm, bool]] = {  # label -> norm, and whether A keeps its signs
    "absolute": ("frobenius", False),
    "signed": ("frobenius", True),
    "trace": ("trace", False),
}
BASES: tuple[Side, ...] = ("aligned", "swapped")
CURVES = ("mean over tokens", "exponential growth, fitted", "first token")


@dataclass(frozen=True)
class Settings:
    """Layers, token positions and numbers of singular vectors; the rest are options of `Coupling`."""

    layers: list[int]
    tokens: list[int]
    ks: list[int]
    chance_samples: int
    dense_up_to: int
    seed: int

    def jacobians(self, model: Model, prompt: Tensor, pair: tuple[int, int], streams: Tensor) -> list[ResidualJacobian]:
        """Return the Jacobian of every layer from one token to another."""
        options = {"layers": self.layers, "streams": streams, "dense_up_to": self.dense_up_to}
        return residual_jacobians(model, prompt, *pair, **options)

    def pairs(self, jacobians: Sequence[ResidualJacobian]) -> tuple[Pairs, list[SingularTriplets]]:
        """Return all Jacobians in each other's bases, and their top singular triplets."""
        triplets = [jacobian.triplets(self.ks[-1], self.dense_up_to) for jacobian in jacobians]
        generator, products = torch.Generator().manual_seed(self.seed), [jacobian.matvec for jacobian in jacobians]
        return every_pair(products, triplets, self.chance_samples, generator), triplets

    def by_k(self, pairs: Pairs, version: str, bases: Side) -> Float[np.ndarray, "k first other"]:
        """Return the coupling at every k."""
        norm, signed = VERSIONS[version]
        return np.stack([_numpy(pairs.coupling(k, norm, bases, signed=signed)) for k in self.ks])


def one_prompt(model: Model, prompt: Int[Tensor, " pos"], settings: Settings) -> xr.Dataset:
    """Return what is measured on one prompt, couplings token by token."""
    streams = residual_streams(model, prompt)
    found = [_one_token(model, prompt, token, streams, settings) for token in settings.tokens]
    texts = ("position", np.array(token_strings(model, prompt), dtype=object))
    data = xr.concat(found, dim="token").assign_coords(token=settings.tokens).merge(trajectories(streams))
    return data.assign(token_text=texts)


def _one_token(model: Model, prompt: Tensor, token: int, streams: Tensor, settings: Settings) -> xr.Dataset:
    """Return the coupling of every pair of layers at one token."""
    jacobians = settings.jacobians(model, prompt, (token, token), streams)
    pairs, triplets = settings.pairs(jacobians)
    blocks = ("bases", "layer", "layer_2", "row", "column")
    corner = (..., slice(ENTRIES_SHOWN), slice(ENTRIES_SHOWN))
    residuals = [torch.maximum(t.left_residual, t.right_residual).max() / t.values[0] for t in triplets]
    couplings = np.stack([[settings.by_k(pairs, version, bases) for bases in BASES] for version in VERSIONS])
    negative = np.stack([_numpy(pairs.negative_share(k)) for k in settings.ks])
    arrays = {
        "coupling": (("version", "bases", "k", "layer", "layer_2"), between_different(couplings)),
        "negative_share": (("k", "layer", "layer_2"), between_different(negative)),
        "chance": (
            ("version", "k", "layer", "draw"),
            np.stack([settings.by_k(pairs, version, "chance") for version in VERSIONS]),
        ),
        "alignment": (blocks, np.stack([_numpy(getattr(pairs, bases)[corner].abs()) for bases in BASES])),
        "singular_value": (("layer", "rank"), _numpy(pairs.values)),
        "triplet_residual": (("layer",), _numpy(torch.stack(residuals))),
    }
    if len(settings.layers) == model.cfg.n_layers:
        x = streams[0, token]
        for jacobian in jacobians:
            x = x + jacobian.matvec(x[:, None])[:, 0]
        arrays["linearisation"] = ((), torch.cosine_similarity(x.double(), streams[-1, token].double(), dim=0).item())
    labels = {"version": list(VERSIONS), "bases": list(BASES), "k": settings.ks}
    return xr.Dataset(arrays, labels | {"layer": settings.layers, "layer_2": settings.layers})


def between_different(squares: Float[np.ndarray, "*place n n"]) -> Float[np.ndarray, "*place n n"]:
    """Return squares of pairs with NaN on the diagonal: a Jacobian couples with itself by definition."""
    return np.where(np.eye(squares.shape[-1], dtype=bool), np.nan, squares)


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
    numbers = {"line_shape_score": line_shape_score(paths), "expodistance": expodistance(paths)}
    numbers |= {"growth_slope": fit.slope, "growth_r2": fit.r2}
    curves = [logs[1:].mean(0), lines[1:].mean(0), logs[0]]
    # the median: expodistance has no mean where a norm hardly grows
    arrays = {
        **{name: ((), np.nanmedian(_numpy(one))) for name, one in numbers.items()},
        "path": (("quantity", "position"), np.stack([_numpy(one) for one in numbers.values()])),
        "log_norm": (("curve", "state"), np.stack([_numpy(one) for one in curves])),
        "trajectory": (("position", "state", "component"), _numpy(shown)),
        "trajectory_explained": ("component", _numpy(plane.explained)),
    }
    labels = {"quantity": list(numbers), "curve": list(CURVES)}
    return xr.Dataset(arrays, labels | {"position": np.arange(len(paths)), "state": np.arange(len(streams))})


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()
