"""Constants of sources: their curves over distance, whether they need tokens that vary, slash scores without them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.hooks.given import under
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights, turning
from tl_posgen.residual.numbers import REST
from tl_posgen.residual.residual_sources import By, ResidualSources
from tl_posgen.rope.planes import along_distances
from tl_posgen.rope.rotation import complex_planes, rotate
from tl_posgen.slash.layer_means import statistics_from_qk
from tl_posgen.sources.source_sums import Letter, SourcedSide, SourceSums, folded, read_prompts
from tl_posgen.stats.correlations import rank_correlation

# Curves over distance of the strongest pairs of a query source and a key source


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
        shares, places, curves, whole = _curves_of_pairs(zq, zk, geometry.scale * turn, share)
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


def _curves_of_pairs(
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


# A prompt of mean tokens: does what a source writes on average need tokens that vary?


NEGLIGIBLE = 1e-6  # of the longest constant: rounding
N_TOKENS = 8  # of a prompt of mean tokens, where positions are not learned
OF_MEAN_TOKEN = Variable(
    "cosine of the constant with the mean token's",
    "",
    "cos(E x_s, what s writes where every token is the mean one), x the keys or queries; a cosine, as norms before the "
    "projection divide the mean token by less",
    ("side", *HEAD, "source"),
    bounds=(-1, 1),
)


@dataclass
class MeanToken:
    """Mean of the embeddings of all tokens but the first of each prompt, and the sources that it gives rise to.

    Attributes:
        n: how many tokens were added.
        total: the sum of their embeddings.
    """

    n: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, written: ResidualSources) -> None:
        """Add the tokens of one prompt."""
        tokens = written.values[written.names.index("embed")][REST]
        self.n, self.total = self.n + len(tokens), self.total.to(tokens) + tokens.sum(0)

    def cosines_of(
        self, run: Run, sums: Sums, sides: Sequence[Letter], by: By, fold: Mapping[str, str], every: Sequence[str]
    ) -> xr.DataArray:
        """Return `OF_MEAN_TOKEN` of the sources `every`, from one short pass; NaN of sources without a constant."""
        hooks, row = self.hooks(run.model.hook_dict), max(run.rows, key=len)
        row, found = row if len(hooks) > 1 else row[:N_TOKENS], dict[int, Any]()
        with under(run.session, hooks):
            for capture, written in read_prompts(run, by, [row]):
                own = folded(written, fold)
                sourced = {side: SourcedSide.of_capture(run.session, capture, own, side) for side in sides}
                found_cosines = [
                    _cosines(one, sums.by_layer(f"{side} {TOKENS[1]}")[capture.layer], every)
                    for side, one in sourced.items()
                ]
                found[capture.layer] = torch.stack(found_cosines).cpu().numpy()
        return sums.over_layers("of_mean_token", found).assign_coords(source=np.array(every, object))

    def hooks(self, known: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return hooks, at points that the model has, that put the mean token in the place of every token, learned
        positions as they are."""
        positions: list[Tensor] = []

        def keep(value: Tensor, hook: Any) -> None:
            positions[:] = [value]

        def replace(value: Tensor, hook: Any) -> Tensor:
            mean = (self.total / self.n).to(value)
            return mean.expand_as(value) if not positions else mean + positions[0].expand_as(value)

        hooks = [("hook_pos_embed", keep), ("blocks.0.hook_resid_pre", replace)]
        return [(name, hook) for name, hook in hooks if name in known]


def _cosines(sourced: SourcedSide, sums: SourceSums, every: Sequence[str]) -> Float[Tensor, "head source"]:
    """cos(x_s, E x_s) of every source, x_s the mean over this prompt; NaN of a source without one or the other."""
    own = SourceSums(sourced.whole.shape[1] - 1, sourced.names, sourced.sums(REST)).of_names(every)
    constant = sums.of_names(every).to(own.device)
    lengths = own.norm(dim=-1), constant.norm(dim=-1)
    known = [length > NEGLIGIBLE * length.amax(0) for length in lengths]
    cosine = (own * constant).sum(-1) / (lengths[0] * lengths[1])
    return cosine.masked_fill(~(known[0] & known[1]), torch.nan).clamp(-1, 1).mT


# Slash scores without the constant that a source writes into the keys


UNTOUCHED = "untouched"
OF_SOURCE = (*HEAD, "source")
PREDICTORS = {  # of the fall of the slash score -> its variable
    "position share": "share",
    "energy of the constant": "constant_energy",
    "energy of the source": "energy",
}
CHECKED = {
    "fall": Variable(
        "fall of the slash score",
        "",
        "1 - score without the source's constant in the keys / score, at the head's best D < N/2",
        OF_SOURCE,
        interval=True,
    ),
    "constant_energy": Variable("energy of the constant", "", "|E k_s|^2", OF_SOURCE),
    "energy": Variable("energy of the source", "", "E |k_s|^2", OF_SOURCE),
    "rho": Variable(
        "Spearman's rho with the fall",
        "",
        "over all heads and sources of layers with several sources",
        ("predictor",),
        interval=True,
        bounds=(-1, 1),
    ),
}


def without_constants(run: Run, capture: LayerCapture, written: ResidualSources, rest: SourceSums) -> dict[str, Any]:
    """Return slash scores of a prompt untouched and without the constant of each source, and energies of sources.

    Args:
        rest: sums over the other prompts of what each source adds to the keys, which give the constants.
    """
    n_distances = max(1, min(map(len, run.rows)) // 2)
    sourced = SourcedSide.of_capture(run.session, capture, written, "k")
    scores = [statistics_from_qk(capture, capture.rotated_q, capture.rotated_k).score[0]]
    for constant in rest.means:
        keys = rotate(capture.k - constant[:, None].to(capture.k), capture.positions, capture.geometry.rope)
        scores.append(statistics_from_qk(capture, capture.rotated_q, keys).score[0])
    names = UNTOUCHED, *rest.names
    return {
        "slash": SourceSums(1, names, double(torch.stack(scores)[..., :n_distances])),
        "energy": SourceSums(capture.length - 1, sourced.names, sourced.energies(REST)),
    }


def checked(sums: Sums, share: xr.DataArray) -> xr.Dataset:
    """Return the fall of the slash score of every head and source, what may predict it, and how well it does.

    Args:
        share: [layer, head, source] of position, keys.
    """
    found = []
    for layer, scores in sums.by_layer("slash").items():
        constants, energies = sums.by_layer(f"k {TOKENS[1]}")[layer], sums.by_layer("energy")[layer]
        names = constants.names
        untouched, *others = scores.of_names([UNTOUCHED, *names]) / scores.n
        best = untouched.argmax(-1, keepdim=True)
        at_best = torch.stack(others).gather(-1, best.expand(len(others), -1, -1))[..., 0]
        values = {
            "fall": 1 - at_best / untouched.gather(-1, best)[:, 0],
            "constant_energy": constants.means.square().sum(-1),
            "energy": energies.of_names(names) / energies.n,
        }
        arrays = {name: (("source", "head"), value.numpy()) for name, value in values.items()}
        found.append(xr.Dataset(arrays, {"layer": layer, "head": sums.layers[layer][1], "source": list(names)}))
    data = sums.join_layers(found).reindex(source=share["source"]).transpose(*OF_SOURCE)
    columns = {"share": share, **data.data_vars}
    fall = _spread_of(data["fall"].where(share.notnull().sum("source") > 1))
    rho = [rank_correlation(_spread_of(columns[name]), fall).r for name in PREDICTORS.values()]
    return data.assign(rho=xr.DataArray(rho, {"predictor": list(PREDICTORS)}))


def _spread_of(array: xr.DataArray) -> torch.Tensor:
    """Return the values at all heads and sources as one column."""
    return torch.tensor(array.transpose(*OF_SOURCE).values.ravel(), dtype=DOUBLE)
