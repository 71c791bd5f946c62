"""Analyzer of RoPE's planes: magnitude and phase of queries and keys in each, and what each plane is used for."""

from dataclasses import fields

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.maths.plane_patterns import (
    PlaneMoments,
    plane_parts,
    plane_scores,
    relative_phase,
    side_pattern,
    sufficiency,
)
from tl_posgen.maths.rope import complex_frequencies
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry

EPS = 0.5
EPS_GRID = (0.1, 0.2, 0.3, 0.5, 1.0)
CONDITIONS = ("position", "quiet", "slow")
DIMS = {1: ("head",), 2: ("head", "plane")}
NO_FIRST = (
    *(f"{name}_{side}" for name in ("mean", "magnitude", "concentration", "phase") for side in "qk"),
    *(f"{part}_by_plane" for part in ("position", "meaning", "interaction")),
    *("score", "score_sum", "std", "interaction", "additive"),
)


class Planes:
    r"""z^q_m, z^k_m: queries and keys of every head before RoPE, as one complex number per plane m and token.

    Over (layer, head, plane), for q and for k (`_q`, `_k`): `mean` |E z|, `magnitude` E|z|, `concentration` their
    ratio, `phase` arg E z and its circular standard deviation `phase_std` (radians), `energy` (share of E|z|^2 over
    planes). Of both: `relative_phase` arg E[z^q conj z^k] over causal pairs, `position_by_plane`, `meaning_by_plane`,
    `interaction_by_plane` (shares of each plane in the variance of that part, adding up to 1; a negative plane works
    against the others), `score` s_m = scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m (d - d0) / 2)|, and
    `meets_position`, `meets_quiet`, `meets_slow`: 1 where the plane meets that condition of the sufficient criterion
    (key nearly constant; too small to matter; hardly turns), else 0. Over (layer, plane): `wavelength` 2 pi / theta_m
    in tokens, inf for the unrotated remainder, which is paired up.

    Per head: `participation` and `rank` of Q and K, and `centred_*` of them without their means; `std`, of the scores
    over every (query, key, distance) as softmax sees them, and the shares `position`, `meaning`, `interaction` of its
    square (as in `Variance`, from the moments of this analyzer); `score_sum` = sum_m s_m / std; `planes_met`, the share
    of planes that meet a condition; `additive`, 1 where all do; `additive_by_eps`, the same for several eps.

    `*_no_first` leave the first token out. Moments add up over prompts; memory does not grow with them. A soft cap is
    not part of the scores here. A layer without RoPE among others (NoPE) is NaN throughout.

    Args:
        eps: tolerance of the criterion. 0.5 is the largest of 0.1, 0.2, 0.3, 0.5, 1 that certifies no randomly
            initialised or shuffled head of the two small models it was chosen on; at 0.1 no trained head is certified.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.
        reference: d0, the distance at which the key part is read.

    Raises:
        InputError: eps not above 0, fewer than one distance; later, a prompt of one token.
        UnsupportedModelError: later, for a layer whose positions are not RoPE's (learned absolute, ALiBi), or where no
            layer has RoPE.

    Source: that q and k have patterns of magnitude and phase that make the split possible is a claim of Han & Ji 2025
    (arXiv 2503.13305); these measures and the criterion are ours.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=[Planes()], null_seed=None)
        >>> data = report["planes"].dataset
        >>> data["concentration_k"].dims, bool((data["concentration_k"] <= 1).all())
        (('layer', 'head', 'plane'), True)
    """

    name: str = "planes"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, eps: float = EPS, n_distances: int | None = None, reference: int | float = 0):
        if not eps > 0:
            raise InputError(f"eps {eps}: the tolerance must be above 0")
        if n_distances is not None and n_distances < 1:
            raise InputError(f"n_distances {n_distances}: give at least 1")
        self.eps, self.n_distances, self.reference = eps, n_distances, reference
        self._longest = 0
        self._layers: dict[int, tuple[LayerGeometry, tuple[int, ...]]] = {}
        self._all: dict[int, PlaneMoments] = {}
        self._rest: dict[int, PlaneMoments] = {}

    def update(self, capture: LayerCapture) -> None:
        geometry, length = capture.geometry, capture.q.shape[1]
        if not geometry.rope.rotary_dim and geometry.encoding != "none":
            raise UnsupportedModelError(
                f"layer {capture.layer}: its positions are not RoPE's ({geometry.encoding}), so it has no planes; "
                "leave the planes analyzer out for this model (three_axis and variance work)"
            )
        if length < 2:
            raise InputError(f"planes: no token is left of a prompt of {length}; give a longer one")
        self._layers[capture.layer] = (geometry, tuple(capture.heads))
        self._longest = max(self._longest, length)
        if geometry.rope.rotary_dim:
            for sums, first in ((self._all, 0), (self._rest, 1)):
                moments = PlaneMoments.of(capture.q[:, first:], capture.k[:, first:], geometry.rope)
                sums[capture.layer] = sums[capture.layer] + moments if capture.layer in sums else moments

    def result(self) -> xr.Dataset:
        if not self._all:
            raise UnsupportedModelError(
                f"layers {', '.join(map(str, self._layers))}: none of them has RoPE, so there are no planes; "
                "choose other layers, or leave the planes analyzer out"
            )
        layers = sorted(self._layers)
        by_layer = xr.concat([self._layer(layer) for layer in sorted(self._all)], "layer", join="outer")
        attrs = {"n_distances": self.n_distances or self._longest, "eps": self.eps, "reference": self.reference}
        return by_layer.reindex(layer=layers).assign_attrs(attrs)

    def _layer(self, layer: int) -> xr.Dataset:
        geometry, heads = self._layers[layer]
        n = self.n_distances or self._longest
        n = min(n, geometry.window or n)
        found, rest = (
            uses(moments, geometry, n, self.reference, self.eps) | patterns(moments)
            for moments in (self._all[layer], self._rest[layer])
        )
        found |= {f"{name}_no_first": rest[name] for name in NO_FIRST}
        data = {name: (DIMS[value.ndim], numbers(value)) for name, value in found.items()}
        dataset = xr.Dataset(data, {"layer": layer, "head": list(heads), "plane": range(found["score"].shape[1])})
        by_eps = self._additive(found["std"], layer, n)
        dataset["wavelength"] = ("plane", numbers(2 * torch.pi / complex_frequencies(geometry.rope, geometry.d_head)))
        dataset["additive_by_eps"] = xr.DataArray(by_eps, {"eps": list(EPS_GRID)}, ("head", "eps"))
        return dataset

    def _additive(self, std: Tensor, layer: int, n: int) -> np.ndarray:
        geometry, moments = self._layers[layer][0], self._all[layer]
        where = (geometry.rope, geometry.scale, geometry.d_head, n, std)
        columns = [sufficiency(moments, *where, eps, self.reference).additive for eps in EPS_GRID]
        return numbers(torch.stack(columns, -1))


def patterns(moments: PlaneMoments) -> dict[str, Tensor]:
    """Every measure of `SidePattern` of both sides, and the phase between them."""
    found = {"relative_phase": relative_phase(moments)}
    for side, sums in (("q", moments.q), ("k", moments.k)):
        pattern = side_pattern(sums, moments.n)
        found |= {f"{field.name}_{side}": getattr(pattern, field.name) for field in fields(pattern)}
    return found


def uses(
    moments: PlaneMoments, geometry: LayerGeometry, n_distances: int, reference: int | float, eps: float
) -> dict[str, Tensor]:
    """What the planes carry, and which meet a condition of the sufficient criterion."""
    rope, scale, d_head = geometry.rope, geometry.scale, geometry.d_head
    parts = plane_parts(moments, rope, scale, d_head, torch.arange(n_distances))
    names = ("position", "meaning", "interaction")
    sums = {name: getattr(parts, name).sum(-1) for name in names}
    variance = torch.stack(list(sums.values())).sum(0)
    std, share = variance.sqrt(), parts.share()
    score = plane_scores(moments, rope, scale, d_head, n_distances, reference)
    met = sufficiency(moments, rope, scale, d_head, n_distances, std, eps, reference)
    conditions = {name: getattr(met, name) for name in CONDITIONS}
    return {
        **{f"{name}_by_plane": getattr(share, name) for name in names},
        **{name: part / variance for name, part in sums.items()},
        **{f"meets_{name}": condition for name, condition in conditions.items()},
        "planes_met": torch.stack(list(conditions.values())).any(0).double().mean(-1),
        "additive": met.additive,
        "score": score,
        "score_sum": score.sum(-1) / std,
        "std": std,
    }


def numbers(x: Tensor) -> np.ndarray:
    """Also of a mask: 0 and 1, so that NaN can stand for a layer that has no planes."""
    return x.detach().to("cpu", torch.float64).numpy()
