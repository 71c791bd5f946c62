"""The variance decomposition: how much of each head's scores is query, key, distance, and interaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.collector import MomentsCollector, Variable
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import MOST_DISTANCES, check_whole
from tl_posgen.position.decomposition.variance_shares import (
    COMPONENTS,
    DistanceWeights,
    TripleMoments,
    VarianceShares,
    variance_shares,
)
from tl_posgen.report.figures import Panels, finish, head_map, head_names, model_label, sides
from tl_posgen.report.sentences import at_head, beside, extremes, means
from tl_posgen.summary import Summary

PARTS = {"position": ("d", "qd"), "content": ("k", "qk"), "interaction": ("kd", "qkd")}


@dataclass(frozen=True)
class Variance(Options):
    r"""Var w(q, k, d) = shares of q, k, d, qk, qd, kd, qkd over all triples (query, key, distance) of the corpus.

    w(q_i, k_j, d) is the score that query i would give key j at distance d. The seven shares sum to 1. Softmax does not
    see q, so `position` = d + qd, `content` = k + qk and `interaction` = kd + qkd are shares of what is left without
    it. A head is f(q, d) + g(q, k) exactly where interaction is zero. The first token is left out;
    `share_*_with_first_token` keep it. Moments add up exactly over any number of prompts; memory does not grow.

    A soft cap is not part of w: the decomposition is of the scores before it. ALiBi is, as part of d.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).

    Raises:
        InputError: no distance, unknown weights; later, a prompt of a single token.

    Source: functional ANOVA (Hoeffding, Sobol); in closed form for attention scores by us.

    Example:
        >>> from tl_posgen.position.decomposition import variance
        >>> shares = variance("mini", "Down, down, down.", null_seeds=()).frame().filter(regex="^share_[qkd]+$")
        >>> bool((shares.sum(axis=1) - 1).abs().max() < 1e-6)
        True
    """

    n_distances: int | None = None
    weights: DistanceWeights = "uniform"

    def check(self) -> None:
        check_whole("variance", 1, MOST_DISTANCES, n_distances=1 if self.n_distances is None else self.n_distances)


class VarianceCollector(MomentsCollector):
    """Its moments: by layer, and whether the first token counts."""

    options: Variance

    def update(self, layer: LayerCapture) -> None:
        rest = layer.once(moments_of)
        first = TripleMoments.from_qk(layer.q[:, :1], layer.k[:, :1], layer.geometry.rope)
        self.take(layer, {(layer.layer, True): first + rest, (layer.layer, False): rest})

    def dataset(self) -> xr.Dataset:
        n = self.options.n_distances or self.longest
        dataset = self.over_layers(self._of_layer(layer, n).assign_coords(layer=layer) for layer in sorted(self.layers))
        return dataset.assign_attrs(n_distances=n, weights=self.options.weights, not_defined=self._why_not_defined())

    def _why_not_defined(self) -> str:
        if max(map(self._samples, self.layers)) < 2:
            return "one token besides the first says nothing of what varies; give longer prompts"
        alone = [str(layer) for layer, (geometry, _) in sorted(self.layers.items()) if geometry.window == 1]
        return f"in layer {', '.join(alone)} a token sees itself alone, so softmax sees nothing vary" if alone else ""

    def _samples(self, layer: int) -> int:
        """Tokens besides the first ones."""
        return self.moments[layer, False].q.n

    def _of_layer(self, layer: int, n: int) -> xr.Dataset:
        rest, everything = (self._shares(layer, first_token, n) for first_token in (False, True))
        values = {part: rest.within_rows.share(*components) for part, components in PARTS.items()}
        if self.layers[layer][0].window == 1:
            values = {part: torch.full_like(value, torch.nan) for part, value in values.items()}
        values |= {f"share_{name}": rest.share(name) for name in COMPONENTS}
        values |= {"additive_r": rest.additive_r, "three_axis_share": rest.three_axis_share, "variance": rest.total}
        moments = self.moments[layer, False]
        values |= {"mean_energy_q": moments.q.mean_energy, "mean_energy_k": moments.k.mean_energy}
        values |= {f"share_{name}_with_first_token": everything.share(name) for name in COMPONENTS}
        if self._samples(layer) < 2:
            values = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
        heads = self.layers[layer][1]
        return xr.Dataset({name: ("head", one.cpu().numpy()) for name, one in values.items()}, {"head": heads})

    def _shares(self, layer: int, first_token: bool, n: int) -> VarianceShares:
        return shares_of(self.moments[layer, first_token], *self.layers[layer], n, self.options.weights)


def moments_of(layer: LayerCapture) -> TripleMoments:
    """Moments of q and k, the first token left out; ask for them by `layer.once`."""
    return TripleMoments.from_qk(layer.q, layer.k, layer.geometry.rope, first_token=False)


def shares_of(
    moments: TripleMoments, geometry: LayerGeometry, heads: Sequence[int], n: int, weights: DistanceWeights
) -> VarianceShares:
    """The decomposition of a layer's heads over n distances, as many as its window has at most; ALiBi joins d."""
    n, bias = min(n, geometry.window or n), None
    if geometry.alibi_slopes is not None:
        distance = torch.arange(n, dtype=torch.float64, device=moments.q.mean.device)
        bias = -geometry.alibi_slopes.to(distance)[list(heads), None] * distance
    return variance_shares(moments, geometry.rope, geometry.scale, n, weights=weights, bias=bias)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    named = (*PARTS, "additive_r", *(f"share_{name}" for name in COMPONENTS))
    found = means(data, *named) | extremes(data, "position") | extremes(data, "interaction")
    return found | {"not_defined": data.attrs.get("not_defined", "")}


def findings(own: Summary, null: Any) -> list[str]:
    parts = ", ".join(f"{part} {beside(own, null, part, '.0%')}" for part in PARTS)
    return [
        f"Of the score variance that softmax can see: {parts}. "
        f"Most position: {at_head(own['position_highest_head'], own['position_highest'])}; most interaction: "
        f"{at_head(own['interaction_highest_head'], own['interaction_highest'])}.",
        *([f"Not defined: {own['not_defined']}."] if own["not_defined"] else []),
    ]


def atlas(result: Any) -> go.Figure:
    """Each head in the triangle position, content, interaction."""
    figure = go.Figure()
    hover = "%{text}<br>position %{a:.2f}<br>content %{b:.2f}<br>interaction %{c:.2f}<extra></extra>"
    for side, data, colour in reversed(sides(result)):
        heads = data[list(PARTS)].stack(unit=("layer", "head")).dropna("unit")
        marker = {"color": colour, "size": 8, "symbol": "diamond-open"}
        if data is result.dataset:
            bar = {"title": "layer", "thickness": 12, "x": 1.02, "dtick": 1}
            marker = {"color": heads["layer"].values, "size": 10, "colorscale": "Viridis", "colorbar": bar}
        corners = {corner: heads[part].values for corner, part in zip("abc", PARTS, strict=True)}
        points = {"text": head_names(heads["unit"].values), "mode": "markers", "marker": marker, "name": side}
        figure.add_trace(go.Scatterternary(**corners, **points, hovertemplate=hover))
    axis = {"tickformat": ".0%", "min": 0.0, "gridcolor": "#e5e7eb", "linecolor": "#9ca3af"}
    titles = {part: f"{part}: {' + '.join(components)}" for part, components in PARTS.items()}
    axes = {
        f"{corner}axis": axis | {"title": {"text": titles[part]}} for corner, part in zip("abc", PARTS, strict=True)
    }
    figure.update_layout(ternary={"sum": 1, **axes}, legend={"orientation": "h", "y": -0.08, "x": 0})
    subtitle = "one point a head; shares of the score variance that softmax can see, over all (query, key, distance)"
    return finish(figure, f"Head atlas · {model_label(result.dataset)}", subtitle, height=620)


SHARES = {"q": "#c4cad3", "k": "#3f9b6b", "qk": "#9fd3b8", "d": "#3b6fb6", "qd": "#9dbde6", "kd": "#d1603d"}
SHARES |= {"qkd": "#eeb39d"}


def stacked_shares(result: Any) -> go.Figure:
    """All seven shares of every head, stacked."""
    both = sides(result)
    panels = Panels([side for side, _, _ in both], columns=1, shared_xaxes=True)
    for number, (_, data, _) in enumerate(both):
        heads = data[[f"share_{name}" for name in SHARES]].stack(unit=("layer", "head")).dropna("unit", how="all")
        names = [f"L{layer}H{head}" for layer, head in heads["unit"].values]
        for name, colour in SHARES.items():
            hover, shares = f"%{{x}}, {' '.join(name)}: %{{y:.3f}}<extra></extra>", heads[f"share_{name}"].values
            panels.add(number, go.Bar(x=names, y=shares, name=" ".join(name), marker_color=colour, hovertemplate=hover))
    panels.figure.update_layout(barmode="stack", bargap=0.15)
    panels.figure.update_yaxes(range=[0, 1], tickformat=".0%").update_xaxes(type="category")
    subtitle = "q moves whole rows, which softmax cannot see; green: content, blue: position, orange: interaction"
    return panels.finish(f"Variance shares per head · {model_label(result.dataset)}", subtitle)


WORDS = {"q": "query", "k": "key", "d": "distance"}
FACTORS = {name: " × ".join(WORDS[one] for one in name) for name in COMPONENTS}
HEAD, SEEN = ("layer", "head"), "variance that softmax can see"
OF_VISIBLE = "as a share of what softmax can see (q left out)"
OF_W = "of Var w over all (query, key, distance), first token left out; the seven sum to 1"
VARIABLES = {
    "position": Variable("position", "", f"d + qd, {OF_VISIBLE}", HEAD, "position_share", "pos", True, (0.0, 1.0)),
    "content": Variable("content", description=f"k + qk, {OF_VISIBLE}", interval=True, bounds=(0.0, 1.0)),
    "interaction": Variable("interaction", description=f"kd + qkd, {OF_VISIBLE}", interval=True, bounds=(0.0, 1.0)),
    **{
        f"share_{one}": Variable(f"share of {FACTORS[one]}", "", OF_W, HEAD, f"share_{one}", one, True, (0.0, 1.0))
        for one in COMPONENTS
    },
    "additive_r": Variable(
        "additive r",
        "",
        "sqrt(1 - kd - qkd): corr of w with the best f(q, d) + g(q, k)",
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "three_axis_share": Variable("share of three axes", description="q + k + d: what a(d) + b(q) + c(k) can explain"),
    **{
        f"mean_energy_{side}": Variable(
            f"energy share of the mean {word}", "", f"|E {side}|^2 / E|{side}|^2", interval=True, bounds=(0.0, 1.0)
        )
        for side, word in (("q", "query"), ("k", "key"))
    },
    "variance": Variable("variance of w", "logits^2", "over all (query, key, distance), first token left out"),
    **{f"share_{one}_with_first_token": Variable(f"share of {FACTORS[one]}, first token kept") for one in COMPONENTS},
}
NO_TURN = "nothing rotates, so"

MEASURE = Measure(
    name="variance",
    question="How much is position, how much is content, how much is neither?",
    explanation=(
        "Exact variance decomposition over every triple (query, key, distance): each query meets each key at each "
        "distance, first token left out. Scores split into position f(q, d) + content g(q, k) exactly when the shares "
        "kd and qkd are zero."
    ),
    source="functional ANOVA (Hoeffding 1948, Sobol 1993); closed form for attention scores: ours",
    options=Variance,
    collector=VarianceCollector,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    by_head=frozenset({"shares"}),
    no_tokens=(
        "its shares are over all tokens; "
        "measures='split_examples' shows the distance pattern and the content pattern of a head"
    ),
    figures={
        "atlas": atlas,
        "shares": stacked_shares,
        "map": head_map(*PARTS, title="Position, content, interaction", subtitle=f"shares of the {SEEN}"),
    },
    caveats={
        "absolute": f"{NO_TURN} d, qd, kd and qkd are zero by construction: position is inside q and k, and the shares "
        "cannot tell it from content. This measure does not carry over; across_prompts does.",
        "alibi": f"{NO_TURN} qd, kd and qkd are zero by construction, and so is the interaction; position is the slope "
        "alone, beside what content moves.",
        "none": f"{NO_TURN} d, qd, kd and qkd are zero by construction. This measure does not carry over.",
    },
    without_meaning=frozenset({"absolute", "none"}),
)
