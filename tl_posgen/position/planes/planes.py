"""RoPE's planes: magnitude and phase of queries and keys in each, and what each plane of a head is used for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.collector import MomentsCollector, Variable
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import encoding_of
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import MOST_DISTANCES, check_whole
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN, without_first_token
from tl_posgen.position.planes.plane_patterns import (
    PARTS,
    PlaneMoments,
    plane_parts,
    plane_scores,
    relative_phase,
    side_pattern,
    sufficiency,
)
from tl_posgen.position.planes.planes_figures import magnitude, phases, shares
from tl_posgen.report.sentences import beside, head_reference, means
from tl_posgen.rope.rotation import complex_frequencies
from tl_posgen.summary import Summary

EPS = 0.5
EPS_GRID = (0.1, 0.2, 0.3, 0.5, 1.0)
CONDITIONS = {"position": "the key is nearly constant", "quiet": "it is too small to matter", "slow": "it hardly turns"}
DIMS = {1: ("head",), 2: ("head", "plane")}
WITH_AND_WITHOUT = (
    *(f"{name}_{side}" for name in ("mean", "magnitude", "concentration", "phase", "energy") for side in "qk"),
    *(f"{part}_by_plane" for part in PARTS),
    *("score", "score_sum", "std", *PARTS, "additive"),
)


@dataclass(frozen=True)
class Planes(Options):
    r"""z^q_m, z^k_m, queries and keys of every head before RoPE as one complex number per plane m and token; and the
    plane's score s_m = scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m (d - d0) / 2)|.

    A plane is constant where |E z| / E|z| is 1. Position, content and interaction are the parts of a head's variance
    that `variance` has too, here plane by plane. Sum_m s_m bounds what a split into position and content can miss: a
    head is certified additive where in every plane the key is nearly constant, |k| and |q| are too small to matter, or
    the plane hardly turns, each up to eps.

    `*_without_first_token` leave it out. Moments add up over prompts; memory does not grow with them. A soft cap is not
    part of the scores here. A layer without RoPE among others (NoPE) is NaN throughout.

    Args:
        eps: tolerance of the criterion. 0.5 is the largest of 0.1, 0.2, 0.3, 0.5, 1 that certifies no randomly
            initialised or shuffled head of the two small models it was chosen on; at 0.1 no trained head is certified.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.
        reference: d0, the distance at which the key part is read.

    Raises:
        InputError: eps not above 0, fewer than one distance, a reference that is no number; a prompt of one token.
        UnsupportedModelError: a model, or later a choice of layers, without RoPE (learned absolute positions, ALiBi).

    Source: that q and k have patterns of magnitude and phase that make the split possible is a claim of Han & Ji 2025
    (arXiv 2503.13305); these measures and the criterion are ours.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", measures=[Planes(eps=0.3)], null_seeds=())
        >>> data = report["planes"].dataset
        >>> data["concentration_k"].dims, bool((data["concentration_k"] <= 1).all())
        (('layer', 'head', 'plane'), True)
    """

    eps: int | float = EPS
    n_distances: int | None = None
    reference: int | float = 0

    def check(self) -> None:
        if not 0 < self.eps < math.inf:
            raise InputError(f"planes: eps={self.eps!r}: the tolerance must be a number above 0")
        check_whole("planes", 1, MOST_DISTANCES, n_distances=1 if self.n_distances is None else self.n_distances)
        if not 0 <= self.reference < math.inf:
            raise InputError(f"planes: reference={self.reference!r}: give a distance, such as 0")


def require_rope(model: Model) -> None:
    """Refuse a model none of whose layers rotates; one whose layers are not understood is refused when it runs."""
    encoding = encoding_of(model)
    if encoding and "rotary" not in encoding:
        raise UnsupportedModelError(
            f"no layer of this model has RoPE (its positions: {encoding}), so it has no planes; leave planes, "
            "plane_sufficiency, plane_interaction, plane_perturbation and any_distance out "
            "(three_axis and variance work)"
        )


def require_planes(measure: str, found: MomentsCollector) -> None:
    """Refuse layers none of which rotates."""
    if not found.moments:
        raise UnsupportedModelError(
            f"layers {', '.join(map(str, found.layers))}: none of them has RoPE, so there are no planes; "
            f"choose other layers, or leave {measure} out"
        )


class PlanesCollector(MomentsCollector):
    """Its moments: by layer, and first token that counts, 0 or 1."""

    options: Planes

    def update(self, layer: LayerCapture) -> None:
        geometry, length = layer.geometry, layer.length
        if not geometry.rope.rotary_dim and geometry.encoding != "none":
            raise UnsupportedModelError(
                f"layer {layer.layer}: its positions are not RoPE's ({geometry.encoding}), so it has no planes; "
                "leave planes out for this model (three_axis and variance work)"
            )
        if length < 2:
            raise InputError(f"planes: no token is left of a prompt of {length}; give a longer one")
        firsts = (0, 1) if geometry.rope.rotary_dim else ()
        both = {first: PlaneMoments.from_qk(layer.q[:, first:], layer.k[:, first:], geometry.rope) for first in firsts}
        self.take(layer, {(layer.layer, first): moments for first, moments in both.items()})

    def dataset(self) -> xr.Dataset:
        require_planes("planes", self)
        data = self.over_layers(self._layer(layer) for layer, first in sorted(self.moments) if first)
        attrs = {"n_distances": self.options.n_distances or self.longest, "eps": self.options.eps}
        return data.assign_attrs(attrs | {"reference": self.options.reference})

    def _layer(self, layer: int) -> xr.Dataset:
        geometry, heads = self.layers[layer]
        n = self.options.n_distances or self.longest
        n = min(n, geometry.window or n)
        both = [self.moments[layer, first] for first in (0, 1)]
        found, rest = (uses(moments, geometry, n, self.options) | patterns(moments) for moments in both)
        found |= {f"{name}{WITHOUT_FIRST_TOKEN}": rest[name] for name in WITH_AND_WITHOUT}
        data = {name: (DIMS[value.ndim], numbers(value)) for name, value in found.items()}
        dataset = xr.Dataset(data, {"layer": layer, "head": heads, "plane": range(found["score"].shape[1])})
        where = (geometry.rope, geometry.scale, geometry.d_head, n, found["std"])
        by_eps = [any_met(sufficiency(both[0], *where, eps, self.options.reference)).all(-1) for eps in EPS_GRID]
        dataset["wavelength"] = ("plane", numbers(2 * torch.pi / complex_frequencies(geometry.rope, geometry.d_head)))
        dataset["additive_by_eps"] = (("head", "eps"), numbers(torch.stack(by_eps, -1)))
        return dataset.assign_coords(eps=list(EPS_GRID))


def patterns(moments: PlaneMoments) -> dict[str, Tensor]:
    """What `side_pattern` says of both sides, and the phase between them."""
    found = {"relative_phase": relative_phase(moments)}
    for side, sums in (("q", moments.q), ("k", moments.k)):
        found |= {f"{name}_{side}": value for name, value in side_pattern(sums, moments.n).items()}
    return found


def uses(moments: PlaneMoments, geometry: LayerGeometry, n_distances: int, options: Planes) -> dict[str, Tensor]:
    """What the planes carry, and which meet a condition of the sufficient criterion."""
    rope, scale, d_head = geometry.rope, geometry.scale, geometry.d_head
    parts = plane_parts(moments, rope, scale, d_head, torch.arange(n_distances))
    sums = {name: part.sum(-1) for name, part in parts.items()}
    variance = torch.stack(list(sums.values())).sum(0)
    std = variance.sqrt()
    score = plane_scores(moments, rope, scale, d_head, n_distances, options.reference)
    met = sufficiency(moments, rope, scale, d_head, n_distances, std, options.eps, options.reference)
    return {
        **{f"{name}_by_plane": part / sums[name][:, None] for name, part in parts.items()},
        **{name: part / variance for name, part in sums.items()},
        **{f"meets_{name}": condition for name, condition in met.items()},
        "planes_met": any_met(met).double().mean(-1),
        "additive": any_met(met).all(-1),
        "score": score,
        "score_sum": score.sum(-1) / std,
        "std": std,
    }


def any_met(conditions: Mapping[str, Tensor]) -> Tensor:
    """Which planes meet a condition."""
    return torch.stack(list(conditions.values())).any(0)


def numbers(x: Tensor) -> np.ndarray:
    """Also of a mask: 0 and 1, so that NaN can stand for a layer that has no planes."""
    return x.detach().to("cpu", torch.float64).numpy()


# What is shown

SHOWN = (
    *(f"{name}{suffix}" for suffix in ("", WITHOUT_FIRST_TOKEN) for name in ("concentration_q", "concentration_k")),
    *(f"meets_{name}" for name in CONDITIONS),
    *("participation_k", "additive", "score_sum"),
)
BANDS = [0, 16, 128, 1024, 8192, np.inf]  # of wavelengths, in tokens
BAND_NAMES = ["up to 16", "16 to 128", "128 to 1024", "1024 to 8192", "above 8192"]
BAND_MEANS = ("concentration_q", "concentration_k", "magnitude_q", "magnitude_k")
BAND_SUMS = ("position_by_plane", "content_by_plane")


def summarise(data: xr.Dataset) -> Summary:
    return {
        "eps": float(data.attrs["eps"]),
        "n_heads": int(data["additive"].notnull().sum()),
        **means(data, *SHOWN),
        **{f"{part}_highest_head": head_reference(data, part) for part in PARTS},
    }


def findings(own: Summary, null: Any) -> list[str]:
    met = ", ".join(f"{words} in {beside(own, null, f'meets_{name}', '.0%')}" for name, words in CONDITIONS.items())
    rest = [beside(own, null, f"concentration_{side}{WITHOUT_FIRST_TOKEN}") for side in "qk"]
    return [
        f"Concentration |E z| / E|z| of queries is {beside(own, null, 'concentration_q')}, of keys "
        f"{beside(own, null, 'concentration_k')}; without the first token {rest[0]} and {rest[1]}. "
        f"Participation ratio of K: {beside(own, null, 'participation_k')}.",
        f"Of the planes, at eps = {own['eps']:g}: {met}. The criterion certifies "
        f"{beside(own, null, 'additive', '.0%')} of {own['n_heads']} heads as additive. Sum of plane scores / std: "
        f"{beside(own, null, 'score_sum', '.2f')}.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row a band of wavelengths: means over planes and heads; shares are summed over the band's planes."""
    wavelength = data["wavelength"].broadcast_like(data["score"])
    frame = data[[*BAND_MEANS, *BAND_SUMS]].assign(wavelength=wavelength).to_dataframe().dropna()
    frame["band"] = pd.cut(frame["wavelength"].clip(upper=1e300), BANDS, labels=BAND_NAMES)
    groups = frame.groupby("band", observed=True)
    n_heads = frame.groupby(["layer", "head"]).ngroups
    columns = {"planes": whole_numbers(groups.size() / n_heads)} | {name: groups[name].mean() for name in BAND_MEANS}
    columns |= {name.removesuffix("_by_plane"): groups[name].sum() / n_heads for name in BAND_SUMS}
    return pd.DataFrame(columns).reset_index(names="wavelength")


def whole_numbers(counts: pd.Series) -> pd.Series:
    """As integers where they are: every head has as many planes in a band as the others, mostly."""
    return counts.astype(int) if (counts % 1 == 0).all() else counts


PLANE, HEAD = ("layer", "head", "plane"), ("layer", "head")
OF_A_SIDE = {  # one variable each for queries and for keys
    "mean": Variable("length of mean z", description="|E z|", dims=PLANE),
    "magnitude": Variable("mean length of z", description="E|z|", dims=PLANE, interval=True),
    "concentration": Variable(
        "concentration",
        description="|E z| / E|z|; 1: always the same vector",
        dims=PLANE,
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "phase": Variable("mean phase", "radians", "arg E z", PLANE),
    "phase_std": Variable("spread of the phase", "radians", "sqrt(-2 ln |E z/|z||)", PLANE),
    "energy": Variable("share of energy", description="share of E|z|^2 over planes", dims=PLANE),
    "participation": Variable(
        "participation ratio", description="(sum l)^2 / sum l^2, l the eigenvalues of E xx'", interval=True
    ),
    "centred_participation": Variable(
        "participation ratio, centred", description="the same of the covariance", interval=True
    ),
    "rank": Variable("rank", description="eigenvalues of E xx' above 1e-6 of the largest"),
    "centred_rank": Variable("rank, centred", description="the same of the covariance"),
}
SCORE = "scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m (d - d0) / 2)|"
SHARE = "adds up to 1 over planes; a negative plane works against the others"
VARIABLES = {
    f"{name}_{side}": replace(one, label=f"{one.label}, {word}")
    for name, one in OF_A_SIDE.items()
    for side, word in (("q", "queries"), ("k", "keys"))
} | {
    "relative_phase": Variable("phase between query and key", "radians", "arg E[z^q conj z^k] over j <= i", PLANE),
    "position_by_plane": Variable("share of the position part", "", SHARE, PLANE, interval=True),
    "content_by_plane": Variable("share of the content part", "", SHARE, PLANE, interval=True),
    "interaction_by_plane": Variable("share of the interaction", "", SHARE, PLANE, interval=True),
    "score": Variable("plane score", "logits", SCORE, PLANE),
    "meets_position": Variable("key nearly constant", description="E|k - kbar| <= eps E|k|: 1 or 0", dims=PLANE),
    "meets_quiet": Variable("too small to matter", description="4 scale E|q| E|k| <= eps std: 1 or 0", dims=PLANE),
    "meets_slow": Variable("hardly turns", description="max_d 2|sin(theta (d - d0) / 2)| <= eps: 1 or 0", dims=PLANE),
    "wavelength": Variable("wavelength", "tokens", "2 pi / theta_m; inf: the unrotated rest", ("layer", "plane")),
    **{
        part: Variable(f"{part} share", description="share of std^2", interval=True, bounds=(0.0, 1.0))
        for part in PARTS
    },
    "std": Variable(
        "std of the scores", "logits", "over every (query, key, distance), as softmax sees them", interval=True
    ),
    "score_sum": Variable(
        "sum of plane scores / std", "", "sum_m s_m / std", HEAD, "plane_score_sum", "plane score", True
    ),
    "planes_met": Variable("planes that meet a condition", description="share of the head's planes"),
    "additive": Variable("certified additive", "", "1: every plane meets a condition", HEAD, "plane_additive"),
    "additive_by_eps": Variable("certified additive by eps", dims=("layer", "head", "eps")),
}
VARIABLES |= without_first_token({name: VARIABLES[name] for name in WITH_AND_WITHOUT})

MEASURE = Measure(
    name="planes",
    question="What does each of RoPE's planes carry?",
    explanation=(
        "Queries and keys before RoPE, plane by plane: how long, how constant (concentration 1: always the same "
        "vector), at which phase; and how much of the head's position part and content part each plane carries. A head "
        "is certified additive where in every plane the key is nearly constant, or query and key are too small to "
        "matter, or the plane hardly turns."
    ),
    source="the claim of patterns: Han & Ji 2025 (arXiv 2503.13305); measures and criterion: ours",
    options=Planes,
    collector=PlanesCollector,
    requires=require_rope,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=("magnitude_q", "magnitude_k", "position_by_plane", "content_by_plane"),
    by_head=frozenset({"shares"}),
    figures={"phases": phases, "magnitude": magnitude, "shares": shares},
    table=table,
    legend=(
        "wavelength in tokens; planes: how many of a head are in the band, on average; concentration: |E z| / E|z|, 1 "
        "where z is always the same; magnitude: E|z|; position, content: the band's share of that part of the scores."
    ),
)
