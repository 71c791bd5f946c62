"""Controlled distance: what each head's scores, and the loss, become when pairs see another distance than theirs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, NonNegative
from tl_posgen.core.run import Run
from tl_posgen.interventions import Interventions
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit
from tl_posgen.position.decomposition.three_axis import fit_capture, fits_of
from tl_posgen.position.distance.hooks import (
    at_dummy_distance,
    scores_at_distance,
    training_length,
)
from tl_posgen.position.distance.numbers import key_agreement, table_energies
from tl_posgen.report.head_figures import head_map, layer_curves
from tl_posgen.report.kinds import heat_maps
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import complex_planes, rotate
from tl_posgen.rope.scores_at import unturned
from tl_posgen.stats.correlations import pearson

PARTS = ("distance", "key", "distance × key")
_LIMITS = (1, 2, 4, 8, 16, 32, 64, 128)
BOTH = ("tokens", *HEAD)
_KEY_PART = "corr of M with its key part, each distance's mean removed, sqrt(key / (key + distance × key))"
_AGREEMENT = "corr over keys of M at d0 with M at the other, mean over queries"
_REFIT = "corr of c with that of a fit with every pair at d0, both without a linear trend"
_curves: Any = partial(layer_curves, log_x=True, share=1.0)


def curve_under_intervention(capture: LayerCapture) -> Float[Tensor, "head distance"]:
    """mean_{j <= i} scale <R_d q_i, R_0 k_j> - slope d for d = 0 .. n - 1, from one product of cumulative sums."""
    geometry = capture.geometry
    zq, zk = (complex_planes(double(x), geometry.rope) for x in (capture.q, capture.k))
    n = zq.shape[1]
    pairs = (zq * zk.cumsum(1).conj()).sum(1) / (n * (n + 1) / 2)
    curve = geometry.scale * mean_curves(pairs, geometry.rope, n, capture.q.shape[-1])
    bias = geometry.distance_bias(double(capture.positions), capture.heads)
    return curve if bias is None else curve + bias


def refit_r(capture: LayerCapture, distances: Real[Tensor, " distance"]) -> Float[Tensor, "tokens=2 head distance"]:
    """corr_j(c, c') of the key parts of two three-axis fits: at the true distances, and with every pair at d0.

    With the first token and without it; NaN where a fit has as many parameters as pairs.
    """
    geometry, fits_by_distance = capture.geometry, []
    for d0 in distances.tolist():
        if capture.bilinear:  # no matrix
            turned = rotate(capture.q, torch.full_like(capture.positions, d0, dtype=DOUBLE), geometry.rope)
            k = unturned(capture.k, geometry.rope)
            moments = pair_moments(turned, k, geometry.scale, window=geometry.window)
        else:
            moments = pair_moments_from_scores(scores_at_distance(capture, d0, None), window=geometry.window)
        fits_by_distance.append(fits_of(moments))
    by_tokens = zip(capture.shared(fit_capture), zip(*fits_by_distance, strict=True), strict=True)
    return torch.stack([torch.stack([same_key_part(fit, refit) for refit in refits], -1) for fit, refits in by_tokens])


def same_key_part(fit: ThreeAxisFit | None, refit: ThreeAxisFit | None) -> Float[Tensor, " head"]:
    """corr over keys of c without its mean and its linear trend, which does not depend on the gauge of the fits. Ours.

    No data determine the trend of c: a_d + t d, b_i - t i, c_j + t j is the same fit for every t. In the gauge
    "flat_keys" c has neither mean nor trend, so its plain correlation is the one wanted.
    """
    assert fit is not None, "prompts have two tokens at least, so one is left"
    assert refit is not None
    if fit.pairs.saturated:
        return torch.full_like(fit.r, torch.nan)
    keys = slice(fit.pairs.first, None)
    return pearson(fit.c[:, keys], refit.c[:, keys])


@dataclass(frozen=True)
class DummyDistance(Interventions):
    r"""M_dj = scale <R_d q, R_0 k_j>: each query against each key at every distance, split into distance, key and
    distance × key.

    Each query meets each key at every distance d, and this table is split into a distance part, a key part and what
    takes both, distance × key. (The interaction of the variance decomposition is over all queries at once.) The
    three-axis fit is made again with every pair at one distance. Then the running model sees every pair at one
    distance, or no distance beyond a limit.

    Shares are of M's variance over the distances 0 .. length - 1, none beyond the training length (cfg.n_ctx) or the
    layer's window; energies are summed over queries. `layers` and `heads` choose which heads see another distance in
    the running model.

    Args:
        distances: dummy distances d0 of the agreement, of the fits made again and of the intervention. Left out: 0 and
            the powers of two below the training length.
        limits: "frozen beyond" interventions: distances above see the limit.
        longest: how many distances the tables have at most; the training length if left out.

    Raises:
        InputError: unusable prompts, distances for which the model has no fixed frequencies.
        UnsupportedModelError: models whose scores know no distance.

    Source: the claim (the key part stays, the distance part shifts) is of Han & Ji 2025 (arXiv 2503.13305); tables,
    measures and curves are our reconstruction.

    Example:
        >>> short = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> text = "Down, down, down. Would the fall never come to an end? I wonder how many miles I've fallen."
        >>> found = DummyDistance(distances=(0, 64), limits=(8,))("mini", text, **short).sel()["key_agreement"]
        >>> found.dims, bool((found.sel(tokens="all", d0=64, other_d0=64).round(6) == 1).all())
        (('tokens', 'layer', 'head', 'd0', 'other_d0'), True)
    """

    distances: Annotated[Sequence[NonNegative], Each()] | None = None
    limits: Annotated[Sequence[NonNegative], Each()] = _LIMITS
    longest: Count | None = None

    question = "Does the key part stay when the distance changes?"
    matrices = 7
    variables = {
        "additive_r": Variable.share("additive r", "corr of M with its best f(query, distance) + g(query, key)", BOTH),
        "key_part_r": Variable.share("key part r", _KEY_PART, BOTH),
        "share": Variable.share("share of M's variance", "of each part", ("tokens", "part", *HEAD)),
        "key_agreement": Variable.correlation("agreement of the key part", _AGREEMENT, (*BOTH, "d0", "other_d0")),
        "refit_r": Variable.correlation("agreement of c, fitted again", _REFIT, (*BOTH, "d0")),
        "curve": Variable(
            "score by distance", "logits", "mean score of visible pairs, all put at d", (*HEAD, "distance")
        ),
        **Interventions.variables,
    }
    rows = HEAD
    whole_rows = True
    curves = ("refit_r", "curve")
    by_head = frozenset({"refits", "curves"})
    legend = (
        "at: every pair at that distance; beyond: distances above it seen as it; loss in nats per token; rise: over "
        "the unchanged model's; low, high: its 95% interval; refit r: key part fitted with every pair at that "
        "distance, against that at the true distances."
    )
    caveats = {
        "alibi": "nothing rotates, and the table leaves the slope out, so it is the same at every distance: additive "
        "r, key part r and every agreement are 1 by construction. The curves and the losses have the slope.",
        "none": "nothing rotates, so the table is the same at every distance: additive r, key part r and every "
        "agreement are 1 by construction, and no dummy distance changes the loss.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        d0s, limits = (np.asarray(() if field is None else field).tolist() for field in (self.distances, self.limits))
        return {"d0": d0s, "other_d0": d0s, "limit": limits, "part": PARTS}

    def requires(self, session: Session) -> None:
        session.require_relative_positions(self.name)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "DummyDistance":
        trained = training_length(session)
        labels, powers = self.labels(), (2**power for power in range((trained - 1).bit_length()))
        distances = (0, *powers) if self.distances is None else tuple(labels["d0"])
        for name, values in (("distance", distances), ("beyond", labels["limit"])):
            for value in values:
                session.require_distance(name, value)  # refused here, before work starts
        return replace(self, distances=distances, limits=tuple(labels["limit"]), longest=self.longest or trained)

    def refuse(self, run: Run) -> None:
        self.named_conditions(run)

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        d0s = torch.tensor(self.labels()["d0"], dtype=DOUBLE)
        of_all, without_first = (self.of_tokens(layer, first, d0s, r) for first, r in enumerate(refit_r(layer, d0s)))
        return of_all | {"curve": curve_under_intervention(layer)}, without_first

    def of_tokens(
        self, layer: LayerCapture, first: int, d0s: Float[Tensor, " d0"], refit: Float[Tensor, "head d0"]
    ) -> dict[str, Tensor]:
        """Return the values of one layer from its token `first` on; NaN at distances that its window hides."""
        geometry, q, k = layer.geometry, layer.q[:, first:], layer.k[:, first:]
        hidden = (d0s >= (geometry.window or math.inf)).to(q.device)
        longest = self.longest or layer.length
        distances = layer.positions[: geometry.reach(longest)]
        energies = table_energies(q, k, geometry.rope, geometry.scale, distances).mean(-1)
        _, key, neither = share = energies / energies.sum(0)
        agreement = key_agreement(q, k, geometry.rope, d0s).masked_fill(hidden | hidden[:, None], torch.nan)
        return {
            "additive_r": (1 - neither).clamp(min=0).sqrt(),
            "key_part_r": (key / (key + neither)).sqrt(),
            "share": share,
            "key_agreement": agreement,
            "refit_r": refit.masked_fill(hidden, torch.nan),
        }

    def conditions(self, run: Run) -> Mapping[str, Any]:
        labels, where = self.labels(), run.where
        at = {f"at {d0:.9g}": at_dummy_distance(run.session, d0, **where) for d0 in labels["d0"]}
        beyond = {
            f"beyond {limit:.9g}": at_dummy_distance(run.session, beyond=limit, **where) for limit in labels["limit"]
        }
        return at | beyond

    def findings(self, numbers: Numbers) -> list[str]:
        r = numbers("key_part_r", first_token=False)
        distance, key, neither = (numbers("share", part=part, first_token=False) for part in PARTS)
        refits = {d0: numbers("refit_r", d0=d0, first_token=False) for d0 in numbers.data["d0"].values.tolist()}
        defined = [d0 for d0, refit in refits.items() if refit] or list(refits)
        extremes = dict.fromkeys(pick(defined, key=lambda d0: refits[d0].value) for pick in (min, max))
        ends = [f"{refits[d0].plain:.2f}{refits[d0].null_in_brackets:.2f} at {d0:g}" for d0 in extremes]
        refitted = "lowest {}, highest {}".format(*ends) if len(ends) > 1 else ends[0]
        at = {name: rise for name, rise in self.rises(numbers).items() if name.startswith("at ")}
        best = min(at, key=lambda name: at[name].value)
        is_loss = not numbers.metric  # of a metric, higher may be better
        change = f"rises by {at[best]:.3f} at least" if is_loss else f"changes by {at[best]:+.3f}, the lowest,"
        return [
            f"First token left out, distance part and key part together correlate with the table at "
            f"{numbers('additive_r', first_token=False):.3f}; with it {numbers('additive_r'):.3f}. Of its variance the "
            "distance takes "
            f"{distance:.0%}, the key alone {key:.0%}, and neither explains {neither:.0%}. Each distance's mean taken "
            f"away, the key part correlates with it at {r.with_interval:.3f}{r.null_in_brackets:.3f}.",
            "Fitted again with every pair at one distance, the key part correlates with that at the true distances, "
            f"linear trends left out: {refitted}.",
            f"The model's loss of {numbers('loss'):.3f} {change} with every pair {best}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        refits = {
            f"at {d0:.9g}": numbers("refit_r", d0=d0, first_token=False).value
            for d0 in numbers.data["d0"].values.tolist()
        }
        frame = super().table(numbers)
        return frame.assign(refit_r=[refits.get(name, np.nan) for name in frame["condition"]])

    figures = {
        "map": head_map(
            *(("share", {"part": part}) for part in PARTS),
            ("key_part_r", {"tokens": "without first"}),
            title="Dummy-distance tables",
            subtitle="each query against each key at every distance: shares of the table's variance, and key part r",
        ),
        "agreement": heat_maps(
            "key_agreement",
            "d0",
            "other_d0",
            per=["tokens"],
            title="Does the key part stay?",
            subtitle="correlation over keys of the scores at two distances, mean over queries, heads and prompts",
            limits=(-1.0, 1.0),
            row_height=380,
        ),
        "refits": partial(
            _curves,
            measure="refit_r",
            along="d0",
            at={"tokens": "without first"},
            title="The key part, fitted again",
            subtitle="correlation of c at the true distances with c with every pair at d0; no trend, first token out",
            y_title="correlation",
        ),
        "curves": partial(
            _curves,
            measure="curve",
            along="distance",
            title="Score by distance",
            subtitle="mean score of visible pairs, every pair put at d",
            y_title="logits",
        ),
        "rise": Interventions.figures["rise"],
    }
