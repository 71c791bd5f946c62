"""Show why queries and keys of slash heads are nearly of rank one: the cone of their inputs, and what is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, is_above
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import points
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.spectra import first_share, rank_of_share, rank_one_share
from tl_posgen.slash.dominance import (
    AT_BEST,
    PER_HEAD,
    TITLES,
    Dominance,
    at_best,
    at_distance,
    group_mean,
    group_table,
    mean_over_group,
    n_heads,
    reached,
    spectra_of,
    starts_of,
    statistics_from_qk,
    statistics_of,
)
from tl_posgen.slash.numbers.cone_fit import axis_gain, bias_share, fit_cone

INPUTS = ("measured", "axis only", "off axis")
OF_BIASES = ("no bias", "bias only", "axis and bias", "off axis and bias")  # where a model has any
_WITH_BIASES = {"axis only": OF_BIASES[2], "off axis": OF_BIASES[3]}
WORDS = {
    "axis only": "axis part alone",
    "off axis": "all but the axis part",
    "no bias": "all inputs without biases",
    "bias only": "biases alone",
    "axis and bias": "axis part and biases",
    "off axis and bias": "all but the axis part, and biases",
}
_PER_LAYER, _SIDES = ("tokens", "layer"), ("tokens", "side", *HEAD)


def _counterfactuals(result: Any) -> dict[str, dict[str, str]]:
    return {WORDS[label]: {"input": label} for label in result.trained["input"].values.tolist() if label in WORDS}


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

    Biases of queries and keys belong to neither part of the inputs, have r1 = 1 by themselves, and make slashes by
    themselves. So they are a part of their own: "axis only" and "off axis" are without them, and where a model has any,
    "bias only" is they alone, "no bias" all inputs without them, "axis and bias" and "off axis and bias" a part of the
    inputs with them. What a part of the inputs does in the model is told by the last two, above biases alone. r1 is of
    what enters RoPE, biases included, `r1_without_bias` is not.

    Args:
        kappa: slash score from which a head is slash-dominant.
        distances: how many tokens back that score is looked at.

    Raises:
        InputError: a distance that no prompt reaches.
        UnsupportedModelError: a layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: that slash-dominant heads have nearly rank-one Q and K because token embeddings lie on a cone is claimed by
    Cheng et al. 2026 (arXiv 2601.08297, and on their page, fengzhuo.notion.site), whose measures are not known to us;
    these, and the counterfactual, are ours.

    Example:
        >>> data = Cone()("mini", "Down, down, down. Would the fall never end?", nulls=0, progress=False).sel()
        >>> bool((data["r1"] <= 1).all()), data["cosine"].dims
        (True, ('tokens', 'layer'))
    """

    question = "Why are queries and keys of slash heads nearly of rank one?"
    needs = frozenset({"pattern", "inputs"})
    words = WORDS
    rows = PER_HEAD
    variables = {
        "r1": Variable.share("r1 of Q and K", "s_1^2 / sum s^2 of what enters RoPE, after qk-norm", _SIDES),
        "r1_without_bias": Variable.share(
            "r1 without biases", "s_1^2 / sum s^2 of H W, after qk-norm, where there are biases", _SIDES
        ),
        "rank95": Variable("R.95 of Q and K", "", "min{K: s_1^2 + .. + s_K^2 >= 0.95 sum s^2}", _SIDES, interval=True),
        "bias_share": Variable.share("share of the bias", "|b|^2 / (|H W|^2 + |b|^2); a bias alone has r1 = 1", _SIDES),
        "gain": Variable(
            "gain of the axis", "", "|u'W| over its root mean square over directions", _SIDES, interval=True
        ),
        "score": Variable(
            "slash score",
            description="with a part of the inputs, at the distances",
            dims=("tokens", "input", *HEAD, "distance"),
        ),
        **AT_BEST,
        "slash_score": Variable.share("slash score", "at the best distance", ("tokens", "input", *HEAD)),
        "cosine": Variable.correlation("cosine with the axis", "mean over inputs h of <h, u> / |h|", _PER_LAYER),
        "r1_h": Variable.share("r1 of the inputs", "s_1^2 / sum s^2 of H", _PER_LAYER),
    }
    legend = (
        "r1: s_1^2 / sum s^2 of Q, K before RoPE; R.95: how many directions hold 95 % of it; gain: how much W_Q, W_K "
        "amplify the axis of the inputs; slash: highest slash score, measured and with one part of the inputs alone, "
        "without biases of queries and keys unless it says so."
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
            ("slash_score", {"input": "measured"}),
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
        ),
        "counterfactual": points(
            ("slash_score", {"input": "measured"}),
            ("slash_score", {}),
            _counterfactuals,
            title="Is the axis enough for the slash?",
            subtitle="each head at its best distance; inputs of W_Q and W_K changed in its layer alone",
            x_title="measured slash score",
            y_title="slash score after",
            equal=True,
            columns=2,
        ),
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"input": (*INPUTS, *OF_BIASES)}

    def usual(self) -> Mapping[str, Any]:
        return {"input": "measured"}

    def requires(self, session: Session) -> None:
        for layer in range(session.model.cfg.n_layers):
            session.projections(layer)  # every layer makes its queries and keys from one input

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        assert layer.inputs is not None
        assert layer.projections is not None
        heads = list(layer.heads)
        projections = layer.projections
        measured = layer.shared(statistics_of)
        by_start = []
        for first in starts_of(layer):
            inputs = layer.inputs[first:]
            cone, positions = fit_cone(inputs), torch.arange(len(inputs), device=inputs.device)
            along = (double(inputs) @ cone.axis[:, None] * cone.axis).to(inputs.dtype)
            parts = {"axis only": (along, False), "off axis": (inputs - along, False)}
            if projections.biased:
                parts |= {"no bias": (inputs, False), "bias only": (0 * inputs, True)}
                parts |= {"axis and bias": (along, True), "off axis and bias": (inputs - along, True)}
            scores = inputs.new_full((len(self.labels()["input"]), len(heads), len(inputs)), torch.nan, dtype=DOUBLE)
            scores[0] = measured.score[first, :, : len(inputs)]
            qk_by_part = {part: _queries_and_keys(layer, *arguments) for part, arguments in parts.items()}
            for number, qk in enumerate(qk_by_part.values(), start=1):
                rotated = (rotate(x, positions, layer.geometry.rope) for x in qk)
                scores[number] = statistics_from_qk(layer, *rotated).score[0]
            sides = []
            for side in "qk":
                weight, bias = (getattr(projections, f"{kind}_{side}") for kind in "wb")
                bias = bias if side in projections.biased else None
                of_weights = (bias_share(inputs, weight, bias), axis_gain(cone.axis, weight))
                share, gain = (projections.per_query_head(array)[heads] for array in of_weights)
                s = layer.shared(spectra_of, first)[side].values
                ranks = {"r1": first_share(s), "rank95": rank_of_share(s).to(share)}
                sides.append(ranks | {"bias_share": share, "gain": gain})
            values = {name: torch.stack([side[name] for side in sides]) for name in sides[0]}
            values |= {"cosine": cone.cosine.mean(), "r1_h": cone.r1, "score": scores}
            values["r1_without_bias"] = torch.full_like(values["r1"], torch.nan)
            if projections.biased:
                values["r1_without_bias"] = torch.stack([rank_one_share(x) for x in qk_by_part["no bias"]])
            by_start.append(values | {"uniform": measured.uniform[first, : len(inputs)]})
        return by_start[0], by_start[1]

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data, uniform = sums.means(), sums.mean("uniform", (*_PER_LAYER, "distance"))
        measured = data["score"].sel(input="measured", drop=True)
        dominant = self.dominant_at(measured, uniform).any("short_distance")
        data = data.assign(at_best(measured, uniform)).assign(dominant=dominant)
        data = data.assign(slash_score=at_distance(data["score"], data["slash_distance"])).transpose("tokens", ...)
        data = data.sel(distance=reached(self.distances, measured))
        if data["r1_without_bias"].isnull().all():  # no layer has biases
            data = data.drop_vars("r1_without_bias").sel(input=list(INPUTS))
        return data

    def findings(self, numbers: Numbers) -> list[str]:
        n, biases = n_heads(numbers, "dominant"), ""
        if "r1_without_bias" in numbers:
            share, r1 = ([numbers(name, side=side) for side in "qk"] for name in ("bias_share", "r1_without_bias"))
            biases = (
                f" Biases, which alone have r1 = 1, hold {share[0].plain:.0%} of the energy of Q and "
                f"{share[1].plain:.0%} of that of K, mean over heads; without them r1 is {r1[0].plain:.3f} and "
                f"{r1[1].plain:.3f}."
            )
        lines = [
            f"Q and K before RoPE have in their first singular direction a share r1 of {numbers('r1', side='q'):.3f} "
            "and "
            f"{numbers('r1', side='k'):.3f}, mean over heads: 1 is rank one. 95 % of the energy takes "
            f"{numbers('rank95', side='q'):.1f} directions of Q and {numbers('rank95', side='k'):.1f} of K.{biases}",
            f"Attention inputs have mean cosine {numbers('cosine'):.2f} with their axis. r1 of the inputs is "
            f"{numbers('r1_h'):.2f}; W_Q amplifies the axis {numbers('gain', side='q'):.2f} times, W_K "
            f"{numbers('gain', side='k'):.2f} times.",
        ]
        if not n.value:
            return [*lines, "No head is slash-dominant, so nothing can be asked of the axis alone."]
        r1 = " and ".join(f"{group_mean(numbers, 'r1', 'dominant', side=side).with_interval:.3f}" for side in "qk")
        scores = {
            label: group_mean(numbers, "slash_score", "dominant", input=label).with_interval
            for label in numbers.data["input"].values.tolist()
        }
        uniform = group_mean(numbers, "best_uniform", "dominant").with_interval
        heads = counted(n.value, "slash-dominant head")
        sentence = (
            f"In {heads} r1 is {r1}. With only the axis part entering W_Q and W_K they score "
            f"{scores['axis only']:.3f} at their best distance (measured {scores['measured']:.3f}); with all but the "
            f"axis {scores['off axis']:.3f} (uniform attention {uniform:.3f})."
        )
        if "no bias" in scores:
            sentence += (
                f" Biases are in neither. They alone give {scores['bias only']:.3f}, with the axis part "
                f"{scores['axis and bias']:.3f}, with all but the axis {scores['off axis and bias']:.3f}; all inputs "
                f"without them {scores['no bias']:.3f}."
            )
        return [*lines, sentence]

    def ratio_above_no_inputs(self, numbers: Numbers, part: str, less: str | None = None) -> Number:
        """(S(part) - S(none)) / (S(all) - S(none)), S the dominant heads' slash score with a part of the inputs in W_Q
        and W_K, and what the biases add with it; with none of them that of biases alone, or of uniform attention.

        It may exceed 1, and is NaN where what all inputs make of the score is not above 0.01 by its interval.

        Args:
            part: "axis only" or "off axis"; biases are added to it where there are any.
            less: another part, whose ratio is taken off.
        """
        none = self._scores(numbers, "bias only", numbers.array("best_uniform"))
        of_all, of_part, of_other = (
            mean_over_group(numbers, self._with_biases(numbers, label) - none, "dominant")
            for label in ("measured", part, less or part)
        )
        ratio = (of_part if less is None else of_part - of_other) / of_all.where(is_above(of_all, 0.01))
        return numbers.number(ratio)

    def ratio_of_biases(self, numbers: Numbers) -> Number:
        """Return the ratio of the dominant heads' slash scores above uniform attention, by biases alone to measured; 0
        without biases, and NaN where the measured one is not above 0.01 by its interval."""
        uniform = numbers.array("best_uniform")
        scores = (self._scores(numbers, "bias only", uniform), numbers.array("slash_score", input="measured"))
        alone, measured = (mean_over_group(numbers, score - uniform, "dominant") for score in scores)
        return numbers.number(alone / measured.where(is_above(measured, 0.01)))

    def _with_biases(self, numbers: Numbers, part: str) -> xr.DataArray:
        """Return scores with a part of the inputs, or all of them, and the biases."""
        return self._scores(numbers, _WITH_BIASES.get(part, part), numbers.array("slash_score", input=part))

    def _scores(self, numbers: Numbers, label: str, otherwise: xr.DataArray) -> xr.DataArray:
        """Return scores with these inputs; others where a layer, a random init or the model has no biases."""
        is_there = label in numbers.data["input"].values
        return numbers.array("slash_score", input=label).fillna(otherwise) if is_there else otherwise

    def table(self, numbers: Numbers) -> pd.DataFrame:
        data, names = numbers.dataset, {"r1": "r1", "R.95": "rank95", "gain": "gain"}.items()
        columns = {f"{heading} {side.upper()}": data[name].sel(side=side) for heading, name in names for side in "qk"}
        scores = {
            f"slash, {label}": data["slash_score"].sel(input=label) for label in numbers.data["input"].values.tolist()
        }
        return group_table(numbers, columns | scores)


def _queries_and_keys(
    layer: LayerCapture, inputs: Float[Tensor, "pos d_model"], biases: bool
) -> list[Float[Tensor, "head pos d_head"]]:
    """Return queries and keys of the chosen heads before RoPE that these inputs give, with biases or without."""
    assert layer.projections is not None
    projections = layer.projections
    return [project(inputs, biases=biases)[list(layer.heads)] for project in (projections.queries, projections.keys)]
