"""Which planes a head's interaction comes from, and what tells in advance how large it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.collector import MomentsCollector, Variable
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import MOST_DISTANCES, check_whole
from tl_posgen.position.decomposition.variance import moments_of, shares_of
from tl_posgen.position.decomposition.variance_shares import DistanceWeights
from tl_posgen.position.planes.interaction_matrix import interaction_matrix
from tl_posgen.position.planes.planes import require_planes, require_rope
from tl_posgen.report.figures import DIVERGING, Panels, colour_axis, equality, head_names, heat, model_label, sides
from tl_posgen.report.intervals import ENDS
from tl_posgen.report.sentences import beside, means, null_of, with_interval
from tl_posgen.rope.rotation import complex_frequencies
from tl_posgen.stats.rank_correlation import rank_correlation
from tl_posgen.summary import NullSummary, Summary

SHARES = {  # of what softmax can see
    "estimate": "estimate from lengths",
    "diagonal": "diagonal",
    "bound": "bound",
    "loose_bound": "Cauchy-Schwarz bound",
}
OF_KEYS = {"r1_k": "r1 of K", "mean_energy_k": "energy share of the mean key"}
STATISTICS = SHARES | OF_KEYS


@dataclass(frozen=True)
class PlaneInteraction(Options):
    r"""M_mn = Cov(I_m, I_n), I_m = scale Re z^q_m conj(k_m - mean k_m) (u_m(d) - mean u_m) of RoPE plane m.

    The entries of M add up to what `variance` calls interaction, kd + qkd, over all triples (query, key, distance), the
    first token left out. Beside that share stand four statistics in the same unit, shares of the variance that softmax
    can see: `diagonal`, sum_m M_mm; `estimate`, scale^2 / 2 sum_m E|q_m|^2 E|e_m|^2 E|v_m|^2, from lengths alone; and
    two proved bounds, `bound` (sum_m of the square roots of the same products, squared) and `loose_bound`,
    scale^2 E|q|^2 sum_m E|v_m|^2 E|e_m|^2; see `interaction_matrix`. And two of the keys alone: `r1_k`,
    s_1^2 / sum s^2, how near rank one they are, and `mean_energy_k`, |E k|^2 / E|k|^2. rho is Spearman's correlation of
    each with the interaction over heads; `rho_within_layers` of the ranks with every layer's mean taken away.

    A soft cap and ALiBi are not part of M. A layer without RoPE among others is NaN throughout.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.
        weights: of distances, as in `Variance`.

    Raises:
        InputError: no distance, unknown weights; later, a prompt of a single token.
        UnsupportedModelError: a model, or later a choice of layers, without RoPE.

    Source: ours.

    Example:
        >>> from tl_posgen.position.planes import plane_interaction
        >>> found = plane_interaction("mini", "Down, down, down. Would it end?", null_seeds=(), progress=False).dataset
        >>> bool((found["interaction"] <= found["bound"]).all() and (found["bound"] <= found["loose_bound"]).all())
        True
    """

    n_distances: int | None = None
    weights: DistanceWeights = "uniform"

    def check(self) -> None:
        n = 1 if self.n_distances is None else self.n_distances
        check_whole("plane_interaction", 1, MOST_DISTANCES, n_distances=n)


class PlaneInteractionCollector(MomentsCollector):
    options: PlaneInteraction

    def update(self, layer: LayerCapture) -> None:
        self.take(layer, {layer.layer: layer.once(moments_of)} if layer.geometry.rope.rotary_dim else {})

    def dataset(self) -> xr.Dataset:
        require_planes("plane_interaction", self)
        n = self.options.n_distances or self.longest
        data = self.over_layers(self._of_layer(layer, n) for layer in sorted(self.moments))
        return data.merge(correlations(data)).assign_attrs(n_distances=n, weights=self.options.weights)

    def _of_layer(self, layer: int, n: int) -> xr.Dataset:
        moments, (geometry, heads) = self.moments[layer], self.layers[layer]
        n, rope = min(n, geometry.window or n), geometry.rope
        found = interaction_matrix(moments, rope, geometry.scale, n, weights=self.options.weights)
        visible = shares_of(moments, geometry, heads, n, self.options.weights).within_rows.total
        of_total = found.total.masked_fill(found.total <= 0, torch.nan)[:, None]
        values = {"interaction": found.total / visible, "estimate": found.estimate / visible}
        values |= {"diagonal": found.diagonal.sum(-1) / visible, "bound": found.bound / visible}
        values |= {"loose_bound": found.loose_bound / visible}
        values |= {"r1_k": moments.k.r1, "mean_energy_k": moments.k.mean_energy}
        data: dict[str, Any] = {name: ("head", numbers(value)) for name, value in values.items()}
        data["by_plane"] = (("head", "plane"), numbers(found.by_plane / of_total))
        data["diagonal_by_plane"] = (("head", "plane"), numbers(found.diagonal / of_total))
        data["matrix"] = (("plane", "plane_2"), numbers((found.matrix / of_total[..., None]).nanmean(0)))
        data["wavelength"] = ("plane", numbers(2 * torch.pi / complex_frequencies(rope, geometry.d_head)))
        planes = range(found.matrix.shape[-1])
        return xr.Dataset(data, {"layer": layer, "head": heads, "plane": planes, "plane_2": planes})


def numbers(x: Tensor) -> Any:
    return x.detach().to("cpu", torch.float64).numpy()


def correlations(data: xr.Dataset) -> xr.Dataset:
    """Spearman's rho of every statistic with the interaction, over heads and within layers, with their intervals."""
    heads = data[["interaction", *STATISTICS]].stack(unit=("layer", "head"))
    column = {name: torch.from_numpy(heads[name].values.copy()) for name in ("interaction", *STATISTICS)}
    layer = torch.from_numpy(heads["layer"].values.copy())
    found: dict[str, Any] = {}
    for name, group in (("rho", None), ("rho_within_layers", layer)):
        every = [rank_correlation(column[one], column["interaction"], group) for one in STATISTICS]
        for end, of in zip(ENDS, ("r", "low", "high"), strict=True):
            found[f"{name}{end}"] = ("statistic", [getattr(one, of) for one in every])
    return xr.Dataset(found, {"statistic": list(STATISTICS)})


# What is shown

RHO = ("rho", "rho_within_layers")


def summarise(data: xr.Dataset) -> Summary:
    """Keys are the means over heads; `ratio_<share>`, the median over heads of the share over the interaction;
    `rho_<statistic>` and `rho_within_layers_<statistic>`, with their ends."""
    found: dict[str, Any] = means(data, "interaction", *STATISTICS)
    found |= {f"ratio_{name}": float((data[name] / data["interaction"]).median()) for name in SHARES}
    found["n_heads"] = int(data["interaction"].notnull().sum())
    for name in STATISTICS:
        one = data.sel(statistic=name)
        found |= {f"{rho}_{name}{end}": float(one[f"{rho}{end}"]) for rho in RHO for end in ENDS}
    return found


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    def of(rho: str, names: Sequence[str]) -> str:
        parts = [
            f"{STATISTICS[one]} {with_interval(own, f'{rho}_{one}', '.2f')} ({null_of(null, f'{rho}_{one}', '.2f')})"
            for one in names
        ]
        return ", ".join(parts)

    ratios = ", ".join(f"{words} {beside(own, null, f'ratio_{name}', '.2f')}" for name, words in SHARES.items())
    return [
        f"The interaction is {beside(own, null, 'interaction', '.1%')} of the variance that softmax can see. Over it, "
        f"median of {own['n_heads']} heads: {ratios}.",
        f"Spearman's correlation with the interaction over heads: {of('rho', list(STATISTICS))}.",
        f"Within layers: {of('rho_within_layers', list(STATISTICS))}.",
    ]


def scatter(result: Any) -> go.Figure:
    """Every head's interaction against each statistic; the dotted line: equal."""
    panels = Panels(list(STATISTICS.values()), columns=3, row_height=260)
    for side, data, colour in reversed(sides(result)):
        heads = data[["interaction", *STATISTICS]].stack(unit=("layer", "head")).dropna("unit", how="all")
        own = data is result.dataset
        marker: dict[str, Any] = {"size": 7, "color": colour, "symbol": "circle" if own else "diamond-open"}
        if own:
            marker |= {"color": heads["layer"].values, "colorscale": "Viridis"}
        for panel, name in enumerate(STATISTICS):
            x, y, text = heads[name].values, heads["interaction"].values, head_names(heads["unit"].values)
            panels.add(panel, go.Scatter(x=x, y=y, mode="markers", text=text, marker=marker, name=side))
    top = float(max(data["interaction"].max() for _, data, _ in sides(result)))
    for panel in range(len(SHARES)):
        panels.add(panel, equality(top))
    panels.axes("statistic", "interaction share").figure.update_yaxes(rangemode="tozero")
    subtitle = "one point a head, coloured by layer; shares of the variance that softmax can see"
    return panels.finish(f"What tells the interaction · {model_label(result.dataset)}", subtitle)


def matrices(result: Any) -> go.Figure:
    """The plane x plane matrix of every layer, mean over heads."""
    both = sides(result)
    layers = [
        layer
        for layer in result.dataset["layer"].values
        if bool(result.dataset["matrix"].sel(layer=layer).notnull().any())
    ]
    titles = [f"layer {layer} · {side}" for side, _, _ in both for layer in layers]
    panels = Panels(titles, columns=len(layers), row_height=220)
    arrays = [data["matrix"].sel(layer=layer, drop=True) for _, data, _ in both for layer in layers]
    for panel, array in enumerate(arrays):
        panels.add(panel, heat(array.transpose("plane", "plane_2")))
    limit = max(float(abs(array).max()) for array in arrays) or 1.0
    panels.figure.update_layout(coloraxis=colour_axis(-limit, limit, DIVERGING))
    panels.axes("plane", "plane")
    subtitle = "share of kd + qkd, mean over heads; every matrix adds up to 1; planes fast to slow"
    return panels.finish(f"Interaction by pairs of planes · {model_label(result.dataset)}", subtitle)


PLANE, STATISTIC = ("layer", "head", "plane"), ("statistic",)
OVER = "over heads, with the interaction"
FISHER = "of the 95 % interval for independent heads (Bonett & Wright)"
VISIBLE = "as a share of the variance that softmax can see"
MEAN = {"interaction": "kd + qkd", "diagonal": "sum_m M_mm", "estimate": "scale^2 / 2 sum_m E|q_m|^2 E|e_m|^2 E|v_m|^2"}
MEAN |= {"bound": "scale^2 (sum_m sqrt(E|q_m|^2 E|e_m|^2 E|v_m|^2))^2"}
MEAN |= {"loose_bound": "scale^2 E|q|^2 sum_m E|e_m|^2 E|v_m|^2"}
VARIABLES = {
    **{
        name: Variable(
            f"{words} of the interaction" if name != "interaction" else words,
            "",
            f"{MEAN[name]}, {VISIBLE}",
            interval=True,
            bounds=(0.0, 1.0) if name == "interaction" else None,
        )
        for name, words in {"interaction": "interaction", **SHARES}.items()
    },
    "r1_k": Variable(
        "r1 of K",
        "",
        "s_1^2 / sum s^2 before RoPE, all prompts, first token left out",
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "mean_energy_k": Variable(
        "energy share of the mean key", "", "|E k|^2 / E|k|^2, first token left out", interval=True, bounds=(0.0, 1.0)
    ),
    "by_plane": Variable("share of the interaction by plane", "", "sum_n M_mn / sum M; adds up to 1", PLANE),
    "diagonal_by_plane": Variable("diagonal by plane", "", "M_mm / sum M", PLANE),
    "matrix": Variable("M / sum M", "", "mean over heads", ("layer", "plane", "plane_2")),
    "wavelength": Variable("wavelength", "tokens", "2 pi / theta_m; inf: the unrotated rest", ("layer", "plane")),
    **{
        f"{name}{end}": Variable(f"{label}{words}", "", FISHER if end else OVER, STATISTIC)
        for name, label in (("rho", "Spearman's rho"), ("rho_within_layers", "rho within layers"))
        for end, words in zip(ENDS, ("", ", lower end", ", upper end"), strict=True)
    },
}

MEASURE = Measure(
    name="plane_interaction",
    question="Where does the interaction of keys and distance come from?",
    explanation=(
        "The part of a head's scores that is neither f(q, d) nor g(q, k) is a sum over RoPE's planes, its variance a "
        "plane x plane covariance. Beside the actual share stand its diagonal, an estimate from lengths alone, two "
        "proved bounds, and two numbers of the keys: which of them orders the heads, and more than at random init?"
    ),
    source="ours",
    options=PlaneInteraction,
    collector=PlaneInteractionCollector,
    requires=require_rope,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"heads": scatter, "matrix": matrices},
)
