"""Scores of heads made for a given function of distance: exactly, and as near as given frequencies allow."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError
from tl_posgen.position.distance.numbers.distance_table import distance_table
from tl_posgen.position.planes.numbers.inverse_dft import fit_frequencies, head_for_table
from tl_posgen.rope.rotation import complex_planes

INVERSE_DFT = "inverse DFT"
Table = Float[Tensor, "query_token key_token distance"]


def example_functions(n_distances: int, seed: int) -> dict[str, Tensor]:
    """Return a step, a spike, a sawtooth, noise, and noise for each pair of 8 tokens: as entangled as can be."""
    distance = torch.arange(n_distances, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(seed)
    period = max(2, n_distances // 8)
    return {
        "step": double(distance < n_distances // 2),
        "spike": double(distance == n_distances // 4),
        "sawtooth": (distance % period) / period,
        "noise": torch.randn(n_distances, generator=generator, dtype=DOUBLE),
        "token pairs": torch.randn(8, 8, n_distances, generator=generator, dtype=DOUBLE),
    }


def as_table(name: str, values: Any, n_distances: int) -> Table:
    """Return a function as a table; a function of distance is one of one query and one key token.

    Raises:
        InputError: values that are none, not finite, or all the same.
    """
    if not isinstance(values, Tensor) or values.is_complex():
        raise InputError(f"function {name!r} is {values!r}: give a tensor of {n_distances} real values, one a distance")
    if values.ndim not in (1, 3) or values.shape[-1] != n_distances or not values.numel():
        raise InputError(
            f"function {name!r} of shape {tuple(values.shape)}: give [{n_distances}] values, one a distance, or "
            f"[query_token, key_token, {n_distances}]"
        )
    table = double(values).reshape(-1, 1, n_distances) if values.ndim == 1 else double(values)
    if not bool(table.isfinite().all()) or float(table.std(correction=0)) == 0:
        raise InputError(f"function {name!r}: its values must be finite and not all the same")
    return table


def made_scores(tables: Mapping[str, Table], frequencies: Mapping[str, Tensor], rconds: Sequence[float]) -> xr.Dataset:
    """Return every function by inverse DFT and with each set of frequencies: errors, logits, the first pair's curve."""
    functions: list[xr.Dataset] = []
    for name, table in tables.items():
        kinds = {INVERSE_DFT: exact_scores(table)}
        for (label, theta), rcond in product(frequencies.items(), rconds):
            fitted, coefficients = fit_frequencies(table, theta, rcond)
            kinds[f"{label}, rcond {rcond:g}"] = fitted, float(coefficients.abs().sum(-1).max()), len(theta)
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
    """Return the scores of the head made by inverse DFT, from its queries and keys; its largest logit; its planes."""
    head = head_for_table(table)
    keys = head.k.expand(len(head.q), *head.k.shape)
    scores = distance_table(head.q, keys, head.rope, 1.0, torch.arange(table.shape[-1]))
    query, key = (complex_planes(x, head.rope).abs() for x in (head.q, head.k))
    return scores.mT, float((query @ key.mT).max()), len(head.rope.inv_freq)


def additive_r(table: Real[Tensor, "query_token key_token distance"]) -> float:
    """Return the correlation with the best f(q, d) + g(q, k), after the mean of each query is taken off, which softmax
    ignores."""
    centred = double(table) - double(table).mean((-2, -1), keepdim=True)
    left = centred - centred.mean(-1, keepdim=True) - centred.mean(-2, keepdim=True)
    return float(1 - left.square().sum() / centred.square().sum()) ** 0.5


def least_additive(data: xr.Dataset) -> xr.Dataset:
    """Return the numbers of the head by inverse DFT that is the least additive of all functions."""
    exact = data.sel(planes=INVERSE_DFT)
    return exact.sel(function=exact["additive_r"].idxmin().item())
