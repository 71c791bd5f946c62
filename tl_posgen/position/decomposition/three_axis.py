"""The three-axis fit: how far each head's scores are position + query + key."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, NonNegative, Positive
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.decomposition.all_layers import of_all_layers
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments, pair_moments, pair_moments_from_rows
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights, refuse_long
from tl_posgen.position.decomposition.numbers.three_axis_fit import Gauge, ThreeAxisFit, fit_three_axis
from tl_posgen.report.head_figures import head_map, layer_curves
from tl_posgen.report.kinds import lines

Weights = Sequence[int | float] | Literal["attention"]
_ALIKE = "all pairs weighted alike"
_DIMS = ("tokens", *HEAD)
_MEAN = "mean over prompts; level and slope by the gauge"
_WITHIN = "the mean of each row removed from W and from the fit: all that softmax sees"
_NOISE = "reached by chance by iid Gaussian scores on these pairs; weighted by attention, by the scores shuffled"
_GAUGES = {
    "flat_keys": "sum b = sum c = 0, c without a linear trend",
    "flat_distance": "sum b = sum c = 0, a without a linear trend",
    "flat_queries": "sum b = sum c = 0, b without a linear trend",
}


def fit_capture(
    layer: LayerCapture,
    *,
    ridge: float = 0.0,
    gauge: Gauge | str = "flat_keys",
    weights: Weights | None = None,
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """Return the fits of a layer with and without the first token, None where nothing would be left;
    `layer.shared(fit_capture)` keeps the usual ones.

    Weighted by attention, every pair counts as softmax_j W_ij, less what the layer's own sinks take. `iid_r` is then
    the r of the same scores shuffled over the head's pairs, under the attention that they then make: weights that
    follow the scores let a fit of anything look good.
    """
    options = {"ridge": ridge, "gauge": gauge}
    if not isinstance(weights, str):
        return fits_of(layer.shared(pair_moments_of) if weights is None else pair_moments_of(layer, weights), **options)
    refuse_long(layer.length)
    scores = double(layer.scores())

    def fit(scores: Float[Tensor, "head query key"], first_token: bool = True) -> ThreeAxisFit:
        pairs = CausalPairs(layer.length, layer.geometry.window, first_token)
        return fit_pair_weights(scores, layer.attention(scores), pairs, **options)

    full = replace(fit(scores), iid_r=fit(shuffled(scores)).r)
    return full, fit(scores, False) if layer.length > 1 else None


def fits_of(moments: PairMoments, **options: Any) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """Return the fits of these scores with and without the first token; None where nothing would be left."""
    without = moments.without_first_token
    return fit_three_axis(moments, **options), None if without is None else fit_three_axis(without, **options)


def _values_of(full: ThreeAxisFit, later: ThreeAxisFit | None) -> dict[str, Tensor]:
    """Return the variables of fits with and without the first token, NaN where nothing is left without it."""
    values = torch.stack([full.r, full.r_within_rows, full.std_within_rows])
    later_values = (
        values * torch.nan if later is None else torch.stack([later.r, later.r_within_rows, later.std_within_rows])
    )
    r, within, std = torch.stack([values, later_values], 1)
    return {"r": r, "r_within_rows": within, "std": std, "a": full.a, "b": full.b, "c": full.c, "iid_r": full.iid_r}


def shuffled(scores: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """Return the scores with the visible ones of every head in an order drawn with seed 0."""
    visible = scores[0] != -torch.inf
    values = scores[:, visible].cpu()
    order = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    mixed = torch.full_like(scores, -torch.inf)
    mixed[:, visible] = values.gather(1, order).to(scores)
    return mixed


def pair_moments_of(layer: LayerCapture, weights: Sequence[int | float] = (1.0,)) -> PairMoments:
    """Return the pair moments of a layer: from q and k where the score is bilinear in them, else from the scores."""
    geometry = layer.geometry
    options: dict[str, Any] = {"window": geometry.window, "distance_weights": weights}
    if layer.bilinear:
        return pair_moments(layer.rotated_q, layer.rotated_k, geometry.scale, finite=layer.finite, **options)
    return pair_moments_from_rows(layer.score_rows, layer.length, **options)


def weighting(weights: Weights | None) -> str:
    """Return the weights of pairs in words, such as "pairs weighted by distance: 2, 1, then 0.05"."""
    if weights is None:
        return _ALIKE
    if isinstance(weights, str):
        return f"pairs weighted by {weights}"
    *near, far = (f"{weight:.3g}".removeprefix("0") for weight in weights)
    listed = near if len(near) <= 8 else [*near[:7], "..."]
    return f"pairs weighted by distance: {', '.join(listed)}, then {far}"


def _draw_curves(result: Any) -> go.Figure:
    """Draw a(i - j) of every head, a panel a layer."""
    gauge = f"gauge: {_GAUGES[result.measure.gauge]}. Curvature is identified; level and slope are not"
    subtitle = f"{result.trained.attrs['weighting']}; {gauge}"
    options: dict[str, Any] = {"y_title": "a", "log_x": True, "share": 1.0}
    return layer_curves(result, "a", "distance", title="Score by distance, a(i-j)", subtitle=subtitle, **options)


@dataclass(frozen=True)
class ThreeAxis(Measure):
    r"""W_ij ~ a_{i-j} + b_i + c_j: correlation r of every head's scores with the best such sum, over visible pairs.

    Every head's pre-softmax scores are fitted by a(i-j) + b(i) + c(j), by least squares over all visible pairs. b adds
    one number to all scores of a query, and softmax ignores it: r within rows, among the keys of each query, leaves it
    out. The first token often draws attention whatever the text, so everything is shown without it too.

    W are the pre-softmax scores, i the query's position, j <= i the key's. a, b, c are fitted prompt by prompt; the
    numbers of several prompts are means.

    Args:
        ridge: penalty on a^2 + b^2 + c^2, in pairs: an entry with N pairs is shrunk by about N / (N + ridge).
        gauge: what fixes levels and slope of a, b, c, which the scores leave open: sum b = sum c = 0, and no linear
            trend in c ("flat_keys"), in b ("flat_queries") or in a ("flat_distance").
        weights: of pairs, in the fit and in every correlation: w_0, w_1, ... by distance, above 0, the last one for all
            distances beyond; "attention", for prompts of 1,024 tokens at most; None: all alike.

    Raises:
        InputError: scores that are not finite, a prompt too long for weights by attention.

    Source: three axes: Han & Ji 2025 (arXiv 2503.13305), who report 0.959 for an estimator that is not public; the
    exact fit, the weights, r within rows and the nulls are ours.

    Example:
        >>> result = ThreeAxis(gauge="flat_distance")("mini", "Down, down, down.", nulls=0)
        >>> bool((result.sel()["b"].sum("query").round(6) == 0).all())
        True
    """

    ridge: NonNegative = 0.0
    gauge: Gauge = "flat_keys"
    weights: Annotated[Sequence[Positive], Each(once=False)] | Literal["attention"] | None = None

    question = "Are the scores position + query + key?"
    variables = {
        "r": Variable.correlation(
            "r of position + query + key",
            "Pearson's r of W and the fit",
            _DIMS,
            "three_axis_r",
            "three curves",
            judged=True,
        ),
        "r_within_rows": Variable.correlation(
            "r within rows", _WITHIN, _DIMS, "three_axis_r_within_rows", "in rows", judged=True
        ),
        "std": Variable("std within rows", "logits", "of W: the size of what softmax sees", _DIMS, interval=True),
        "iid_r": Variable("r of noise", "", _NOISE, HEAD),
        "a": Variable("score by distance", "logits", _MEAN, (*HEAD, "distance")),
        "b": Variable("score by query position", "logits", _MEAN, (*HEAD, "query")),
        "c": Variable("score by key position", "logits", _MEAN, (*HEAD, "key")),
    }
    curves = ("a", "b", "c")
    by_head = frozenset({"curves"})
    caveats = {
        "absolute": "the key curve c mixes where a key stands with what it is, and a holds only what is a function of "
        "distance; r still says how additive the scores are, not that they are position + content. What places "
        "hold: variance(absolute=True).",
        "alibi": "three axes fit a straight line exactly, so where content is small beside the slope, as at random "
        "init, r is near 1 and random init is no lower bound. The slope is not in the residual: compare its size in "
        "logits.",
        "none": "a(i - j) is what texts themselves have in common at a distance, such as near tokens being alike.",
    }

    def of_layer(self, layer: LayerCapture) -> Any:
        if isinstance(self.weights, str):
            return fit_capture(layer, **asdict(self))
        return layer.shared(pair_moments_of) if self.weights is None else pair_moments_of(layer, self.weights)

    def of_layers(self, layer_values: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
        if isinstance(self.weights, str):
            return [_values_of(*fits) for fits in layer_values]
        options = {"ridge": self.ridge, "gauge": self.gauge}
        return of_all_layers(self, layer_values, lambda moments: _values_of(*fits_of(moments, **options)))

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data = sums.means()
        why = ""
        lengths = sorted(set(sums.lengths.values()))
        windows = {geometry.window for geometry, _ in sums.layers.values()} - {None}
        narrow = [window for window in windows if CausalPairs(max(lengths), window).saturated]
        if short := [n for n in lengths if CausalPairs(n).saturated]:
            tokens = ", ".join(map(str, short))
            why = f"prompts of {tokens} tokens have as many parameters as pairs; give 4 tokens at least, better 100"
        elif narrow:
            widths = " or ".join(map(str, sorted(narrow)))
            why = f"a window of {widths} leaves no more pairs than the fit has parameters"
        elif data["r"].isnull().all():
            why = "the scores of every head are constant"
            if not np.isfinite(data["std"]).all():
                why = "scores are so large that their squares are no finite numbers in float32"
        return data.assign_attrs(weighting=weighting(self.weights), not_defined=why)

    def findings(self, numbers: Numbers) -> list[str]:
        if not numbers("r"):
            return [f"Whether scores are position + query + key cannot be said: {numbers.attrs['not_defined']}."]
        weighted = "" if numbers.attrs["weighting"] == _ALIKE else f" ({numbers.attrs['weighting']})"
        size, n_heads = numbers("std"), int(numbers.data["r"].sel(tokens="all").notnull().sum())
        return [
            "A sum of three curves, a(distance) + b(query) + c(key), correlates with the scores at "
            f"r = {numbers('r'):.3f}{weighted}, mean over {counted(n_heads, 'head')}{numbers.layers_not_above('r')}; "
            "without "
            f"the first token {numbers('r', first_token=False):.3f}.",
            f"Within rows, which is all that softmax sees, r = {numbers('r_within_rows'):.3f}, of scores with a "
            "standard "
            f"deviation of {size.with_interval:.2f} logits{size.null_in_brackets:.2f}. Highest r: "
            f"{numbers.extreme('r_within_rows'):.3f}; lowest: {numbers.extreme('r_within_rows', largest=False):.3f}.",
        ]

    figures = {
        "depth": lines(
            {"correlation": [("r of position + query + key", "r"), ("r within rows", "r_within_rows")]}
            | {"std of scores within rows, logits": [("scores", "std")]},
            title="Three-axis fit by layer",
        ),
        "map": head_map(
            "r",
            ("r", {"tokens": "without first"}),
            "r_within_rows",
            title="Three-axis fit",
            subtitle="correlation of the scores with a(i-j) + b(i) + c(j), {weighting}; "
            "within rows is what softmax can see",
            limits=(0.0, 1.0),
        ),
        "curves": _draw_curves,
    }
