"""Couplings at every chosen token of one prompt, and the paths of its tokens."""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.core.run import Run
from tl_posgen.coupling.jacobian_measure import VERSIONS, JacobianMeasure, as_numpy, between_different
from tl_posgen.coupling.jacobians import ResidualJacobian, residual_streams
from tl_posgen.coupling.numbers.overlap import Side
from tl_posgen.coupling.numbers.trajectories import expodistance, growth_fit, line_shape_score, principal_trajectories
from tl_posgen.models.tokens import token_strings

ENTRIES_SHOWN = 10  # rows and columns of A that are kept of every pair of layers
BASES: tuple[Side, ...] = ("aligned", "swapped")
CURVES = ("mean over tokens", "exponential growth, fitted", "first token")


def one_prompt(measure: JacobianMeasure, run: Run, prompt: Int[Tensor, " pos"]) -> xr.Dataset:
    """Return couplings token by token, and the paths of all tokens."""
    streams, (_, tokens) = residual_streams(run.model, prompt), measure.places(run)
    found = []
    for token in tokens:  # the Jacobians of one token are held at a time
        found.append(at_token(measure, run, measure.jacobians(run, prompt, token, token, streams), streams))
    data = xr.concat(found, dim="token").assign_coords(token=tokens).merge(trajectories(streams))
    return data.assign(token_text=("position", np.array(token_strings(run.model, prompt), dtype=object)))


def at_token(
    measure: JacobianMeasure, run: Run, jacobians: Sequence[ResidualJacobian], streams: Float[Tensor, "state pos d"]
) -> xr.Dataset:
    """Return the coupling of every pair of layers at the token of these Jacobians."""
    pairs, triplets = measure.pairs(run, jacobians)
    corner = (..., slice(ENTRIES_SHOWN), slice(ENTRIES_SHOWN))
    residuals = [torch.maximum(t.left_residual, t.right_residual).max() / t.values[0] for t in triplets]
    couplings = np.stack([[measure.by_k(pairs, version, bases) for bases in BASES] for version in VERSIONS])
    negative = np.stack([as_numpy(pairs.negative_share(k)) for k in measure.ks])
    chance = np.stack([measure.by_k(pairs, version, "chance") for version in VERSIONS])
    alignments = np.stack([as_numpy(getattr(pairs, bases)[corner].abs()) for bases in BASES])
    arrays = {
        "coupling": (("version", "bases", "k", "layer", "layer_2"), between_different(couplings)),
        "negative_share": (("k", "layer", "layer_2"), between_different(negative)),
        "chance": (("version", "k", "layer", "draw"), chance),
        "alignment": (("bases", "layer", "layer_2", "row", "column"), alignments),
        "singular_value": (("layer", "rank"), as_numpy(pairs.values)),
        "triplet_residual": (("layer",), as_numpy(torch.stack(residuals))),
    }
    layers, token = [jacobian.layer for jacobian in jacobians], jacobians[0].target
    if len(layers) == run.model.cfg.n_layers:
        x = streams[0, token]
        for jacobian in jacobians:
            x = x + jacobian.matvec(x[:, None])[:, 0]
        arrays["linearisation"] = ((), torch.cosine_similarity(x.double(), streams[-1, token].double(), dim=0).item())
    labels = {"version": list(VERSIONS), "bases": list(BASES), "k": measure.ks, "layer": layers, "layer_2": layers}
    return xr.Dataset(arrays, labels)


def trajectories(streams: Float[Tensor, "state pos d_model"]) -> xr.Dataset:
    """Return straightness and growth of every token's path x^0 .. x^L, the paths in their plane, and mean log-norms.

    The plane and the mean leave the first token out, since an attention sink's norm would dominate both.
    """
    paths = streams.transpose(0, 1)
    fit, logs = growth_fit(paths), paths.double().norm(dim=-1).log()
    states = torch.arange(len(streams), dtype=torch.float64, device=fit.slope.device)
    lines = fit.intercept[:, None] + fit.slope[:, None] * states
    plane = principal_trajectories(paths[1:])
    shown = torch.nn.functional.pad(plane.coordinates, (0, 0, 0, 0, 1, 0), value=torch.nan)
    numbers = {"line_shape_score": line_shape_score(paths), "expodistance": expodistance(paths)}
    numbers |= {"growth_slope": fit.slope, "growth_r2": fit.r2}
    arrays = {
        # the median: expodistance has no mean where a norm hardly grows
        **{name: ((), np.nanmedian(as_numpy(one))) for name, one in numbers.items()},
        "path": (("quantity", "position"), as_numpy(torch.stack([*numbers.values()]))),
        "log_norm": (("curve", "state"), as_numpy(torch.stack([logs[1:].mean(0), lines[1:].mean(0), logs[0]]))),
        "trajectory": (("position", "state", "component"), as_numpy(shown)),
        "trajectory_explained": ("component", as_numpy(plane.explained)),
    }
    labels = {"quantity": list(numbers), "curve": list(CURVES)}
    return xr.Dataset(arrays, labels | {"position": np.arange(len(paths)), "state": np.arange(len(streams))})
