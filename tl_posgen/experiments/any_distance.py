"""What RoPE could do and training did not: any function of distance, exactly, and what a model's own planes reach."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.analyzers.feed import measure
from tl_posgen.analyzers.variance import Variance
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.maths.dummy_distance import additive_fit, distance_table
from tl_posgen.maths.inverse_dft import fit_frequencies, head_for_table
from tl_posgen.maths.rope import complex_frequencies, complex_planes
from tl_posgen.models.backend import Model
from tl_posgen.models.hooks import chosen
from tl_posgen.models.probe import probe, supported
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import to_prompts
from tl_posgen.results import Result

INVERSE_DFT = "inverse DFT"
RCONDS = (1e-12, 1e-2)  # the best fit, whatever its logits, and one whose planes hardly cancel
Table = Float[Tensor, "query_token key_token distance"]


def any_distance(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 2,
    n_distances: int = 64,
    functions: Mapping[str, Tensor] | None = None,
    layers: Sequence[int] | None = None,
    rconds: Sequence[float] = RCONDS,
    seed: int = 0,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""score(a, b, d) = F(a, b, d) for any F on d < N: with planes at theta_m = 2 pi m / N exactly, with a model's own
    frequencies as near as least squares gets; beside it how additive the model's heads are.

    So the architecture allows scores that entangle distance and meaning; that trained heads do not is learned. A fit
    with the model's own frequencies gives every token pair its own coefficients, so it is the nearest that the
    geometry allows; a head has one vector per token, which allows less.

    Args:
        prompts, length, n_prompts: as in `analyze`; for the model's own heads.
        n_distances: N.
        functions: name -> F, [distance] or [query_token, key_token, distance]; those of `example_functions` if left
            out. All on N distances.
        layers: whose frequencies; all if left out. Layers with the same frequencies are one.
        rconds: of the fits, see `fit_frequencies`: a larger one has a larger error and smaller logits.
        seed: of the example functions. null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "any_distance", one row per (function, planes): planes are "inverse DFT", or those of a set of
        layers and an rcond. `n_planes`; `error`, root mean square over the function's standard deviation;
        `largest_logit`, the largest sum_m |z^q_m z^k_m| of a token pair, and `largest_value`, of |F|: a ratio far above
        1 means planes that cancel; `two_axis_r`, the correlation of the scores with the nearest f(q, d) + g(q, k). Over
        distance too, for the first token pair: `values` and `scores`. Over (layer, head): `head_two_axis_r` of the
        model's heads, over the same number of distances, first token left out; the null has only this.

    Raises:
        InputError: unusable prompts or functions.
        UnsupportedModelError: a model without RoPE in the chosen layers.

    Source: that an inverse Fourier transform makes RoPE universal is argued by Han & Ji 2025 (arXiv 2503.13305); the
    construction, the fits and the comparison are our reconstruction.

    Example:
        >>> from tl_posgen import load_model
        >>> text = "Down, down, down. Would the fall never end?"
        >>> options = {"length": 12, "n_prompts": 1, "n_distances": 16, "null_seed": None, "progress": False}
        >>> found = any_distance(load_model("mini"), text, **options)
        >>> bool((found.dataset["error"].sel(planes="inverse DFT") < 1e-6).all())
        True
    """
    functions = example_functions(n_distances, seed) if functions is None else functions
    tables = {name: as_table(name, values, n_distances) for name, values in functions.items()}
    if not tables or not rconds:
        raise InputError("any_distance: give one function and one rcond at least")
    frequencies = own_frequencies(model, layers)
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    scores = built(tables, frequencies, rconds).assign_attrs(rows=["function", "planes"], n_distances=n_distances)

    where = {"layers": layers, "progress": progress}
    heads = heads_additive_r(model, tokens, n_distances, label=model_label(model), **where)
    null = None
    if null_seed is not None:
        null = heads_additive_r(
            random_like(model, null_seed), tokens, n_distances, label=null_label(null_seed), **where
        )
    dataset = scores.merge(heads).assign_attrs(model=model_label(model))
    provenance = provenance_of(model, tokens, null_seed) | {"seed": seed, "rconds": list(rconds)}
    return Result("any_distance", dataset, null, provenance)


def heads_additive_r(
    model: Model, tokens: Sequence[Int[Tensor, " _"]], n_distances: int, *, label: str, layers: Any, progress: bool
) -> xr.Dataset:
    """sqrt(1 - interaction) of every head: the same correlation as `two_axis_r`, over all its queries and keys."""
    analyzer = Variance(n_distances=n_distances)
    found = measure(model, tokens, [analyzer], layers=layers, progress=progress, label=label)["variance"]
    return xr.Dataset({"head_two_axis_r": (1 - found["interaction"]) ** 0.5}, attrs={"model": label})


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


def as_table(name: str, values: Real[Tensor, "*tokens distance"], n_distances: int) -> Table:
    """A function of distance is a table of one query and one key token."""
    if values.ndim not in (1, 3) or values.shape[-1] != n_distances or not values.numel():
        raise InputError(
            f"function {name!r} of shape {tuple(values.shape)}: give [{n_distances}] values, one a distance, or "
            f"[query_token, key_token, {n_distances}]"
        )
    table = values.double().reshape(-1, 1, n_distances) if values.ndim == 1 else values.double()
    if not bool(table.isfinite().all()) or float(table.std(correction=0)) == 0:
        raise InputError(f"function {name!r}: its values must be finite and not all the same")
    return table


def own_frequencies(model: Model, layers: Sequence[int] | None) -> dict[str, Float[Tensor, " plane"]]:
    """'layers 0, 1, 2' -> their frequencies, zeros for what is not rotated; layers without RoPE are passed over."""
    found = probe(model)
    geometries = [supported(found[layer]).geometry for layer in chosen(layers, len(found), "layer")]
    groups: dict[tuple[float, ...], list[int]] = {}
    for geometry in geometries:
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
    rows, kinds = {}, {}
    for name, table in tables.items():
        kinds = {INVERSE_DFT: exact_scores(table)}
        for (label, theta), rcond in product(frequencies.items(), rconds):
            fit = fit_frequencies(table, theta, rcond)
            kinds[f"{label}, rcond {rcond:g}"] = fit.fitted, float(fit.largest_logit.max()), len(theta)
        for label, (scores, largest, n_planes) in kinds.items():
            error = float((scores - table).square().mean().sqrt() / table.std(correction=0))
            numbers = {"n_planes": n_planes, "error": error, "largest_logit": largest}
            numbers |= {"largest_value": float(table.abs().max()), "two_axis_r": two_axis_r(scores)}
            rows[name, label] = numbers | {"scores": scores[0, 0].numpy()}
    coords = {"function": list(tables), "planes": list(kinds)}
    data = {}
    for variable in next(iter(rows.values())):
        values = np.array([[rows[name, label][variable] for label in coords["planes"]] for name in tables])
        data[variable] = (("function", "planes", "distance")[: values.ndim], values)
    values = np.stack([table[0, 0].numpy() for table in tables.values()])
    return xr.Dataset(
        data | {"values": (("function", "distance"), values)}, coords | {"distance": range(values.shape[1])}
    )


def exact_scores(table: Table) -> tuple[Table, float, int]:
    """The scores of the head made by inverse DFT, read off its queries and keys; its largest logit; its planes."""
    head = head_for_table(table)
    keys = head.k.expand(len(head.q), *head.k.shape)
    scores = distance_table(head.q, keys, head.rope, 1.0, torch.arange(table.shape[-1]))
    query, key = (complex_planes(x, head.rope).abs() for x in (head.q, head.k))
    return scores.mT, float((query @ key.mT).max()), len(head.rope.inv_freq)


def two_axis_r(table: Table) -> float:
    """Correlation with the best f(q, d) + g(q, k), after the mean of each query is taken off, which softmax ignores."""
    share = additive_fit(table).interaction_share
    variance = table.var((-2, -1), correction=0)
    return float(1 - (share * variance).nansum() / variance.sum()) ** 0.5
