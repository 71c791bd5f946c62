"""RoPE's planes: magnitude and phase of queries and keys in each, and what each plane of a head is used for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable, by_tokens
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Distances, NonNegative, Positive
from tl_posgen.core.sums import Sums
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import encoding_of
from tl_posgen.position.planes.numbers.plane_patterns import (
    PARTS,
    PlaneMoments,
    plane_parts,
    plane_scores,
    relative_phase,
    side_patterns,
    sufficiency,
)
from tl_posgen.position.planes.planes_figures import magnitude, phases, shares
from tl_posgen.rope.rotation import complex_frequencies

EPS = 0.5
EPS_GRID = (0.1, 0.2, 0.3, 0.5, 1.0)
CONDITIONS = {"position": "the key is nearly constant", "quiet": "it is too small to matter", "slow": "it hardly turns"}
WAVELENGTHS = [0, 16, 128, 1024, 8192, np.inf]  # in tokens: the bands of the table
WAVELENGTH_NAMES = ["up to 16", "16 to 128", "128 to 1024", "1024 to 8192", "above 8192"]

BOTH, OF_SIDE, OF_PART = ("tokens", *HEAD), ("tokens", "side", *HEAD), ("tokens", "part", *HEAD)
SHARE: dict[str, Any] = {"interval": True, "bounds": (0, 1)}
SPECTRUM = "(sum l)^2 / sum l^2, l the eigenvalues of E xx'"
CONSTANT = "|E z| / E|z|; 1: always the same vector"
EVERY = "over every (query, key, distance), as softmax sees them"
ADDS_UP = "of each part, adds up to 1 over planes; a negative plane works against the others"
SCORE = "scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m (d - d0) / 2)|"
MEETS = (
    "1 or 0. position: E|k - kbar| <= eps E|k|; quiet: 4 scale E|q| E|k| <= eps std; "
    "slow: max_d 2|sin(theta (d - d0) / 2)| <= eps"
)


def require_rope(self: Measure, model: Model) -> None:
    """Refuse a model none of whose layers rotates, as `Measure.requires`; layers that are not understood are refused
    when they run."""
    encoding = encoding_of(model)
    if encoding and "rotary" not in encoding:
        raise UnsupportedModelError(
            f"no layer of this model has RoPE (its positions: {encoding}), so it has no planes; leave planes, "
            "plane_sufficiency and plane_perturbation out (three_axis and variance work)"
        )


def _over_layers(measure: Measure, sums: Sums, found: Mapping[int, Mapping[str, Tensor]]) -> xr.Dataset:
    """Return arrays of layers with RoPE, and the wavelengths of their planes, as one dataset; other layers are NaN.

    Raises:
        UnsupportedModelError: no layer has RoPE.
    """
    if not found:
        raise UnsupportedModelError(
            f"layers {', '.join(map(str, sums.layers))}: none of them has RoPE, so there are no planes; "
            f"choose other layers, or leave {measure.name} out"
        )
    geometries = {layer: sums.layers[layer][0] for layer in found}
    wavelengths = {at: 2 * torch.pi / complex_frequencies(one.rope, one.d_head) for at, one in geometries.items()}
    whole = {layer: {**values, "wavelength": wavelengths[layer]} for layer, values in found.items()}
    return sums.variables_of(whole).reindex(layer=sorted(sums.layers))


@dataclass(frozen=True)
class Planes(Measure):
    r"""z^q_m, z^k_m, queries and keys of every head before RoPE as one complex number per plane m and token; and the
    plane's score s_m = scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m (d - d0) / 2)|.

    Queries and keys before RoPE, plane by plane: length, phase, concentration (1: always the same vector), and the
    share of the head's position and content that each plane carries. A head is certified additive (position + content)
    where in every plane the key is nearly constant, or query and key are too small to matter, or the plane hardly
    turns.

    Position, content and interaction are those of `variance`, plane by plane. Sum_m s_m bounds what a split into
    position and content can miss; each of the criterion's three conditions holds up to eps. A soft cap is not part of
    the scores here. A layer without RoPE among others (NoPE) is NaN throughout.

    Args:
        eps: tolerance of the criterion. 0.5 is the largest of 0.1, 0.2, 0.3, 0.5, 1 that certifies no randomly
            initialised or shuffled head of the two small models it was chosen on; at 0.1 no trained head is certified.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.
        reference: d0, the distance at which the key part is read.

    Raises:
        InputError: a prompt of one token.
        UnsupportedModelError: a model, or later a choice of layers, without RoPE (learned absolute positions, ALiBi).

    Source: the claim of patterns: Han & Ji 2025 (arXiv 2503.13305); measures and criterion: ours

    Example:
        >>> data = Planes(eps=0.3)("mini", "Down, down, down.", null_seeds=()).sel(tokens="all", side="k")
        >>> data["concentration"].dims, bool((data["concentration"] <= 1).all())
        (('layer', 'head', 'plane'), True)
    """

    eps: Positive = EPS
    n_distances: Distances | None = None
    reference: NonNegative = 0

    question = "What does each of RoPE's planes carry?"
    variables = {
        "mean": Variable("length of mean z", "", "|E z|", (*OF_SIDE, "plane")),
        "magnitude": Variable("mean length of z", "", "E|z|", (*OF_SIDE, "plane"), interval=True),
        "concentration": Variable("concentration", "", CONSTANT, (*OF_SIDE, "plane"), **SHARE),
        "phase": Variable("mean phase", "radians", "arg E z", (*OF_SIDE, "plane")),
        "phase_std": Variable("spread of the phase", "radians", "sqrt(-2 ln |E z/|z||)", (*OF_SIDE, "plane")),
        "energy": Variable("share of energy", "", "share of E|z|^2 over planes", (*OF_SIDE, "plane")),
        "participation": Variable("participation ratio", "", SPECTRUM, OF_SIDE, interval=True),
        "centred_participation": Variable(
            "participation ratio, centred", "", f"{SPECTRUM} less its mean", OF_SIDE, interval=True
        ),
        "rank": Variable("rank", "", "eigenvalues of E xx' above 1e-6 of the largest", OF_SIDE),
        "centred_rank": Variable("rank, centred", "", "eigenvalues of the covariance above 1e-6", OF_SIDE),
        "relative_phase": Variable(
            "phase between query and key", "radians", "arg E[z^q conj z^k] over j <= i", (*BOTH, "plane")
        ),
        "share": Variable("share", "", "of the part in std^2", OF_PART, **SHARE),
        "share_by_plane": Variable("share of the plane", "", ADDS_UP, (*OF_PART, "plane"), interval=True),
        "std": Variable("std of the scores", "logits", EVERY, BOTH, interval=True),
        "score": Variable("plane score", "logits", SCORE, (*BOTH, "plane")),
        "score_sum": Variable(
            "sum of plane scores / std", "", "sum_m s_m / std", BOTH, "plane_score_sum", "plane score", interval=True
        ),
        "meets": Variable("meets a condition", "", MEETS, ("tokens", "condition", *HEAD, "plane")),
        "planes_met": Variable("planes that meet a condition", "", "share of the head's planes", BOTH),
        "additive": Variable(
            "certified additive", "", "1: every plane meets a condition", (*BOTH, "eps"), "plane_additive"
        ),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta_m; inf: the unrotated rest", ("layer", "plane")),
    }
    requires = require_rope
    figures = {"phases": phases, "magnitude": magnitude, "shares": shares}
    curves = ("magnitude", "share_by_plane")
    legend = (
        "wavelength in tokens; planes: how many of a head are in the band, on average; concentration: |E z| / E|z|, 1 "
        "where z is always the same; magnitude: E|z|; position, content: the band's share of that part of the scores."
    )

    @property
    def all_eps(self) -> list[int | float]:
        """Every tolerance, ascending."""
        return sorted({self.eps, *EPS_GRID})

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"part": PARTS, "condition": list(CONDITIONS), "eps": self.all_eps}

    def usual(self) -> Mapping[str, Any]:
        return {"eps": self.eps}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        rope = layer.geometry.rope
        if not rope.rotary_dim:
            return {}
        both = [PlaneMoments.from_qk(layer.q, layer.k, rope, first_token=first) for first in (True, False)]
        return dict(zip(TOKENS, both, strict=True))

    def finish(self, sums: Sums) -> xr.Dataset:
        n = self.n_distances or max(sums.lengths.values())
        everything, rest = (sums.by_layer(tokens) for tokens in TOKENS)
        found = {
            layer: by_tokens(*(self.of_moments(one[layer], sums.layers[layer][0], n) for one in (everything, rest)))
            for layer in everything
        }
        return _over_layers(self, sums, found).assign_attrs(n_distances=n)

    def of_moments(self, moments: PlaneMoments, geometry: LayerGeometry, n: int) -> dict[str, Tensor]:
        """Return the variables of one layer over n distances, as many as its window has at most."""
        where = (geometry.rope, geometry.scale, min(n, geometry.window or n))
        by_plane = torch.stack(list(plane_parts(moments.triples, *where).values()))
        parts = by_plane.sum(-1)
        variance = parts.sum(0)
        std, score = variance.sqrt(), plane_scores(moments, *where, self.reference)
        meets = {
            eps: torch.stack(list(sufficiency(moments, *where, std, eps, self.reference).values()))
            for eps in self.all_eps
        }
        return side_patterns(moments) | {
            "relative_phase": relative_phase(moments),
            "share": parts / variance,
            "share_by_plane": by_plane / parts[..., None],
            "std": std,
            "score": score,
            "score_sum": score.sum(-1) / std,
            "meets": meets[self.eps],
            "planes_met": double(meets[self.eps].any(0)).mean(-1),
            "additive": torch.stack([one.any(0).all(-1) for one in meets.values()], -1),
        }

    def findings(self, own: Numbers) -> list[str]:
        met = ", ".join(f"{words} in {own('meets', condition=name):.0%}" for name, words in CONDITIONS.items())
        q, k = (f"{own('concentration', side=side):.3f}" for side in "qk")
        rest_q, rest_k = (f"{own('concentration', side=side, tokens='without first'):.3f}" for side in "qk")
        n_heads = int(own.data["additive"].sel(tokens="all", eps=self.eps).notnull().sum())
        return [
            f"Concentration |E z| / E|z| of queries is {q}, of keys {k}; without the first token {rest_q} and "
            f"{rest_k}. Participation ratio of K: {own('participation', side='k'):.3f}.",
            f"Of the planes, at eps = {self.eps:g}: {met}. The criterion certifies {own('additive'):.0%} of {n_heads} "
            f"heads as additive. Sum of plane scores / std: {own('score_sum'):.2f}.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a band of wavelengths: means over planes and heads; shares are summed over the band's planes."""
        means = {
            f"{name}_{side}": own.array(name, side=side) for name in ("concentration", "magnitude") for side in "qk"
        }
        sums = {part: own.array("share_by_plane", part=part) for part in PARTS[:2]}
        wavelength = own.array("wavelength").broadcast_like(own.array("score"))
        frame = own.frame({**means, **sums, "wavelength": wavelength}, *HEAD, "plane").dropna()
        frame["band"] = pd.cut(frame["wavelength"].clip(upper=1e300), WAVELENGTHS, labels=WAVELENGTH_NAMES)
        groups: Any = frame.groupby("band", observed=True)
        n_heads = frame.groupby(list(HEAD)).ngroups
        planes = groups.size() / n_heads
        whole = bool((planes % 1 == 0).all())  # heads mostly have equally many planes in a band
        columns = {"planes": planes.astype(int) if whole else planes} | {name: groups[name].mean() for name in means}
        columns |= {name: groups[name].sum() / n_heads for name in sums}
        return pd.DataFrame(columns).reset_index(names="wavelength")
