"""Residuals of the three-axis fits of a captured layer: sums of some heads at a time; planes and token pairs."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import double, row_ranges
from tl_posgen.core.measure import HEAD, TOKENS, by_tokens
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_rows, query_ranges
from tl_posgen.position.decomposition.numbers.residual_moments import PlaneParts, ResidualSums, less_fit
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit, fit_three_axis
from tl_posgen.position.decomposition.numbers.token_pairs import TokenPairTally
from tl_posgen.position.decomposition.rounding import is_rounding
from tl_posgen.report.circuits import CROP

SPECTRUM_CROP = 512  # tokens whose residual the spectrum is of; the time grows with their cube
DIMS = ("tokens", *HEAD)
OF = ("residual", "scores")
OVER_PARTS = (*DIMS, "of")
ENTRIES = 2**21  # token pairs held at once: heads are taken in groups


def residual_sums(part: LayerCapture, fit: ThreeAxisFit) -> list[ResidualSums]:
    """Return the sums of what the fits of these heads' scores leave, with the first token and without; of rounding, 0.

    What the first fit leaves is fitted once more, to the scores themselves: sums over q and k round in float32, and e
    must be at right angles to every fit.
    """
    first = {name: getattr(fit, name).nan_to_num() for name in "abc"}
    geometry, n = part.geometry, part.length
    rows = lambda start, stop: less_fit(part.score_rows(start, stop), **first)  # noqa: E731
    moments = pair_moments_from_rows(rows, n, window=geometry.window)
    rotates = part.bilinear and len(geometry.rope.inv_freq) > 0
    planes = PlaneParts(part.rotated_q, part.rotated_k, geometry.rope, geometry.scale) if rotates else None
    fits = [fit_three_axis(one) for one in (moments, moments.without_first_token or moments)]
    found = [ResidualSums(fit, planes, part.tokens, crop=SPECTRUM_CROP, crop_within=CROP) for fit in fits]
    for start, stop in query_ranges(len(part.heads), n, moments.sums.device):
        scores, rest = part.score_rows(start, stop), rows(start, stop)
        for sums in found:
            sums.add(scores, rest)
    for sums in found:
        sums.drop(*(is_rounding(x, part, sums.pairs, sums.squares) for x in (sums.energy, sums.within)))
    return found


def head_groups(layer: LayerCapture) -> Iterator[tuple[slice, LayerCapture]]:
    """Yield the capture some heads at a time, so that their sums by token pair fit in memory."""
    parts = (slice(*heads) for heads in row_ranges(len(layer.heads), layer.length**2, ENTRIES))
    return ((heads, layer.of_heads(heads)) for heads in parts)


def examples_of(part: LayerCapture, sums: ResidualSums) -> xr.Dataset:
    """Return the residual of these heads token by token, beside their scores, where the fit leaves any."""
    tokens = (part.positions if part.tokens is None else part.tokens)[:CROP]
    maps = torch.stack([sums.corner[:, :CROP, :CROP], sums.within_corner])
    arrays = {
        "example_map": (("of", "example", "query", "key"), maps.float()),
        "example_layer": ("example", torch.full((len(part.heads),), part.layer)),
        "example_head": ("example", torch.tensor(part.heads)),
        "example_share": ("example", sums.energy / sums.within),
        "example_token": ("key", tokens),
    }
    heads = xr.Dataset({name: (dims, array.cpu().numpy()) for name, (dims, array) in arrays.items()})
    return heads.isel(example=heads["example_share"].values > 0)


def largest(examples: Sequence[xr.Dataset], n: int) -> xr.Dataset:
    """Return the n examples with most residual, the first of equals first."""
    whole = xr.concat(examples, "example", data_vars="minimal")
    most = np.argsort(-whole["example_share"].values, kind="stable")[:n]
    return whole.isel(example=most).assign_coords(example=np.arange(len(most)))


def plane_shares(sums: Sums, left: xr.DataArray, scores: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the planes' shares of e and of the scores within rows, whose sums of squares are `left` and `scores`, what
    does not rotate, and the wavelengths, of layers whose scores are sums over planes."""
    whole = xr.concat([left.expand_dims(of=[OF[0]]), scores.expand_dims(of=[OF[1]])], "of")
    rotating = {layer: sums.layers[layer][0].rope.inv_freq for layer in sums.by_layer("in_planes")}
    energy = sums.sum("in_planes", (*OVER_PARTS, "plane"))  # of a layer's planes, then of what does not rotate
    n_planes = xr.DataArray([len(one) for one in rotating.values()], {"layer": list(rotating)}, ("layer",))
    is_plane, lengths = energy["plane"] < n_planes, {at: 2 * torch.pi / one for at, one in rotating.items()}
    return {
        "plane_share": energy.where(is_plane).isel(plane=slice(int(n_planes.max()))) / whole,
        "rest_share": energy.where(~is_plane | energy.isnull(), 0).sum("plane", min_count=1) / whole,
        "wavelength": sums.over_layers("wavelength", {at: one.cpu().numpy() for at, one in lengths.items()}),
    }


def token_pairs(sums: Sums, n_pairs: int) -> xr.Dataset:
    """Return the kinds of token pair that explain most, by rank; none where token ids are not known."""
    tallies = [sums.by_layer(f"pairs, {tokens}") for tokens in TOKENS]
    layers = {layer: by_tokens(*(pair_columns(one[layer], n_pairs) for one in tallies)) for layer in tallies[0]}
    if not layers:
        return xr.Dataset()
    found = sums.variables_of(layers)
    found = found.assign_coords(rank=found["rank"] + 1)
    return found.assign(pair_token=found["pair_token"].fillna(-1).astype(np.int64))


def pair_columns(tally: TokenPairTally, n: int) -> dict[str, Tensor]:
    """Return the first n kinds of token pair of a layer [head, rank]."""
    tokens = double(torch.stack([tally.query_token, tally.key_token], -1))
    columns = {"pair_share": tally.share, "pair_residual": tally.mean, "pair_count": tally.count, "pair_token": tokens}
    return {name: column[:, :n] for name, column in columns.items()}
