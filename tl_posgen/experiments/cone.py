"""Why queries and keys of slash heads are nearly of rank one: attention inputs on a cone, projected onto its axis."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.analyzers.slash import check_dominance
from tl_posgen.errors import InputError
from tl_posgen.maths.agreement import spearman
from tl_posgen.maths.cone import Cone, axis_only, axis_projection, projection_parts
from tl_posgen.maths.cone import cone as cone_of
from tl_posgen.maths.rope import rotate
from tl_posgen.maths.slash import SHORT_DISTANCES, SHORT_KAPPA, SlashStatistics, slash_statistics_from_qk
from tl_posgen.maths.spectra import singular_values, spectrum, spectrum_of_values
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.projections import Projections, run_projections
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import to_prompts
from tl_posgen.results import Result

VARIANTS = {"all": 0, "without_first": 1}  # name -> tokens left out at the start
INPUTS = ("measured", "axis_only", "off_axis")
MEASURES = (
    *("r1", "rank95", "effective_rank", "effective_rank_plain", "r1_input", "r1_sum", "bias_share"),
    *("gain", "axis_share"),
)
PER_HEAD = tuple(f"{name}_{side}" for name in MEASURES for side in ("q", "k"))
COSINES = np.linspace(-1, 1, 41)  # edges of the histogram


def cone(
    model: Model,
    prompts: Any,
    *,
    length: int | None = None,
    n_prompts: int | None = None,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = SHORT_DISTANCES,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""r1 = s_1^2 / sum s^2 of Q and K before RoPE, beside that of H, the inputs of W_Q and W_K, and their cone.

    The cone's axis u is the top right-singular vector of H = norm(residual stream), anew for every prompt. Nothing is
    centred. Everything is measured of all tokens ("all") and of all but the first ("without_first"), which often is so
    large that it makes any matrix it is a row of nearly rank one.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        kappa, distances: what makes a head slash-dominant.
        null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "cone". Over (variant, layer): `cosine_mean`, `cosine_std` of <h, u> / |h|, `r1_h`,
        `axis_agreement` (mean |<u, u'>| over pairs of prompts); over cosine too `cosine_share`, the histogram.
        Over (variant, layer, head), for q and for k: `r1`, `rank95` (how many s^2 make 95 % of the sum),
        `effective_rank` (exp of the entropy of s^2 / sum s^2) and `effective_rank_plain` (of s / sum s) of what enters
        RoPE (after qk-norm); `r1_input` and `r1_sum` of H W and H W + b before any qk-norm, `bias_share` =
        |b|^2 / (|H W|^2 + |b|^2) (a bias alone has r1 = 1), `gain` = |u'W| over its root mean square over directions,
        `axis_share` = |H u u'W|^2 / |H W|^2. Over (input, variant, layer, head, distance) `score`, the slash score as
        "measured", and with only <h, u> u ("axis_only") or only the rest ("off_axis") entering W_Q and W_K, in this
        layer alone; per head, at the measured `best_distance` (over D < N/2), `best_measured`, `best_axis_only`,
        `best_off_axis`, `best_baseline` (uniform attention); and `dominant`. Means over prompts. Over heads:
        `score_r1_spearman_q`, `score_r1_spearman_k`, the rank correlation of `best_measured` with r1.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], a distance that no prompt reaches.
        UnsupportedModelError: a layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: that slash-dominant heads have nearly rank-one Q and K because token embeddings lie on a cone is claimed by
    Cheng et al. 2026 (arXiv 2601.08297), whose measures are not known to us; these, and the counterfactual, are ours.

    Example:
        >>> import tl_posgen
        >>> text = "Down, down, down. Would the fall never come to an end?"
        >>> data = cone(tl_posgen.load_model("mini"), text, null_seed=None, progress=False).dataset
        >>> bool((data["r1_q"] <= 1).all()), data["cosine_mean"].dims
        (True, ('variant', 'layer'))
    """
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    check_dominance(kappa, distances)
    longest = max(len(prompt) for prompt in tokens)
    if max(distances) >= longest - 1:
        raise InputError(f"distance {max(distances)}: without its first token the longest prompt has {longest - 1}")
    options = {"kappa": kappa, "distances": sorted(set(distances)), "progress": progress}
    dataset = measured(model, tokens, **options, label=model_label(model))
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, **options, label=null_label(null_seed))
    return Result("cone", dataset, null, provenance_of(model, tokens, null_seed))


def measured(
    model: Model,
    tokens: Sequence[Int[Tensor, " _"]],
    *,
    kappa: float,
    distances: Sequence[int],
    progress: bool,
    label: str,
) -> xr.Dataset:
    """Everything `cone` measures of one model."""
    found = {variant: Variant() for variant in VARIANTS}
    for number, prompt in enumerate(tqdm(tokens, desc=f"cone, {label}", unit="prompt", disable=not progress)):

        def take(capture: LayerCapture, inputs: Tensor, projections: Projections, number: int = number) -> None:
            capture.prompt = number
            for variant, first in VARIANTS.items():
                found[variant].add(capture, inputs[first:], projections, first)

        run_projections(model, prompt, take)
    parts = [variant.dataset(kappa, distances) for variant in found.values()]
    # one token less: no score at the last distance
    data = xr.concat(parts, xr.DataArray(list(VARIANTS), dims="variant", name="variant"), join="outer")
    return data.assign_attrs(model=label, kappa=kappa, rows=["variant", "layer", "head"])


class Variant:
    """The measures of one choice of tokens, gathered over layers and prompts."""

    def __init__(self) -> None:
        self.heads = HeadRows()
        self.cones: dict[int, list[Cone]] = {}

    def add(
        self, capture: LayerCapture, inputs: Float[Tensor, "pos d_model"], projections: Projections, first: int
    ) -> None:
        q, k = capture.q[:, first:], capture.k[:, first:]
        found = cone_of(inputs)
        self.cones.setdefault(capture.layer, []).append(found)
        group = len(q) // len(projections.w_k)
        self.heads.add(capture, **rank_measures(inputs, found.axis, projections.w_q, projections.b_q, q, "q"))
        of_keys = rank_measures(inputs, found.axis, projections.w_k, projections.b_k, k[::group], "k")
        self.heads.add(capture, **{name: projections.per_query_head(value) for name, value in of_keys.items()})
        scores = {"measured": slash_of(q, k, capture.geometry)}
        for name, kept in {"axis_only": axis_only(inputs), "off_axis": inputs - axis_only(inputs)}.items():
            scores[name] = slash_of(projections.queries(kept), projections.keys(kept), capture.geometry)
        self.heads.add(capture, **{name: one.score for name, one in scores.items()})
        baseline = scores["measured"].baseline
        self.heads.add(capture, baseline=baseline.expand(len(q), -1))

    def dataset(self, kappa: float, distances: Sequence[int]) -> xr.Dataset:
        """Means over prompts, and every head's scores at its best distance."""
        profiles = {name: self.heads.array(name, "distance").mean("prompt") for name in (*INPUTS, "baseline")}
        score = profiles["measured"]
        place = score.isel(distance=slice(max(1, score.sizes["distance"] // 2))).argmax("distance")
        data = {name: self.heads.array(name).mean("prompt") for name in PER_HEAD}
        data |= {f"best_{name}": one.isel(distance=place).drop_vars("distance") for name, one in profiles.items()}
        data["best_distance"] = place
        data["dominant"] = (score.sel(distance=list(distances)) >= kappa).any("distance")
        data["score"] = xr.concat([profiles[name] for name in INPUTS], pd.Index(INPUTS, name="input"))
        for side in ("q", "k"):
            ranked = (torch.from_numpy(data[name].values.ravel()) for name in ("best_measured", f"r1_{side}"))
            data[f"score_r1_spearman_{side}"] = xr.DataArray(float(spearman(*ranked)))
        return xr.Dataset(data).merge(cones_dataset(self.cones))


def rank_measures(
    inputs: Float[Tensor, "pos d_model"],
    axis: Float[Tensor, " d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None,
    entering: Float[Tensor, "head pos d_head"],
    side: str,
) -> dict[str, Float[Tensor, " head"]]:
    """How near rank one the vectors that enter RoPE are, their parts, and what W does with the axis.

    Args:
        entering: Q or K as it enters RoPE: after qk-norm, where there is one.
        side: "q" or "k", the end of every name.
    """
    values = singular_values(entering)
    squared, plain = spectrum_of_values(values), spectrum_of_values(values, squared=False)
    parts, along = projection_parts(inputs, weight, bias), axis_projection(inputs, axis, weight)
    found = {
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
    return {f"{name}_{side}": value for name, value in found.items()}


def slash_of(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], geometry: LayerGeometry
) -> SlashStatistics:
    """Slash statistics that q and k before RoPE give in a layer of this geometry."""
    positions = torch.arange(q.shape[1], device=q.device)
    return slash_statistics_from_qk(
        rotate(q, positions, geometry.rope),
        rotate(k, positions, geometry.rope),
        geometry.scale,
        window=geometry.window,
        soft_cap=geometry.soft_cap,
        alibi_slopes=geometry.alibi_slopes,
        entropy=False,
    )


def cones_dataset(cones: Mapping[int, Sequence[Cone]]) -> xr.Dataset:
    """Cosines with the axis and r1 of the inputs, by layer; and how far prompts agree on the axis."""
    layers = sorted(cones)

    def by_layer(measure: Callable[[Cone], Any]) -> np.ndarray:
        return np.stack([np.mean([measure(one) for one in cones[layer]], axis=0) for layer in layers])

    data = {
        "cosine_mean": ("layer", by_layer(lambda one: float(one.cosine_mean))),
        "cosine_std": ("layer", by_layer(lambda one: float(one.cosine_std))),
        "r1_h": ("layer", by_layer(lambda one: float(one.r1))),
        "cosine_share": (("layer", "cosine"), by_layer(shares)),
        "axis_agreement": ("layer", np.array([axis_agreement([one.axis for one in cones[layer]]) for layer in layers])),
    }
    return xr.Dataset(data, {"layer": layers, "cosine": (COSINES[1:] + COSINES[:-1]) / 2})


def shares(one: Cone) -> np.ndarray:
    """The share of inputs in each bin of the histogram; a cosine that rounds to just over 1 counts as 1."""
    counts, _ = np.histogram(one.cosine.clamp(-1, 1).cpu().numpy(), COSINES)
    return counts / counts.sum()


def axis_agreement(axes: Sequence[Float[Tensor, " d_model"]]) -> float:
    """Mean |<u, u'>| over pairs of prompts; NaN of a single prompt."""
    stacked = torch.stack(list(axes))
    between = (stacked @ stacked.mT).abs()
    pairs = len(axes) * (len(axes) - 1)
    return float((between.sum() - between.trace()) / pairs) if pairs else float("nan")
