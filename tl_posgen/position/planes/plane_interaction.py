"""Interaction of keys and distance by pairs of planes, and statistics that foretell how large it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import ENDS, HEAD, Measure, Variable
from tl_posgen.core.numbers import ALL, Number, Numbers
from tl_posgen.core.options import Distances
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights, TripleMoments
from tl_posgen.position.decomposition.variance import moments_of, shares_of
from tl_posgen.position.planes.numbers.interaction_matrix import interaction_matrix
from tl_posgen.position.planes.rope_layers import over_layers, require_rope
from tl_posgen.report.figures import DIVERGING, Panels, colour_axis, equality, evenly, heat, model_label, sides
from tl_posgen.report.head_figures import head_points
from tl_posgen.stats.rank_correlation import rank_correlation

SHARES = {  # of what softmax can see
    "estimate": "estimate from lengths",
    "diagonal": "diagonal",
    "bound": "bound",
    "loose_bound": "Cauchy-Schwarz bound",
}
STATISTICS = SHARES | {"key_r1": "r1 of K", "mean_key_energy": "energy share of the mean key"}

SHARE: dict[str, Any] = {"interval": True, "bounds": (0, 1)}
PLANE, RHO = (*HEAD, "plane"), ("statistic", "end")
MEAN_ENERGY = "|E k|^2 / E|k|^2, first token left out"
INDEPENDENT = "over heads, with the interaction; its interval is that of independent heads (Bonett & Wright)"


def visible(label: str, formula: str, bounds: tuple[int, int] | None = None) -> Variable:
    """Return a variable as a share of the variance that softmax can see."""
    description = f"{formula}, as a share of the variance that softmax can see"
    return Variable(label, "", description, interval=True, bounds=bounds)


def scatter(result: Any) -> go.Figure:
    """Draw every head's interaction against each statistic; the dotted line: equal."""
    panels = Panels(list(STATISTICS.values()), columns=3, row_height=260)
    for side, data, colour in reversed(sides(result)):
        heads = data[["interaction", *STATISTICS]].stack(unit=HEAD).dropna("unit", how="all")
        own = data is result.own
        marker: dict[str, Any] = {"size": 7, "color": colour, "symbol": "circle" if own else "diamond-open"}
        if own:
            marker |= {"color": heads["layer"].values, "colorscale": "Viridis"}
        for panel, name in enumerate(STATISTICS):
            panels.add(panel, head_points(heads[name], heads["interaction"], marker=marker, name=side))
    top = float(max(data["interaction"].max() for _, data, _ in sides(result)))
    for panel in range(len(SHARES)):
        panels.add(panel, equality(top))
    panels.axes("statistic", "interaction share").figure.update_yaxes(rangemode="tozero")
    subtitle = "one point a head, coloured by layer; shares of the variance that softmax can see"
    return panels.finish(f"What tells the interaction · {model_label(result.own)}", subtitle)


def matrices(result: Any) -> go.Figure:
    """Draw the plane x plane matrix of layers, mean over heads."""
    both, matrix = sides(result), result.own["matrix"]
    known = [layer for layer in matrix["layer"].values if bool(matrix.sel(layer=layer).notnull().any())]
    layers = evenly(known)
    panels = Panels([f"layer {layer} · {side}" for side, _, _ in both for layer in layers], row_height=220)
    arrays = [data["matrix"].sel(layer=layer, drop=True) for _, data, _ in both for layer in layers]
    for panel, array in enumerate(arrays):
        panels.add(panel, heat(array.transpose("plane", "plane_2")))
    limit = max((float(abs(array).max()) for array in arrays), default=0.0) or 1.0
    panels.figure.update_layout(coloraxis=colour_axis(-limit, limit, DIVERGING))
    panels.axes("plane", "plane")
    subtitle = "share of kd + qkd, mean over heads; every matrix adds up to 1; planes fast to slow"
    subtitle += f"; {len(layers)} of {len(known)} layers" if len(layers) < len(known) else ""
    return panels.finish(f"Interaction by pairs of planes · {model_label(result.own)}", subtitle)


@dataclass(frozen=True)
class PlaneInteraction(Measure):
    r"""M_mn = Cov(I_m, I_n), I_m = scale Re z^q_m conj(k_m - mean k_m) (u_m(d) - mean u_m) of RoPE plane m.

    The part of a head's scores that is neither f(q, d) nor g(q, k) is a sum over RoPE's planes, its variance a plane x
    plane covariance. Beside the actual share stand its diagonal, an estimate from lengths alone, two proved bounds, and
    two numbers of the keys: which of them orders the heads, and more than at random init?

    The entries of M add up to what `variance` calls interaction, kd + qkd, over all triples (query, key, distance), the
    first token left out. `diagonal`, `estimate` and the two bounds are in the same unit; `interaction_matrix` says what
    is proved of them. `key_r1` is how near rank one the keys are. rho is Spearman's correlation of each with the
    interaction over heads; `rho_within_layers` of the ranks with every layer's mean taken away.

    A soft cap and ALiBi are not part of M. A layer without RoPE among others is NaN throughout.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.
        weights: of distances, as in `Variance`.

    Raises:
        InputError: a prompt of a single token.
        UnsupportedModelError: a model, or later a choice of layers, without RoPE.

    Source: ours

    Example:
        >>> found = PlaneInteraction()("mini", "Down, down, down. Would it end?", null_seeds=(), progress=False).sel()
        >>> bool((found["interaction"] <= found["bound"]).all() and (found["bound"] <= found["loose_bound"]).all())
        True
    """

    n_distances: Distances | None = None
    weights: DistanceWeights = "uniform"

    question = "Where does the interaction of keys and distance come from?"
    variables = {
        "interaction": visible("interaction", "kd + qkd", (0, 1)),
        "estimate": visible("estimate from lengths of the interaction", "scale^2 / 2 sum_m E|q_m|^2 E|e_m|^2 E|v_m|^2"),
        "diagonal": visible("diagonal of the interaction", "sum_m M_mm"),
        "bound": visible("bound of the interaction", "scale^2 (sum_m sqrt(E|q_m|^2 E|e_m|^2 E|v_m|^2))^2"),
        "loose_bound": visible("Cauchy-Schwarz bound of the interaction", "scale^2 E|q|^2 sum_m E|e_m|^2 E|v_m|^2"),
        "key_r1": Variable(STATISTICS["key_r1"], "", "s_1^2 / sum s^2 before RoPE, first token left out", **SHARE),
        "mean_key_energy": Variable(STATISTICS["mean_key_energy"], "", MEAN_ENERGY, **SHARE),
        "by_plane": Variable("share of the interaction by plane", "", "sum_n M_mn / sum M; adds up to 1", PLANE),
        "diagonal_by_plane": Variable("diagonal by plane", "", "M_mm / sum M", PLANE),
        "matrix": Variable("M / sum M", "", "mean over heads", ("layer", "plane", "plane_2")),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta_m; inf: the unrotated rest", ("layer", "plane")),
        "rho": Variable("Spearman's rho", "", INDEPENDENT, RHO),
        "rho_within_layers": Variable("rho within layers", "", INDEPENDENT, RHO),
    }
    requires = require_rope
    figures = {"heads": scatter, "matrix": matrices}

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"statistic": list(STATISTICS)}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        return {"moments": layer.once(moments_of)} if layer.geometry.rope.rotary_dim else {}

    def finish(self, sums: Sums) -> xr.Dataset:
        n = self.n_distances or max(sums.lengths.values())
        found = {
            layer: self.of_moments(moments, *sums.layers[layer], n)
            for layer, moments in sums.by_layer("moments").items()
        }
        data = over_layers(self, sums, found)
        return data.merge(correlations(data)).assign_attrs(n_distances=n)

    def of_moments(
        self, moments: TripleMoments, geometry: LayerGeometry, heads: Sequence[int], n: int
    ) -> dict[str, Tensor]:
        """Return the variables of one layer over n distances, as many as its window has at most."""
        n, rope = min(n, geometry.window or n), geometry.rope
        found = interaction_matrix(moments, rope, geometry.scale, n, weights=self.weights)
        visible = shares_of(moments, geometry, heads, n, self.weights).within_rows.total
        of_total = found.total.masked_fill(found.total <= 0, torch.nan)[:, None]
        return {
            "interaction": found.total / visible,
            "estimate": found.estimate / visible,
            "diagonal": found.diagonal.sum(-1) / visible,
            "bound": found.bound / visible,
            "loose_bound": found.loose_bound / visible,
            "key_r1": moments.k.r1,
            "mean_key_energy": moments.k.mean_energy,
            "by_plane": found.by_plane / of_total,
            "diagonal_by_plane": found.diagonal / of_total,
            "matrix": (found.matrix / of_total[..., None]).nanmean(0),
        }

    def findings(self, own: Numbers) -> list[str]:
        def in_words(rho: str) -> str:
            return ", ".join(f"{words} {own(rho, statistic=name):.2f}" for name, words in ordering.items())

        ratios = [self.median_ratio(own, name) for name in ("estimate", "bound")]
        ordering = {name: STATISTICS[name] for name in ("estimate", "key_r1")}
        n_heads = int(own.data["interaction"].notnull().sum())
        return [
            f"The interaction is {own('interaction'):.1%} of the variance that softmax can see. An estimate from the "
            f"lengths of queries and keys in each plane alone is {ratios[0]:.2f} times as much, in the median of "
            f"{counted(n_heads, 'head')}; a bound that is proved is {ratios[1]:.2f} times as much.",
            f"Which number orders heads by their interaction? Spearman's rho: {in_words('rho')}; within layers "
            f"{in_words('rho_within_layers')}.",
        ]

    def median_ratio(self, own: Numbers, name: str) -> Number:
        """Return the median over heads of a statistic over the interaction; medians jump, so it has no interval."""
        array, interaction = (own.array(one, group=ALL) for one in (name, "interaction"))
        return own.number((array / interaction).median(HEAD))


def correlations(data: xr.Dataset) -> xr.Dataset:
    """Return Spearman's rho of every statistic with the interaction, over heads and within layers."""
    heads = data[["interaction", *STATISTICS]].stack(unit=HEAD)
    column = {name: torch.from_numpy(heads[name].values.copy()) for name in ("interaction", *STATISTICS)}
    layer = torch.from_numpy(heads["layer"].values.copy())
    found: dict[str, Any] = {}
    for name, group in (("rho", None), ("rho_within_layers", layer)):
        found[name] = (RHO, [rank_correlation(column[one], column["interaction"], group).ends for one in STATISTICS])
    return xr.Dataset(found, {"statistic": list(STATISTICS), "end": list(ENDS)})
