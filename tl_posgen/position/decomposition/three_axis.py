"""The three-axis fit: how far each head's scores are position + query + key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.pair_moments import PairMoments, pair_moments, pair_moments_from_rows
from tl_posgen.position.decomposition.pair_weights_fit import fit_pair_weights, refuse_long
from tl_posgen.position.decomposition.three_axis_fit import Gauge, ThreeAxisFit, fit_three_axis, pooled_r
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN
from tl_posgen.report.figures import head_map, layer_curves
from tl_posgen.report.sentences import at_head, beside, extremes, means
from tl_posgen.summary import Summary

CURVES = {"a": "distance", "b": "query", "c": "key"}
GAUGES = {
    "flat_keys": "sum b = sum c = 0, c without a linear trend",
    "flat_distance": "sum b = sum c = 0, a without a linear trend",
    "flat_queries": "sum b = sum c = 0, b without a linear trend",
}

Weights = Sequence[int | float] | Literal["attention"]
ALIKE = "all pairs weighted alike"


@dataclass(frozen=True)
class ThreeAxis(Options):
    r"""W_ij ~ a_{i-j} + b_i + c_j: correlation r of every head's scores with the best such sum, over visible pairs.

    W are the pre-softmax scores, i the query's position, j <= i the key's. a, b, c are fitted by least squares, prompt
    by prompt; what is given of several prompts is the mean.

    Args:
        ridge: penalty on a^2 + b^2 + c^2, in pairs: an entry with N pairs is shrunk by about N / (N + ridge).
        gauge: which constraint fixes levels and slope of a, b, c, which no data can place: all have
            sum b = sum c = 0, and no linear trend in c ("flat_keys"), in b ("flat_queries") or in a ("flat_distance").
        diagonal: whether a query paired with its own key counts.
        weights: how much a pair counts, in the fit and in every correlation: w_0, w_1, ... by distance, above 0, the
            last one for all distances beyond; or "attention", what the query pays the key, for prompts of 1,024 tokens
            at most; None: all alike.

    Raises:
        InputError: an unknown gauge, a ridge below 0, a weight that is not above 0; later, scores that are not finite,
            a prompt too long for weights by attention.

    Source: three axes: Han & Ji 2025 (arXiv 2503.13305), who report .959 for an estimator that is not public; the
    exact fit, the weights, r within rows and the nulls are ours.

    Example:
        >>> import tl_posgen
        >>> from tl_posgen.position.decomposition import three_axis
        >>> result = three_axis("mini", "Down, down, down.", gauge="flat_distance", null_seeds=())
        >>> bool((result.dataset["b"].sum("query").round(6) == 0).all())
        True
    """

    ridge: float = 0.0
    gauge: Gauge = "flat_keys"
    diagonal: bool = True
    weights: Weights | None = None

    def check(self) -> None:
        if self.weights is not None and not isinstance(self.weights, str):
            CausalPairs(1, distance_weights=tuple(map(float, self.weights)))  # refuses those that are not above 0
        if not 0 <= self.ridge < float("inf"):
            raise InputError(f"three_axis: ridge={self.ridge!r}: give a number of pairs, 0 or more")


class ThreeAxisCollector(Collector):
    options: ThreeAxis

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._too_short: set[tuple[int, int | None]] = set()  # length and window of what leaves too few pairs

    def update(self, layer: LayerCapture) -> None:
        usual = self.options.weights is None and self.options == ThreeAxis()
        full, rest = layer.once(fit_capture) if usual else fit_capture(layer, **vars(self.options))
        if full.pairs.saturated:
            window = layer.geometry.window
            self._too_short.add((layer.length, None if window is None or window >= layer.length else window))
        self.add(layer, r=full.r, r_within_rows=full.r_within_rows, tss=full.tss, a=full.a, b=full.b, c=full.c)
        self.add(layer, n_distance=full.n_distance.expand_as(full.a), iid_r=full.iid_r)
        unknown = torch.full_like(full.r, torch.nan)
        r, within, tss = (unknown, unknown, full.tss) if rest is None else (rest.r, rest.r_within_rows, rest.tss)
        self.add(layer, rest=r, rest_within_rows=within, rest_tss=tss)

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._too_short = self._too_short | other._too_short
        return both

    def dataset(self) -> xr.Dataset:
        rows = self.rows
        r, rest = rows.array("r"), rows.array("rest")
        data = {
            "r": r.mean("prompt"),
            "r_without_first_token": rest.mean("prompt"),
            "r_within_rows": rows.array("r_within_rows").mean("prompt"),
            "r_within_rows_without_first_token": rows.array("rest_within_rows").mean("prompt"),
            "r_per_prompt": r,
            "r_layer": r.mean(("prompt", "head")),
            "r_layer_without_first_token": rest.mean(("prompt", "head")),
            "r_pooled": pooled(r, rows.array("tss")),
            "r_pooled_without_first_token": pooled(rest, rows.array("rest_tss")),
            "iid_r": rows.array("iid_r").mean(("prompt", "head")),
            "n_distance": rows.array("n_distance", "distance").sum("prompt").max("head"),
        }
        data |= {name: rows.array(name, dim).mean("prompt") for name, dim in CURVES.items()}
        return xr.Dataset(data).assign_attrs(
            gauge=self.options.gauge, weighting=weighting(self.options.weights), not_defined=self._why_not_defined(r)
        )

    def _why_not_defined(self, r: xr.DataArray) -> str:
        if lengths := sorted({length for length, window in self._too_short if window is None}):
            said = ", ".join(map(str, lengths))
            return f"prompts of {said} tokens have as many parameters as pairs; give 4 tokens at least, better 100"
        if windows := sorted({window for _, window in self._too_short if window is not None}):
            return f"a window of {' or '.join(map(str, windows))} leaves no more pairs than the fit has parameters"
        return "the scores of every head are constant" if bool(r.isnull().all()) else ""


def fit_capture(
    layer: LayerCapture,
    *,
    ridge: float = 0.0,
    gauge: Gauge | str = "flat_keys",
    diagonal: bool = True,
    weights: Weights | None = None,
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """The fits of a layer with and without the first token; ask for the usual one by `layer.once(fit_capture)`."""
    if isinstance(weights, str):
        return fit_by_attention(layer, ridge=ridge, gauge=gauge, diagonal=diagonal)
    usual = diagonal and weights is None
    moments = layer.once(moments_of) if usual else moments_of(layer, diagonal=diagonal, weights=weights)
    return fits_of(moments, ridge=ridge, gauge=gauge)


def fits_of(
    moments: PairMoments, *, ridge: float = 0.0, gauge: Gauge | str = "flat_keys"
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """The fits of these scores with and without the first token; None where nothing would be left."""
    without = moments.without_first_token
    full = fit_three_axis(moments, ridge=ridge, gauge=gauge)
    return full, None if without is None else fit_three_axis(without, ridge=ridge, gauge=gauge)


def fit_by_attention(
    layer: LayerCapture, *, ridge: float = 0.0, gauge: Gauge | str = "flat_keys", diagonal: bool = True
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """The same with every pair weighted by its attention, softmax_j W_ij, what a sink takes left out.

    `iid_r` is the r of the same scores shuffled over the head's pairs, under the attention that they then make: weights
    that follow the scores let a fit of anything look good.
    """
    refuse_long(layer.length)
    scores = layer.scores().double()

    def fit(scores: Float[Tensor, "head query key"], first_token: bool = True) -> ThreeAxisFit:
        pairs = CausalPairs(layer.length, layer.geometry.window, first_token, diagonal)
        return fit_pair_weights(scores, scores.softmax(-1), pairs, ridge=ridge, gauge=gauge)

    full = replace(fit(scores), iid_r=fit(shuffled(scores)).r)
    return full, fit(scores, False) if layer.length > (1 if diagonal else 2) else None


def shuffled(scores: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """The visible scores of every head in an order drawn with seed 0."""
    visible = scores[0] != -torch.inf
    values = scores[:, visible].cpu()
    order = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    mixed = torch.full_like(scores, -torch.inf)
    mixed[:, visible] = values.gather(1, order).to(scores)
    return mixed


def moments_of(
    layer: LayerCapture, *, diagonal: bool = True, weights: Sequence[int | float] | None = None
) -> PairMoments:
    """Pair moments of a layer's scores: from q and k where the score is bilinear in them, else from the scores."""
    geometry, weights = layer.geometry, (1.0,) if weights is None else weights
    how: dict[str, Any] = {"window": geometry.window, "diagonal": diagonal, "distance_weights": weights}
    if layer.bilinear:
        return pair_moments(layer.rotated_q, layer.rotated_k, geometry.scale, **how)
    return pair_moments_from_rows(layer.score_rows, layer.length, **how)


def pooled(r: xr.DataArray, tss: xr.DataArray) -> float:
    """One correlation over the entries of all heads and prompts, see `pooled_r`."""
    return pooled_r(torch.from_numpy(r.values), torch.from_numpy(tss.values))


# What is shown


def weighting(weights: Weights | None) -> str:
    """How pairs count, in words.

    Example:
        >>> weighting((2.0, 1.0, 0.05)), weighting("attention")
        ('pairs weighted by distance: 2, 1, then .05', 'pairs weighted by attention')
    """
    if weights is None:
        return ALIKE
    if isinstance(weights, str):
        return f"pairs weighted by {weights}"
    *near, far = (f"{weight:.3g}".removeprefix("0") for weight in weights)
    shown = near if len(near) <= 8 else [*near[:7], "..."]
    return f"pairs weighted by distance: {', '.join(shown)}, then {far}"


def summarise(data: xr.Dataset) -> Summary:
    names = ("r", "r_without_first_token", "r_within_rows", "r_within_rows_without_first_token")
    return {
        "n_heads": int(data["r"].notnull().sum()),
        "not_defined": data.attrs.get("not_defined", ""),
        "weighting": data.attrs.get("weighting", ALIKE),
        **means(data, *names, "iid_r", "r_pooled", "r_pooled_without_first_token"),
        **extremes(data, "r_within_rows"),
    }


def findings(own: Summary, null: Any) -> list[str]:
    if not own["n_heads"]:
        return [f"Whether scores are position + query + key cannot be said: {own['not_defined']}."]
    weighted = "" if own["weighting"] == ALIKE else f" ({own['weighting']})"
    return [
        f"Scores correlate with position + query + key at r = {beside(own, null, 'r')}{weighted}, mean over "
        f"{own['n_heads']} heads; without the first token {beside(own, null, 'r_without_first_token')}.",
        f"Within rows, which is all that softmax sees, r = {beside(own, null, 'r_within_rows')}. Highest: "
        f"{at_head(own['r_within_rows_highest_head'], own['r_within_rows_highest'])}; lowest: "
        f"{at_head(own['r_within_rows_lowest_head'], own['r_within_rows_lowest'])}.",
    ]


def curves(result: Any) -> go.Figure:
    attrs = result.dataset.attrs
    gauge = f"gauge: {GAUGES[attrs['gauge']]}. Curvature is identified; level and slope are not"
    subtitle = f"{attrs.get('weighting', ALIKE)}; {gauge}"
    title = "Score by distance, a(i-j)"
    return layer_curves(result, "a", "distance", title=title, subtitle=subtitle, y_title="a", log_x=True, share=1.0)


HEAD, OUT = ("layer", "head"), WITHOUT_FIRST_TOKEN
MEAN = "mean over prompts; level and slope by the gauge"
WITHOUT = "the first token left out, as query and as key"
WITHIN = "the mean of each row removed from W and from the fit: all that softmax sees"
OF_LAYER = "mean over its heads and prompts"
NOISE = "what iid Gaussian scores reach by chance on these pairs; weighted by attention, the scores shuffled"
VARIABLES = {
    "r": Variable(
        "r of position + query + key", "", "Pearson's r of W and the fit", HEAD, "three_axis_r", "r", True, (-1.0, 1.0)
    ),
    "r_without_first_token": Variable(
        "r, first token out", "", WITHOUT, HEAD, f"three_axis_r{OUT}", "r-1st", True, (-1.0, 1.0)
    ),
    "r_within_rows": Variable(
        "r within rows", "", WITHIN, HEAD, "three_axis_r_within_rows", "r-row", True, (-1.0, 1.0)
    ),
    "r_within_rows_without_first_token": Variable(
        "r within rows, first token out", description=WITHOUT, interval=True, bounds=(-1.0, 1.0)
    ),
    "r_per_prompt": Variable("r of each prompt", dims=("prompt", *HEAD)),
    "r_layer": Variable("r of a layer", "", OF_LAYER, ("layer",)),
    "r_layer_without_first_token": Variable("r of a layer, first token out", "", OF_LAYER, ("layer",)),
    "r_pooled": Variable("pooled r", "", "one correlation over the entries of all heads and prompts", ()),
    "r_pooled_without_first_token": Variable("pooled r, first token out", "", WITHOUT, ()),
    "iid_r": Variable("r of noise", "", NOISE, ("layer",)),
    "n_distance": Variable("pairs behind each entry of a", "pairs", dims=("layer", "distance")),
    "a": Variable("score by distance", "logits", MEAN, (*HEAD, "distance")),
    "b": Variable("score by query position", "logits", MEAN, (*HEAD, "query")),
    "c": Variable("score by key position", "logits", MEAN, (*HEAD, "key")),
}

MEASURE = Measure(
    name="three_axis",
    question="Are the scores position + query + key?",
    explanation=(
        "Least-squares fit of every head's pre-softmax scores to a(i-j) + b(i) + c(j) over all visible pairs. b moves "
        "whole rows, which softmax cannot see, so the correlation within rows stands beside r. The first token often "
        "draws attention whatever the text, so everything is shown without it too."
    ),
    source="three axes: Han & Ji 2025 (arXiv 2503.13305); exact fit, r within rows and nulls: ours",
    options=ThreeAxis,
    collector=ThreeAxisCollector,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=("a", "b", "c"),
    by_head=frozenset({"curves", "prompts"}),
    no_tokens=(
        "its parts are of positions, all prompts together; "
        "measures='attention_examples' shows attention and parts on the first prompt"
    ),
    figures={
        "map": head_map(
            *("r", "r_without_first_token", "r_within_rows"),
            title="Three-axis fit",
            subtitle="correlation of the scores with a(i-j) + b(i) + c(j), {weighting}; "
            "within rows is what softmax can see",
        ),
        "curves": curves,
        "prompts": partial(
            layer_curves,
            measure="r_per_prompt",
            along="prompt",
            title="Three-axis r prompt by prompt",
            subtitle="one line a head; the interval over prompts is in r_low, r_high of the table",
            y_title="r",
        ),
    },
    caveats={
        "absolute": "the key curve c mixes where a key stands with what it is, and a holds only what is a function of "
        "distance; r still says how additive the scores are, not that they are position + content. See across_prompts.",
        "alibi": "three axes fit a straight line exactly, so where content is small beside the slope, as at random "
        "init, r is near 1 and random init is no lower bound. The slope is not in the residual: compare its size in "
        "logits.",
        "none": "a(i - j) is what texts themselves have in common at a distance, such as near tokens being alike.",
    },
)
