"""Analyzer of the variance decomposition: how much of each head's scores is query, key, distance, and interaction."""

from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.maths.variance import COMPONENTS, DistanceWeights, TripleMoments, VarianceShares, variance_shares
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry

PARTS = {"position": ("d", "qd"), "meaning": ("k", "qk"), "interaction": ("kd", "qkd")}


class Variance:
    r"""Var w(q, k, d) = shares of q, k, d, qk, qd, kd, qkd over all triples (query, key, distance) of the corpus.

    Per head: `position` = d + qd, `meaning` = k + qk, `interaction` = kd + qkd, each as a share of what softmax can see
    (q left out); `share_q` ... `share_qkd`, which sum to 1; `additive_r` = sqrt(1 - kd - qkd); `three_axis_share` =
    q + k + d; `variance`. The first token is left out, and `share_*_with_first` keep it. Moments add up exactly over
    any number of prompts; memory does not grow with them.

    A soft cap is not part of w: the decomposition is of the scores before it. ALiBi is, as part of d.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).

    Source: functional ANOVA (Hoeffding, Sobol); in closed form for attention scores by us.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=["variance"], null_seed=None)
        >>> shares = report["variance"].frame().filter(regex="^share_[qkd]+$")
        >>> bool((shares.sum(axis=1) - 1).abs().max() < 1e-6)
        True
    """

    name: str = "variance"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, n_distances: int | None = None, weights: DistanceWeights = "uniform"):
        self.n_distances, self.weights = n_distances, weights
        self._longest = 0
        self._layers: dict[int, tuple[LayerGeometry, tuple[int, ...]]] = {}
        self._all: dict[int, TripleMoments] = {}
        self._rest: dict[int, TripleMoments] = {}

    def update(self, capture: LayerCapture) -> None:
        self._layers[capture.layer] = (capture.geometry, tuple(capture.heads))
        self._longest = max(self._longest, capture.q.shape[1])
        for sums, first_token in ((self._all, True), (self._rest, False)):
            moments = TripleMoments.of(capture.q, capture.k, capture.geometry.rope, first_token=first_token)
            sums[capture.layer] = sums[capture.layer] + moments if capture.layer in sums else moments

    def result(self) -> xr.Dataset:
        n = self.n_distances or self._longest
        rest, everything = (
            {layer: self._shares(m, layer, n) for layer, m in s.items()} for s in (self._rest, self._all)
        )
        data = {part: self._stack(rest, lambda s, p=part: s.visible.share(*PARTS[p])) for part in PARTS}
        data |= {f"share_{name}": self._stack(rest, lambda s, c=name: s.share(c)) for name in COMPONENTS}
        data["additive_r"] = self._stack(rest, lambda s: s.additive_r)
        data["three_axis_share"] = self._stack(rest, lambda s: s.three_axis_share)
        data["variance"] = self._stack(rest, lambda s: s.total)
        data |= {
            f"share_{name}_with_first": self._stack(everything, lambda s, c=name: s.share(c)) for name in COMPONENTS
        }
        heads = next(iter(self._layers.values()))[1]
        attrs = {"n_distances": n, "weights": self.weights, "first_token": "left out; *_with_first keep it"}
        return xr.Dataset(data, {"layer": list(self._layers), "head": list(heads)}, attrs)

    def _shares(self, moments: TripleMoments, layer: int, n: int) -> VarianceShares:
        geometry, heads = self._layers[layer]
        n = min(n, geometry.window or n)
        bias = None
        if geometry.alibi_slopes is not None:
            distance = torch.arange(n, dtype=torch.float64, device=moments.q.mean.device)
            bias = -geometry.alibi_slopes.to(distance)[list(heads), None] * distance
        return variance_shares(moments, geometry.rope, geometry.scale, n, weights=self.weights, bias=bias)

    @staticmethod
    def _stack(
        shares: dict[int, VarianceShares], read: Callable[[VarianceShares], Tensor]
    ) -> tuple[tuple[str, str], np.ndarray]:
        return ("layer", "head"), torch.stack([read(s).cpu() for s in shares.values()]).numpy()
