"""Why queries and keys of slash heads are nearly of rank one: the cone of their inputs, and what is made of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.measure import Collector, HeadRows, Measure, Options, Summary, Variable
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.wrapped import wrap
from tl_posgen.report.sentences import beside, said
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.spectra import singular_values, spectrum, spectrum_of_values
from tl_posgen.slash.cone_figures import BEST, FIGURES, drawn
from tl_posgen.slash.cone_fit import ConeFit, axis_only, axis_projection, fit_cone, projection_parts
from tl_posgen.slash.dominance import check_all_reached, check_dominance, is_dominant
from tl_posgen.slash.head_groups import VARIANTS, group_means, group_table, in_groups
from tl_posgen.slash.layer_means import at_distance, best_distance, require_two_tokens, statistics_of
from tl_posgen.slash.slash_scores import SHORT_DISTANCES, SHORT_KAPPA, slash_statistics_from_qk
from tl_posgen.stats.agreement import spearman

INPUTS = ("measured", "axis_only", "off_axis")
OF_SIDE = (
    "r1",
    "rank95",
    "effective_rank",
    "effective_rank_plain",
    "r1_input",
    "r1_sum",
    "bias_share",
    "gain",
    "axis_share",
)
COSINES = np.linspace(-1, 1, 41)  # edges of the histogram


@dataclass(frozen=True)
class Cone(Options):
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

    kappa: float = SHORT_KAPPA
    distances: Sequence[int] = tuple(SHORT_DISTANCES)

    def check(self) -> None:
        check_dominance(self.kappa, self.distances)


class ConeCollector(Collector):
    options: Cone

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._of_variant = {variant: HeadRows() for variant in VARIANTS}
        self._cones: dict[str, dict[int, list[ConeFit]]] = {variant: {} for variant in VARIANTS}

    def update(self, layer: LayerCapture) -> None:
        require_two_tokens(layer)
        assert layer.inputs is not None
        assert layer.projections is not None
        measured = layer.once(statistics_of)
        scores = (measured.score, measured.score_without_first_token)
        uniforms = (measured.uniform, measured.uniform_without_first_token)
        for (variant, first), score, uniform in zip(VARIANTS.items(), scores, uniforms, strict=True):
            rows, inputs, heads = self._of_variant[variant], layer.inputs[first:], list(layer.heads)
            cone = fit_cone(inputs)
            self._cones[variant].setdefault(layer.layer, []).append(cone)
            rows.add(layer, **rank_measures(layer, inputs, cone.axis, first))
            for name, kept in {"axis_only": axis_only(inputs), "off_axis": inputs - axis_only(inputs)}.items():
                q, k = layer.projections.queries(kept)[heads], layer.projections.keys(kept)[heads]
                rows.add(layer, **{name: slash_scores(q, k, layer.geometry, heads)})
            rows.add(layer, measured=score, uniform=uniform.expand_as(score))

    def dataset(self) -> xr.Dataset:
        parts = [self._variant(rows, self._cones[variant]) for variant, rows in self._of_variant.items()]
        # one token less: no score at the last distance
        data = xr.concat(parts, xr.DataArray(list(VARIANTS), dims="variant", name="variant"), join="outer")
        return data.assign_attrs(kappa=self.options.kappa, rows=["variant", "layer", "head"])

    def _variant(self, rows: HeadRows, cones: Mapping[int, Sequence[ConeFit]]) -> xr.Dataset:
        """Means over prompts, and every head's scores at its best distance."""
        profiles = {name: rows.array(name, "distance").mean("prompt") for name in (*INPUTS, "uniform")}
        score = profiles["measured"]
        place = best_distance(score)
        data = {f"{name}_{side}": rows.array(f"{name}_{side}").mean("prompt") for name in OF_SIDE for side in "qk"}
        data |= {f"best_{name}": at_distance(one, place) for name, one in profiles.items()}
        data["best_distance"] = place
        data["dominant"] = is_dominant(score, self.options)
        data["score"] = xr.concat([profiles[name] for name in INPUTS], "input").assign_coords(input=list(INPUTS))
        for side in "qk":
            both = xr.Dataset(data)[["best_measured", f"r1_{side}"]].stack(place=("layer", "head")).dropna("place")
            ranked = (torch.from_numpy(values.values) for values in both.data_vars.values())
            data[f"score_r1_spearman_{side}"] = xr.DataArray(float(spearman(*ranked)))
        return xr.Dataset(data).merge(cones_dataset(cones))


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
        parts, along = projection_parts(inputs, weight, bias), axis_projection(inputs, axis, weight)
        measures = {
            "r1": squared.r1,
            "rank95": squared.rank.double(),
            "effective_rank": squared.effective_rank,
            "effective_rank_plain": plain.effective_rank,
            "r1_input": along.r1,
            "r1_sum": spectrum(parts.total).r1,
            "bias_share": parts.bias_share,
            "gain": along.gain,
            "axis_share": along.axis_share,
        }
        found |= {f"{name}_{side}": value for name, value in measures.items()}
    return found


def slash_scores(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], geometry: LayerGeometry, heads: list[int]
) -> Float[Tensor, "head distance"]:
    """The slash scores that q and k before RoPE give in a layer of this geometry."""
    positions, slopes = torch.arange(q.shape[1], device=q.device), geometry.alibi_slopes
    return slash_statistics_from_qk(
        rotate(q, positions, geometry.rope),
        rotate(k, positions, geometry.rope),
        geometry.scale,
        window=geometry.window,
        soft_cap=geometry.soft_cap,
        alibi_slopes=None if slopes is None else slopes[heads],
        entropy=False,
    ).score


def cones_dataset(cones: Mapping[int, Sequence[ConeFit]]) -> xr.Dataset:
    """Cosines with the axis and r1 of the inputs, by layer; and how far prompts agree on the axis."""
    layers = sorted(cones)

    def by_layer(measure: Callable[[ConeFit], Any]) -> np.ndarray:
        return np.stack([np.mean([measure(one) for one in cones[layer]], axis=0) for layer in layers])

    data = {
        "cosine_mean": ("layer", by_layer(lambda one: float(one.cosine_mean))),
        "cosine_std": ("layer", by_layer(lambda one: float(one.cosine_std))),
        "r1_h": ("layer", by_layer(lambda one: float(one.r1))),
        "cosine_share": (("layer", "cosine"), by_layer(shares)),
        "axis_agreement": ("layer", np.array([axis_agreement([one.axis for one in cones[layer]]) for layer in layers])),
    }
    return xr.Dataset(data, {"layer": layers, "cosine": (COSINES[1:] + COSINES[:-1]) / 2})


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


def summarise(data: xr.Dataset) -> Summary:
    whole = data.sel(variant="all")
    found = group_means(data, GROUP_MEANS)
    measured, alone, uniform = (found[f"{name}_dominant"] for name in (BEST[0], BEST[1], BEST[3]))
    return {
        **found,
        **{name: float(whole[name].mean()) for name in OF_LAYERS},
        **{f"score_r1_spearman_{side}": float(whole[f"score_r1_spearman_{side}"]) for side in "qk"},
        "bias_share": max(float(data[f"bias_share_{side}"].mean()) for side in "qk"),
        # of the dominant heads' slash score above uniform attention, what the axis part alone makes
        "axis_part": None if measured in (None, uniform) else (alone - uniform) / (measured - uniform),
    }


def findings(own: Summary, null: Any) -> list[str]:
    pair = ["r1_q", "r1_k"]
    random = "no null measured" if null is None else f"random init {in_groups(null, pair)}"
    ranks = " and ".join(f"{own[f'score_r1_spearman_{side}']:.2f}" for side in "qk")
    agree = own["axis_agreement"]
    shared = "" if agree != agree else f"; prompts agree on it to {beside(own, null, 'axis_agreement', '.2f')}"
    lines = [
        f"r1 of Q and K is {in_groups(own, pair)} ({random}); without the first token "
        f"{in_groups(own, pair, variant='without_first_token')}. Rank correlation of slash score and r1 over heads: "
        f"{ranks}.",
        f"Attention inputs have mean cosine {beside(own, null, 'cosine_mean', '.2f')} with their axis{shared}. r1 of "
        f"the inputs is {beside(own, null, 'r1_h', '.2f')}; W_Q amplifies the axis "
        f"{beside(own, null, 'gain_q', '.2f')} times, W_K {beside(own, null, 'gain_k', '.2f')} times.",
        counterfactual_sentence(own),
    ]
    if own["bias_share"] > 0:
        parts = in_groups(own, ["r1_input_q", "r1_input_k"])
        lines.append(f"Biases hold up to {own['bias_share']:.0%} of the energy of Q or K; without them r1 is {parts}.")
    return lines


def counterfactual_sentence(own: Summary) -> str:
    if not own["n_dominant"]:
        return "No head is slash-dominant, so nothing can be asked of the axis alone."
    measured, alone, rest, uniform = (said(own[f"{name}_dominant"], ".3f") for name in BEST)
    return (
        f"With only the axis part entering W_Q and W_K, slash-dominant heads score {alone} at their best distance "
        f"(measured {measured}); with all but the axis {rest} (uniform attention {uniform})."
    )


def table(data: xr.Dataset) -> pd.DataFrame:
    names = {"r1_q": "r1 Q", "r1_k": "r1 K", "gain_q": "gain Q", "gain_k": "gain K"}
    return group_table(summarise(data), names | dict(zip(BEST[:3], ("slash", "axis only", "off axis"), strict=True)))


PER_HEAD, PER_LAYER = ("variant", "layer", "head"), ("variant", "layer")
MEANINGS = {
    "r1": "s_1^2 / sum s^2 of what enters RoPE, after qk-norm",
    "rank95": "how many s^2 make 95 % of their sum",
    "effective_rank": "exp of the entropy of s^2 / sum s^2",
    "effective_rank_plain": "exp of the entropy of s / sum s",
    "r1_input": "r1 of H W, before any qk-norm",
    "r1_sum": "r1 of H W + b, before any qk-norm",
    "bias_share": "|b|^2 / (|H W|^2 + |b|^2); a bias alone has r1 = 1",
    "gain": "|u'W| over its root mean square over directions",
    "axis_share": "|H u u'W|^2 / |H W|^2",
}
VARIABLES = {
    **{
        f"{name}_{side}": Variable(f"{name} of {side.upper()}", description=meaning, dims=PER_HEAD)
        for name, meaning in MEANINGS.items()
        for side in "qk"
    },
    "score": Variable(
        "slash score",
        description="measured, and with a part of the inputs",
        dims=("variant", "input", "layer", "head", "distance"),
    ),
    "best_measured": Variable("slash score", description="highest, over D < N/2", dims=PER_HEAD),
    "best_axis_only": Variable("slash score of the axis alone", description="at the same distance", dims=PER_HEAD),
    "best_off_axis": Variable("slash score of all but the axis", description="at the same distance", dims=PER_HEAD),
    "best_uniform": Variable("slash score of uniform attention", description="at the same distance", dims=PER_HEAD),
    "best_distance": Variable("its distance", "tokens", dims=PER_HEAD),
    "dominant": Variable("slash-dominant", description="score >= kappa at one of the distances", dims=PER_HEAD),
    "cosine_mean": Variable("mean cosine with the axis", description="of the inputs h: <h, u> / |h|", dims=PER_LAYER),
    "cosine_std": Variable("spread of the cosine", description="standard deviation over inputs", dims=PER_LAYER),
    "r1_h": Variable("r1 of the inputs", description="s_1^2 / sum s^2 of H", dims=PER_LAYER),
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
)
