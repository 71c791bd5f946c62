"""Why queries and keys of slash heads are nearly of rank one: the cone of their inputs, and what is made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable, added
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.wrapped import wrap
from tl_posgen.report.intervals import ENDS
from tl_posgen.report.sentences import NO_NULL, beside, with_interval
from tl_posgen.rope.spectra import rank_one, singular_values, spectrum_of_values
from tl_posgen.slash.ablations import ablate
from tl_posgen.slash.cone_figures import BEST, FIGURES, drawn
from tl_posgen.slash.cone_fit import ConeFit, axis_projection, fit_cone
from tl_posgen.slash.dominance import Dominance, check_all_reached, is_dominant
from tl_posgen.slash.head_groups import (
    PER_HEAD,
    VariantCollector,
    group_masks,
    group_means,
    group_table,
    in_groups,
    mean_of,
)
from tl_posgen.slash.layer_means import SUFFIXES, at_distance, best_distance, statistics_from_qk
from tl_posgen.stats.agreement import spearman
from tl_posgen.stats.intervals import jackknife_interval
from tl_posgen.summary import NullSummary, Summary

WORTHLESS = 0.01  # of a slash score above uniform attention: no share of less is told
INPUTS = ("measured", "axis_only", "off_axis")
COSINES = np.linspace(-1, 1, 41)  # edges of the histogram


@dataclass(frozen=True)
class Cone(Dominance):
    r"""r1 = s_1^2 / sum s^2 of Q and K before RoPE, beside that of H, the inputs of W_Q and W_K, and their cone.

    The cone's axis u is the top right-singular vector of H = norm(residual stream), anew for every prompt. Nothing is
    centred. Everything is measured of all tokens ("all") and of all but the first ("without_first_token"), which often
    is so large that it makes any matrix it is a row of nearly rank one. The slash score is then had anew with only
    <h, u> u ("axis_only") or only the rest ("off_axis") entering W_Q and W_K, in this layer alone. Means over prompts.

    Args:
        kappa, distances: what makes a head slash-dominant.

    Raises:
        InputError: kappa outside (0, 1], a distance that no prompt reaches.
        UnsupportedModelError: a layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: that slash-dominant heads have nearly rank-one Q and K because token embeddings lie on a cone is claimed by
    Cheng et al. 2026 (arXiv 2601.08297), whose measures are not known to us; these, and the counterfactual, are ours.

    Example:
        >>> from tl_posgen.slash import cone
        >>> data = cone("mini", "Down, down, down. Would the fall never end?", null_seeds=(), progress=False).dataset
        >>> bool((data["r1_q"] <= 1).all()), data["cosine_mean"].dims
        (True, ('variant', 'layer'))
    """


class ConeCollector(VariantCollector):
    options: Cone

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cones: list[dict[int, list[ConeFit]]] = [{} for _ in SUFFIXES]

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._cones = [added(one, more) for one, more in zip(self._cones, other._cones, strict=True)]
        return both

    def measured(
        self, layer: LayerCapture, first: int, score: Float[Tensor, "head distance"]
    ) -> dict[str, Float[Tensor, "head *dims"]]:
        assert layer.inputs is not None
        assert layer.projections is not None
        inputs, heads = layer.inputs[first:], list(layer.heads)
        cone, along = fit_cone(inputs), rank_one(inputs)
        self._cones[first] = added(self._cones[first], {layer.layer: [cone]})
        found = rank_measures(layer, inputs, cone.axis, first)
        for name, kept in {"axis_only": along, "off_axis": inputs - along}.items():
            q, k = layer.projections.queries(kept)[heads], layer.projections.keys(kept)[heads]
            found[name] = statistics_from_qk(layer, *ablate(q, k, layer.geometry.rope, "none")).score
        return found

    def of_variant(self, first: int, rows: HeadRows) -> xr.Dataset:
        """Means over prompts, and every head's scores at its best distance."""
        kept = {"measured": "score", "axis_only": "axis_only", "off_axis": "off_axis", "uniform": "uniform"}
        profiles = {name: rows.array(of, "distance").mean("prompt") for name, of in kept.items()}
        score = profiles["measured"]
        place = best_distance(score)
        data = xr.Dataset({name: rows.array(name).mean("prompt") for name in rows.names if name[-2:] in ("_q", "_k")})
        data = data.assign({f"best_{name}": at_distance(one, place) for name, one in profiles.items()})
        data = data.assign(best_distance=place, dominant=is_dominant(score, self.options))
        data["score"] = xr.concat([profiles[name] for name in INPUTS], "input").assign_coords(input=list(INPUTS))
        for side in "qk":
            both = data[["best_measured", f"r1_{side}"]].stack(place=("layer", "head")).dropna("place")
            ranked = (torch.from_numpy(values.values) for values in both.data_vars.values())
            data[f"score_r1_spearman_{side}"] = float(spearman(*ranked))
        return data.merge(cones_dataset(self._cones[first]))


def rank_measures(
    layer: LayerCapture, inputs: Float[Tensor, "pos d_model"], axis: Float[Tensor, " d_model"], first: int
) -> dict[str, Float[Tensor, " head"]]:
    """How near rank one Q and K as they enter RoPE are, their parts, and what W_Q and W_K do with the axis."""
    assert layer.projections is not None
    of_head, heads = layer.projections.per_query_head, list(layer.heads)
    found: dict[str, Tensor] = {}
    for side, entering in (("q", layer.q), ("k", layer.k)):
        weight, bias = (getattr(layer.projections, f"{kind}_{side}") for kind in "wb")
        weight, bias = of_head(weight)[heads], None if bias is None else of_head(bias)[heads]
        values = singular_values(entering[:, first:])
        squared, plain = spectrum_of_values(values), spectrum_of_values(values, squared=False)
        measures = {
            "r1": squared.r1,
            "rank95": squared.rank.double(),
            "effective_rank": squared.effective_rank,
            "effective_rank_plain": plain.effective_rank,
            **vars(axis_projection(inputs, axis, weight, bias)),
        }
        found |= {f"{name}_{side}": value for name, value in measures.items()}
    return found


def cones_dataset(cones: Mapping[int, Sequence[ConeFit]]) -> xr.Dataset:
    """Cosines with the axis and r1 of the inputs, by layer, means over prompts; and how far these agree on the axis."""
    layers = [
        {
            "cosine_mean": np.mean([float(one.cosine.mean()) for one in of_layer]),
            "cosine_std": np.mean([float(one.cosine.std(correction=0)) for one in of_layer]),
            "r1_h": np.mean([float(one.r1) for one in of_layer]),
            "axis_agreement": axis_agreement([one.axis for one in of_layer]),
            "cosine_share": ("cosine", np.mean([shares(one) for one in of_layer], axis=0)),
        }
        for _, of_layer in sorted(cones.items())
    ]
    coords = {"cosine": (COSINES[1:] + COSINES[:-1]) / 2}
    return xr.concat([xr.Dataset(one, coords) for one in layers], pd.Index(sorted(cones), name="layer"))


def shares(one: ConeFit) -> np.ndarray:
    """The share of inputs in each bin of the histogram; a cosine that rounds to just over 1 counts as 1."""
    counts, _ = np.histogram(one.cosine.clamp(-1, 1).cpu().numpy(), COSINES)
    return counts / counts.sum()


def axis_agreement(axes: Sequence[Float[Tensor, " d_model"]]) -> float:
    """Mean |<u, u'>| over pairs of prompts; NaN of a single prompt."""
    stacked = torch.stack(list(axes))
    between = (stacked @ stacked.mT).abs()
    pairs = len(axes) * (len(axes) - 1)
    return float((between.sum() - between.trace()) / pairs) if pairs else float("nan")


def requires(model: Any) -> None:
    """Every layer makes its queries and keys by W_Q and W_K from one input."""
    for layer in range(model.cfg.n_layers):
        wrap(model).projections(layer)


# What is shown

GROUP_MEANS = ("r1_q", "r1_k", "r1_input_q", "r1_input_k", "gain_q", "gain_k", *BEST)
OF_LAYERS = ("cosine_mean", "axis_agreement", "r1_h", "gain_q", "gain_k")
SPEARMAN = ("score_r1_spearman_q", "score_r1_spearman_k")


def summarise(data: xr.Dataset) -> Summary:
    whole = data.sel(variant="all")
    return {
        **group_means(data, GROUP_MEANS, VARIABLES),
        **{name: float(whole[name].mean()) for name in (*OF_LAYERS, *SPEARMAN)},
        **{
            f"{name}{end}": float(whole[f"mean_{name}{end}"])
            for name in OF_LAYERS
            for end in ENDS[1:]
            if f"mean_{name}{end}" in data
        },
        "bias_share": max(float(data[f"bias_share_{side}"].mean()) for side in "qk"),
        **axis_part(whole),
    }


def axis_part(data: xr.Dataset) -> dict[str, float | None]:
    """Of the dominant heads' slash score above uniform attention, what the axis part alone makes, and its interval;
    None where that score is no higher than WORTHLESS."""
    heads = group_masks(data)["dominant"]

    def above(suffix: str) -> list[xr.DataArray]:
        alone, measured, uniform = (mean_of(data[f"{BEST[place]}{suffix}"], heads) for place in (1, 0, 3))
        return [alone - uniform, measured - uniform]

    def of(suffix: str) -> xr.DataArray:
        alone, measured = above(suffix)
        return alone / measured.where(measured > WORTHLESS)

    if not heads.any() or not float(above("")[1]) > WORTHLESS:
        return {"axis_part": None}
    found: dict[str, float | None] = {"axis_part": float(of(""))}
    if f"{BEST[0]}_left_out" in data:
        ends = jackknife_interval(float(of("")), of("_left_out").values, data["prompt_share"].values)
        found |= {f"axis_part{end}": float(edge) for end, edge in zip(ENDS[1:], ends, strict=True)}
    return found


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    pair = ["r1_q", "r1_k"]
    random = NO_NULL if null is None else f"random init {in_groups(null, pair)}"
    ranks = " and ".join(f"{own[name]:.2f}" for name in SPEARMAN)
    agree = own["axis_agreement"]
    shared = "" if agree != agree else f"; prompts agree on it to {beside(own, null, 'axis_agreement', '.2f')}"
    lines = [
        f"r1 of Q and K is {in_groups(own, pair)} ({random}); without the first token "
        f"{in_groups(own, pair, variant='without_first_token')}. Rank correlation of slash score and r1 over heads: "
        f"{ranks}.",
        f"Attention inputs have mean cosine {beside(own, null, 'cosine_mean', '.2f')} with their axis{shared}. r1 of "
        f"the inputs is {beside(own, null, 'r1_h', '.2f')}; W_Q amplifies the axis "
        f"{beside(own, null, 'gain_q', '.2f')} times, W_K {beside(own, null, 'gain_k', '.2f')} times.",
    ]
    if own["n_dominant"]:
        measured, alone, rest, uniform = (with_interval(own, f"{name}_dominant") for name in BEST)
        lines.append(
            f"With only the axis part entering W_Q and W_K, slash-dominant heads score {alone} at their best distance "
            f"(measured {measured}); with all but the axis {rest} (uniform attention {uniform})."
        )
    else:
        lines.append("No head is slash-dominant, so nothing can be asked of the axis alone.")
    if own["bias_share"] > 0:
        parts = in_groups(own, ["r1_input_q", "r1_input_k"])
        lines.append(f"Biases hold up to {own['bias_share']:.0%} of the energy of Q or K; without them r1 is {parts}.")
    return lines


def table(data: xr.Dataset) -> pd.DataFrame:
    names = {"r1_q": "r1 Q", "r1_k": "r1 K", "gain_q": "gain Q", "gain_k": "gain K"}
    return group_table(summarise(data), names | dict(zip(BEST[:3], ("slash", "axis only", "off axis"), strict=True)))


PER_LAYER = ("variant", "layer")
MEANINGS = {
    "r1": "s_1^2 / sum s^2 of what enters RoPE, after qk-norm",
    "rank95": "how many s^2 make 95% of their sum",
    "effective_rank": "exp of the entropy of s^2 / sum s^2",
    "effective_rank_plain": "exp of the entropy of s / sum s",
    "r1_input": "r1 of H W, before any qk-norm",
    "r1_sum": "r1 of H W + b, before any qk-norm",
    "bias_share": "|b|^2 / (|H W|^2 + |b|^2); a bias alone has r1 = 1",
    "gain": "|u'W| over its root mean square over directions",
    "axis_share": "|H u u'W|^2 / |H W|^2",
}
SHARES = ("r1", "r1_input", "r1_sum", "bias_share")
VARIABLES = {
    **{
        f"{name}_{side}": Variable(
            f"{name} of {side.upper()}",
            description=meaning,
            dims=PER_HEAD,
            interval=True,
            bounds=(0.0, 1.0) if name in SHARES else None,
        )
        for name, meaning in MEANINGS.items()
        for side in "qk"
    },
    "score": Variable(
        "slash score",
        description="measured, and with a part of the inputs",
        dims=("variant", "input", "layer", "head", "distance"),
    ),
    "best_measured": Variable(
        "slash score", description="highest, over D < N/2", dims=PER_HEAD, interval=True, bounds=(0.0, 1.0)
    ),
    "best_axis_only": Variable(
        "slash score of the axis alone",
        description="at the same distance",
        dims=PER_HEAD,
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "best_off_axis": Variable(
        "slash score of all but the axis",
        description="at the same distance",
        dims=PER_HEAD,
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "best_uniform": Variable(
        "slash score of uniform attention",
        description="at the same distance",
        dims=PER_HEAD,
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "best_distance": Variable("its distance", "tokens", dims=PER_HEAD),
    "dominant": Variable("slash-dominant", description="score >= kappa at one of the distances", dims=PER_HEAD),
    "cosine_mean": Variable(
        "mean cosine with the axis",
        description="of the inputs h: <h, u> / |h|",
        dims=PER_LAYER,
        interval=True,
        bounds=(-1.0, 1.0),
    ),
    "cosine_std": Variable("spread of the cosine", description="standard deviation over inputs", dims=PER_LAYER),
    "r1_h": Variable(
        "r1 of the inputs", description="s_1^2 / sum s^2 of H", dims=PER_LAYER, interval=True, bounds=(0.0, 1.0)
    ),
    "axis_agreement": Variable(
        "agreement on the axis", description="mean |<u, u'>| over pairs of prompts", dims=PER_LAYER
    ),
    "cosine_share": Variable("share of inputs", description="histogram of the cosines", dims=(*PER_LAYER, "cosine")),
    **{
        f"score_r1_spearman_{side}": Variable(
            f"rank correlation of slash score and r1 of {side.upper()}", description="over heads", dims=("variant",)
        )
        for side in "qk"
    },
}

MEASURE = Measure(
    name="cone",
    question="Why are queries and keys of slash heads nearly of rank one?",
    explanation=(
        "r1 is the share of the first singular value in the energy of Q or K before RoPE, nothing centred; 1 is rank "
        "one. The axis is the top right-singular vector of what enters W_Q and W_K; gain compares it with a random "
        "direction. The slash score is then made anew from the axis part alone, and from the rest."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); all measures here: ours",
    options=Cone,
    collector=ConeCollector,
    needs=frozenset({"pattern", "inputs"}),
    requires=requires,
    check_prompts=check_all_reached,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    drawn=drawn,
    table=table,
    legend=(
        "r1: s_1^2 / sum s^2 of Q, K before RoPE; gain: how much W_Q, W_K amplify the axis of the inputs; slash: "
        "highest slash score; axis only, off axis: with that part of the inputs alone."
    ),
    caveats={
        "absolute": "nothing turns q and k, so rank one alone makes no slash: ranks, gains and the axis are of the "
        "projections, and a fixed distance has to come from the position vectors in the inputs.",
        "alibi": "nothing turns q and k, and the slopes stay in the score of the axis alone and of the rest: compare "
        "these with random init rather than with uniform attention.",
        "none": "nothing turns q and k, so rank one alone makes no slash; ranks, gains and the axis are of the "
        "projections.",
    },
)
