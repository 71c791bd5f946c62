"""Show why queries and keys of slash heads are nearly of rank one: the cone of their inputs, and what is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import session_of
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import points
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.spectra import rank_of_share, rank_one, rank_one_share
from tl_posgen.slash.dominance import (
    AT_BEST,
    PER_HEAD,
    SHARE,
    TITLES,
    Dominance,
    at_best,
    at_distance,
    group_mean,
    group_table,
    mean_over_group,
    n_heads,
    starts_of,
    statistics_from_qk,
    statistics_of,
)
from tl_posgen.slash.numbers.cone_fit import axis_gain, bias_share, fit_cone

INPUTS = ("measured", "axis only", "off axis")
_PER_LAYER, _SIDES = ("tokens", "layer"), ("tokens", "side", *HEAD)


@dataclass(frozen=True)
class Cone(Dominance):
    r"""r1 = s_1^2 / sum s^2 and R.95 of Q and K before RoPE, beside r1 of H, the inputs of W_Q and W_K, and their cone.

    r1 is the share of the energy of Q or K before RoPE, not centred, that lies in the first singular direction; 1 is
    rank one. R.95 is how many singular directions hold 95 % of it. The axis is the top right-singular vector of what
    enters W_Q and W_K; its gain is relative to a random direction. The slash score is measured again with the axis part
    of the inputs alone, and with the rest alone.

    The axis u of H = norm(residual stream) is found anew for every prompt. The first token often is so large that it
    makes any matrix it is a row of nearly rank one, so everything is measured without it too. For the slash score,
    <h, u> u alone ("axis only") or the rest ("off axis") enters W_Q and W_K, in this layer alone. Means over prompts.

    Args:
        kappa, distances: what makes a head slash-dominant.

    Raises:
        InputError: a distance that no prompt reaches.
        UnsupportedModelError: a layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: that slash-dominant heads have nearly rank-one Q and K because token embeddings lie on a cone is claimed by
    Cheng et al. 2026 (arXiv 2601.08297, and on their page, fengzhuo.notion.site), whose measures are not known to us;
    these, and the counterfactual, are ours.

    Example:
        >>> data = Cone()("mini", "Down, down, down. Would the fall never end?", null_seeds=(), progress=False).sel()
        >>> bool((data["r1"] <= 1).all()), data["cosine"].dims
        (True, ('tokens', 'layer'))
    """

    question = "Why are queries and keys of slash heads nearly of rank one?"
    needs = frozenset({"pattern", "inputs"})
    rows = PER_HEAD
    variables = {
        "r1": Variable("r1 of Q and K", "", "s_1^2 / sum s^2 of what enters RoPE, after qk-norm", _SIDES, **SHARE),
        "rank95": Variable("R.95 of Q and K", "", "min{K: s_1^2 + .. + s_K^2 >= .95 sum s^2}", _SIDES, interval=True),
        "bias_share": Variable(
            "share of the bias", "", "|b|^2 / (|H W|^2 + |b|^2); a bias alone has r1 = 1", _SIDES, **SHARE
        ),
        "gain": Variable(
            "gain of the axis", "", "|u'W| over its root mean square over directions", _SIDES, interval=True
        ),
        "score": Variable("slash score", "", "with a part of the inputs", ("tokens", "input", *HEAD, "distance")),
        **AT_BEST,
        "best_score": Variable("slash score", "", "at the best distance", ("tokens", "input", *HEAD), **SHARE),
        "cosine": Variable(
            *("cosine with the axis", "", "mean over inputs h of <h, u> / |h|", _PER_LAYER),
            interval=True,
            bounds=(-1, 1),
        ),
        "r1_h": Variable("r1 of the inputs", "", "s_1^2 / sum s^2 of H", _PER_LAYER, **SHARE),
    }
    legend = (
        "r1: s_1^2 / sum s^2 of Q, K before RoPE; R.95: how many directions hold 95 % of it; gain: how much W_Q, W_K "
        "amplify the axis of the inputs; slash: highest slash score, measured and with one part of the inputs alone."
    )
    caveats = {
        "absolute": "nothing turns q and k, so rank one alone makes no slash: ranks, gains and the axis are of the "
        "projections, and a fixed distance has to come from the position vectors in the inputs.",
        "alibi": "nothing turns q and k, and the slopes stay in the score of the axis alone and of the rest: compare "
        "these with random init rather than with uniform attention.",
        "none": "nothing turns q and k, so rank one alone makes no slash; ranks, gains and the axis are of the "
        "projections.",
    }
    figures = {
        "rank": points(
            ("best_score", {"input": "measured"}),
            ("r1", {}),
            {
                f"{side.upper()}, {TITLES[tokens]}": {"side": side, "tokens": tokens}
                for tokens in TITLES
                for side in "qk"
            },
            title="How near rank one are queries and keys?",
            subtitle="share of the first singular value in the energy of Q and K before RoPE, not centred",
            x_title="slash score",
            y_title="r1",
            columns=2,
        ),
        "gain": head_map(
            *(("gain", {"side": side}) for side in "qk"),
            title="Gain of the cone's axis",
            subtitle="|u'W| over its root mean square over directions: 1 is no preference for the axis u",
            limits=None,
        ),
        "counterfactual": points(
            ("best_score", {"input": "measured"}),
            ("best_score", {}),
            {"only the axis part": {"input": "axis only"}, "all but the axis part": {"input": "off axis"}},
            title="Is the axis enough for the slash?",
            subtitle="each head at its best distance; inputs of W_Q and W_K changed in its layer alone",
            x_title="measured slash score",
            y_title="slash score after",
            equal=True,
            columns=2,
        ),
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"input": INPUTS}

    def usual(self) -> Mapping[str, Any]:
        return {"input": "measured"}

    def requires(self, model: Any) -> None:
        for layer in range(model.cfg.n_layers):
            session_of(model).projections(layer)  # every layer makes its queries and keys from one input

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        assert layer.inputs is not None
        assert layer.projections is not None
        heads, projections, measured, both = list(layer.heads), layer.projections, layer.once(statistics_of), []
        for first in starts_of(layer):
            inputs = layer.inputs[first:]
            cone, along, positions = fit_cone(inputs), rank_one(inputs), torch.arange(len(inputs), device=inputs.device)
            scores, sides = [measured.score[first, :, : len(inputs)]], []
            for kept in (along, inputs - along):
                made = (projections.queries(kept)[heads], projections.keys(kept)[heads])
                rotated = (rotate(x, positions, layer.geometry.rope) for x in made)
                scores.append(statistics_from_qk(layer, *rotated).score[0])
            for side in "qk":
                weight, bias = (getattr(projections, f"{kind}_{side}") for kind in "wb")
                weight = projections.per_query_head(weight)[heads]
                bias = None if bias is None else projections.per_query_head(bias)[heads]
                x, share = getattr(layer, side)[:, first:], bias_share(inputs, weight, bias)
                ranks = {"r1": rank_one_share(x), "rank95": rank_of_share(x).to(share)}
                sides.append(ranks | {"bias_share": share, "gain": axis_gain(cone.axis, weight)})
            found = {name: torch.stack([side[name] for side in sides]) for name in sides[0]}
            found |= {"cosine": cone.cosine.mean(), "r1_h": cone.r1, "score": torch.stack(scores)}
            both.append(found | {"uniform": measured.uniform[first, : len(inputs)]})
        return both[0], both[1]

    def finish(self, sums: Sums) -> xr.Dataset:
        data, uniform = sums.means(), sums.mean("uniform", (*_PER_LAYER, "distance"))
        measured = data["score"].sel(input="measured", drop=True)
        dominant = self.dominant_at(measured, uniform).any("short_distance")
        data = data.assign(at_best(measured, uniform)).assign(dominant=dominant)
        return data.assign(best_score=at_distance(data["score"], data["best_distance"])).transpose("tokens", ...)

    def findings(self, own: Numbers) -> list[str]:
        n, shares = n_heads(own, "dominant"), [own("bias_share", side=side).value for side in "qk"]
        energy = "{:.0%} of the energy of Q and {:.0%} of that of K, mean over heads".format(*shares)
        biases = f" Biases, which alone have r1 = 1, hold {energy}." if max(shares) > 0 else ""
        lines = [
            f"Q and K before RoPE have in their first singular direction a share r1 of {own('r1', side='q'):.3f} and "
            f"{own('r1', side='k'):.3f}, mean over heads: 1 is rank one. 95 % of the energy takes "
            f"{own('rank95', side='q'):.1f} directions of Q and {own('rank95', side='k'):.1f} of K.{biases}",
            f"Attention inputs have mean cosine {own('cosine'):.2f} with their axis. r1 of the inputs is "
            f"{own('r1_h'):.2f}; W_Q amplifies the axis {own('gain', side='q'):.2f} times, W_K "
            f"{own('gain', side='k'):.2f} times.",
        ]
        if not n.value:
            return [*lines, "No head is slash-dominant, so nothing can be asked of the axis alone."]
        r1 = " and ".join(f"{group_mean(own, 'r1', 'dominant', side=side).with_interval:.3f}" for side in "qk")
        measured, alone, rest = (group_mean(own, "best_score", "dominant", input=one).with_interval for one in INPUTS)
        uniform = group_mean(own, "best_uniform", "dominant").with_interval
        return [
            *lines,
            f"In {counted(n.value, 'slash-dominant head')} r1 is {r1}. With only the axis part entering W_Q and W_K "
            f"they score {alone:.3f} at their best distance (measured {measured:.3f}); with all but the axis "
            f"{rest:.3f} (uniform attention {uniform:.3f}).",
        ]

    def ratio_above_uniform(self, own: Numbers, part: str, less: str | None = None) -> Number:
        """Return the ratio of the dominant heads' slash scores above uniform attention, with a part of the inputs alone
        to measured; it may exceed 1, and is NaN where the measured one is no higher than .01.

        Args:
            less: another part, whose ratio is taken off.
        """
        score, uniform = own.array("best_score", input=None), own.array("best_uniform")
        above = mean_over_group(own, score - uniform, "dominant")
        measured = above.sel(input="measured")
        ratio = above / measured.where(measured > 0.01)
        return own.number(ratio.sel(input=part) - (0 if less is None else ratio.sel(input=less)))

    def table(self, own: Numbers) -> pd.DataFrame:
        data, names = own.dataset, {"r1": "r1", "R.95": "rank95", "gain": "gain"}.items()
        columns = {f"{words} {side.upper()}": data[name].sel(side=side) for words, name in names for side in "qk"}
        return group_table(own, columns | {f"slash, {one}": data["best_score"].sel(input=one) for one in INPUTS})
