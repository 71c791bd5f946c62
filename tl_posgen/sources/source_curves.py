"""Curves over distance of the strongest pairs of a query source and a key source."""

import numpy as np
import torch
import xarray as xr
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.sums import Sums
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights, turning
from tl_posgen.rope.planes import along_distances
from tl_posgen.rope.rotation import complex_planes

N_PAIRS = 4
PAIR = (*HEAD, "pair")
CURVES = {
    "curve": Variable(
        "scores of two sources", "logits", "a_st(d) = s <R_d E q_s, E k_t>, less its mean over d", (*PAIR, "distance")
    ),
    "whole_curve": Variable("scores of mean query and mean key", "logits", "the sum of all pairs", (*HEAD, "distance")),
    "pair_share": Variable("share of the pair", "", "cov_d(a_st, a) / var_d a; those of all pairs sum to 1", PAIR),
    "pair_sources": Variable("query source, key source", "", "their names", PAIR),
}


def strongest_pairs(sums: Sums, n_distances: int | None, weights: DistanceWeights) -> xr.Dataset:
    """Return `CURVES`: the pairs of sources whose curves make most of each head's.

    a(d) = sum_st a_st(d) exactly, a_st(d) = scale Re sum_m qbar_s,m conj(kbar_t,m) u_m(d), first token left out.
    """
    found = []
    for layer, (geometry, heads) in sums.layers.items():
        moments, q, k = (sums.by_layer(f"{what} {TOKENS[1]}")[layer] for what in ("moments", "q", "k"))
        n = n_distances or max(sums.lengths.values())
        turn, share = turning(moments, geometry.rope, min(n, geometry.window or n), weights)
        turn = turn - share.to(turn) @ turn
        zq, zk = (complex_planes(side.means, geometry.rope).to(turn) for side in (q, k))
        shares, places, curves, whole = curves_of_pairs(zq, zk, geometry.scale * turn, share)
        names = np.array([f"{one} · {other}" for one in q.names for other in k.names], dtype=object)
        if not geometry.rope.rotary_dim:  # a(d) is constant, and what is left of it rounding
            shares = shares * torch.nan
        curves, whole, shares, places = (one.cpu().numpy() for one in (curves, whole, shares, places))
        values = {
            "curve": (("head", "pair", "distance"), curves),
            "whole_curve": (("head", "distance"), whole),
            "pair_share": (("head", "pair"), shares),
            "pair_sources": (("head", "pair"), np.where(np.isnan(shares), "", names[places])),
        }
        labels = {"layer": layer, "head": heads, "pair": range(shares.shape[1]), "distance": range(whole.shape[1])}
        found.append(xr.Dataset(values, labels))
    data = sums.join_layers(found)
    return data.assign(pair_sources=data["pair_sources"].fillna(""))


def curves_of_pairs(
    zq: Complex[Tensor, "query_source head plane"],
    zk: Complex[Tensor, "key_source head plane"],
    turn: Complex[Tensor, "distance plane"],
    weights: Float[Tensor, " distance"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return share and place [head, pair] of the pairs with the largest |cov_d(a_st, a)|, their curves
    [head, pair, distance], and a [head, distance]; a place counts key sources first.

    Args:
        turn: u_m(d) less its mean, times the scale.
        weights: of distances, which add up to 1.
    """
    products = torch.einsum("shm,thm->hstm", zq, zk.conj()).flatten(1, 2)
    whole = along_distances(products.sum(1), turn)
    along = (weights.to(whole) * whole).to(turn) @ turn
    covariance = torch.einsum("hpm,hm->hp", products, along).real
    shares = covariance / (weights * whole.square()).sum(-1, keepdim=True)
    places = shares.abs().nan_to_num().topk(min(N_PAIRS, shares.shape[1]), dim=-1).indices
    chosen = products.take_along_dim(places[..., None], 1)
    return shares.take_along_dim(places, 1), places, along_distances(chosen, turn), whole
