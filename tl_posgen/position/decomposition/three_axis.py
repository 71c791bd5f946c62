"""The three-axis fit: how far each head's scores are position + query + key."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable, by_tokens
from tl_posgen.core.numbers import Numbers, mean_of, mean_of_nulls
from tl_posgen.core.options import NonNegative, Positive
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.decomposition.layer_fits import ALIKE, fit_capture, weighting
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.three_axis_fit import Gauge, ThreeAxisFit
from tl_posgen.report.figures import finish, sides
from tl_posgen.report.head_figures import by_layer, head_map, head_names, layer_curves

BOTH = ("tokens", *HEAD)
HIGH = 0.95  # Han & Ji 2025 report .959 for a sum of position and semantics; of which fit is not known
MEAN = "mean over prompts; level and slope by the gauge"
WITHIN = "the mean of each row removed from W and from the fit: all that softmax sees"
NOISE = "reached by chance by iid Gaussian scores on these pairs; weighted by attention, by the scores shuffled"
CORRELATION: dict[str, Any] = {"interval": True, "bounds": (-1, 1), "judged": True}
GAUGES = {
    "flat_keys": "sum b = sum c = 0, c without a linear trend",
    "flat_distance": "sum b = sum c = 0, a without a linear trend",
    "flat_queries": "sum b = sum c = 0, b without a linear trend",
}


def correlations(fit: ThreeAxisFit) -> dict[str, Any]:
    """Return r, r within rows, and the sums of squares that r over all heads and prompts is made of."""
    total = fit.tss.where(~fit.r.isnan(), float("nan"))
    explained = fit.r.square() * total
    found = {"r": fit.r, "r_within_rows": fit.r_within_rows, "r_per_prompt": fit.r, "std": fit.std_within_rows}
    return found | {"total": total, "explained": explained}


def draw_curves(result: Any) -> go.Figure:
    """Draw a(i - j) of every head, a panel a layer."""
    gauge = f"gauge: {GAUGES[result.measure.gauge]}. Curvature is identified; level and slope are not"
    return layer_curves(
        result,
        "a",
        "distance",
        title="Score by distance, a(i-j)",
        subtitle=f"{result.own.attrs['weighting']}; {gauge}",
        y_title="a",
        log_x=True,
        share=1.0,
    )


def draw_heads(result: Any) -> go.Figure:
    """Draw r of every head over its layer, the model's beside those of its null models."""
    figure = go.Figure()
    for number, (name, dataset, colour) in enumerate(sides(result)):
        r = dataset["r"].sel(tokens="all").transpose(*HEAD).to_series()
        names = head_names(r.index)
        layers = [layer - 0.2 + 0.2 * number for layer, _ in r.index]
        figure.add_scatter(x=layers, y=r.tolist(), text=names, name=name, mode="markers", marker_color=colour)
    figure.add_hline(HIGH, line_dash="dot", line_width=1)
    figure.update_xaxes(title_text="layer", tickvals=sorted(set(result.own["layer"].values.tolist())))
    figure.update_yaxes(title_text="r")
    return finish(figure, "Three-axis r head by head", f"a dot a head; dotted: {HIGH}")


@dataclass(frozen=True)
class ThreeAxis(Measure):
    r"""W_ij ~ a_{i-j} + b_i + c_j: correlation r of every head's scores with the best such sum, over visible pairs.

    Least-squares fit of every head's pre-softmax scores to a(i-j) + b(i) + c(j) over all visible pairs. b moves all
    scores of a query alike, which softmax cannot see: r within rows, among the keys of each query, leaves it out. The
    first token often draws attention whatever the text, so everything is shown without it too.

    W are the pre-softmax scores, i the query's position, j <= i the key's. a, b, c are fitted prompt by prompt; the
    numbers of several prompts are means.

    Args:
        ridge: penalty on a^2 + b^2 + c^2, in pairs: an entry with N pairs is shrunk by about N / (N + ridge).
        gauge: what fixes levels and slope of a, b, c, which the scores leave open: sum b = sum c = 0, and no linear
            trend in c ("flat_keys"), in b ("flat_queries") or in a ("flat_distance").
        diagonal: whether a query paired with its own key counts.
        weights: of pairs, in the fit and in every correlation: w_0, w_1, ... by distance, above 0, the last one for all
            distances beyond; "attention", for prompts of 1,024 tokens at most; None: all alike.

    Raises:
        InputError: scores that are not finite, a prompt too long for weights by attention.

    Source: three axes: Han & Ji 2025 (arXiv 2503.13305), who report .959 for an estimator that is not public; the
    exact fit, the weights, r within rows and the nulls are ours.

    Example:
        >>> result = ThreeAxis(gauge="flat_distance")("mini", "Down, down, down.", null_seeds=())
        >>> bool((result.sel()["b"].sum("query").round(6) == 0).all())
        True
    """

    ridge: NonNegative = 0.0
    gauge: Gauge = "flat_keys"
    diagonal: bool = True
    weights: Sequence[Positive] | Literal["attention"] | None = None

    question = "Are the scores position + query + key?"
    variables = {
        "r": Variable(
            "r of position + query + key",
            "",
            "Pearson's r of W and the fit",
            BOTH,
            "three_axis_r",
            "r-3",
            **CORRELATION,
        ),
        "r_within_rows": Variable(
            "r within rows", "", WITHIN, BOTH, "three_axis_r_within_rows", "r-3 row", **CORRELATION
        ),
        "std": Variable("std within rows", "logits", "of W: the size of what softmax sees", BOTH, interval=True),
        "r_per_prompt": Variable("r of each prompt", "", "", ("tokens", "prompt", *HEAD)),
        "r_pooled": Variable("pooled r", "", "one correlation over the entries of all heads and prompts", ("tokens",)),
        "iid_r": Variable("r of noise", "", NOISE, HEAD),
        "n_distance": Variable("pairs behind each entry of a", "pairs", "", ("layer", "distance")),
        "a": Variable("score by distance", "logits", MEAN, (*HEAD, "distance")),
        "b": Variable("score by query position", "logits", MEAN, (*HEAD, "query")),
        "c": Variable("score by key position", "logits", MEAN, (*HEAD, "key")),
    }
    curves = ("a", "b", "c")
    by_head = frozenset({"curves", "prompts"})
    caveats = {
        "absolute": "the key curve c mixes where a key stands with what it is, and a holds only what is a function of "
        "distance; r still says how additive the scores are, not that they are position + content. What places "
        "hold: variance(absolute=True).",
        "alibi": "three axes fit a straight line exactly, so where content is small beside the slope, as at random "
        "init, r is near 1 and random init is no lower bound. The slope is not in the residual: compare its size in "
        "logits.",
        "none": "a(i - j) is what texts themselves have in common at a distance, such as near tokens being alike.",
    }

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        full, rest = layer.once(fit_capture) if self == ThreeAxis() else fit_capture(layer, **asdict(self))
        pairs = full.n_distance.expand_as(full.a)
        curves = {"a": full.a, "b": full.b, "c": full.c, "iid_r": full.iid_r, "pairs": pairs}
        return curves | by_tokens(correlations(full), rest and correlations(rest))

    def finish(self, sums: Sums) -> xr.Dataset:
        explained, total = (sums.sum(name, BOTH).sum(HEAD) for name in ("explained", "total"))
        n_distance = sums.sum("pairs", (*HEAD, "distance")).max("head")
        data = sums.means().assign(r_pooled=(explained / total) ** 0.5, n_distance=n_distance)
        return data.assign_attrs(weighting=weighting(self.weights), not_defined=self.why_not_defined(sums))

    def why_not_defined(self, sums: Sums) -> str:
        """Return why no head has an r; "" where one has."""
        lengths, windows = sorted(set(sums.lengths.values())), {geometry.window for geometry, _ in sums.layers.values()}
        if short := [n for n in lengths if CausalPairs(n, None, True, self.diagonal).saturated]:
            tokens = ", ".join(map(str, short))
            return f"prompts of {tokens} tokens have as many parameters as pairs; give 4 tokens at least, better 100"
        narrow = [w for w in windows - {None} if CausalPairs(max(lengths), w, True, self.diagonal).saturated]
        if narrow:
            which = " or ".join(map(str, sorted(narrow)))
            return f"a window of {which} leaves no more pairs than the fit has parameters"
        return "the scores of every head are constant" if sums.mean("r").isnull().all() else ""

    def findings(self, own: Numbers) -> list[str]:
        if not own("r"):
            return [f"Whether scores are position + query + key cannot be said: {own.attrs['not_defined']}."]
        weighted = "" if own.attrs["weighting"] == ALIKE else f" ({own.attrs['weighting']})"
        size, n_heads = own("std"), int(own.data["r"].sel(tokens="all").notnull().sum())
        return [
            "Three separate curves, a(distance) + b(query) + c(key), make a narrower sum: "
            f"r = {own('r'):.3f}{weighted}, mean over {counted(n_heads, 'head')}{own.layers_not_above('r')}; without "
            f"the first token {own('r', tokens='without first'):.3f}.",
            f"Within rows, which is all that softmax sees, r = {own('r_within_rows'):.3f}, of scores with a standard "
            f"deviation of {size.with_interval:.2f} logits{size.null_in_brackets:.2f}. Highest r: "
            f"{own.extreme('r_within_rows'):.3f}; lowest: {own.extreme('r_within_rows', largest=False):.3f}.",
            self.over_heads(own),
        ]

    def over_heads(self, own: Numbers) -> str:
        """Return the sentence of the distribution of r over heads: its ends, its quartiles, and those over HIGH."""
        r, every = own.side["r"].sel(tokens="all"), mean_of(own.array("r"))
        low, first, median, third, high = r.quantile((0, 0.25, 0.5, 0.75, 1)).values
        ends = [own.number(every.min(HEAD)), own.number(every.max(HEAD))]
        low_nulls, high_nulls = (end.by_null for end in ends)
        inits = "".join(
            f"; {kind} {mean_of_nulls(low_nulls[kind]).plain:.3f} to {mean_of_nulls(one).plain:.3f}"
            for kind, one in high_nulls.items()
        )
        return (
            f"Over heads r goes from {low:.3f} to {high:.3f}, quartiles {first:.3f}, {median:.3f} and "
            f"{third:.3f}{inits}. Over {HIGH}: {int((r > HIGH).sum())} of {counted(int(r.notnull().sum()), 'head')}."
        )

    figures = {
        "depth": by_layer(
            {"correlation": [("r of position + query + key", "r"), ("r within rows", "r_within_rows")]}
            | {"std of scores within rows, logits": [("scores", "std")]},
            title="Three-axis fit by layer",
        ),
        "map": head_map(
            *("r", ("r", {"tokens": "without first"}), "r_within_rows"),
            title="Three-axis fit",
            subtitle="correlation of the scores with a(i-j) + b(i) + c(j), {weighting}; "
            "within rows is what softmax can see",
        ),
        "heads": draw_heads,
        "curves": draw_curves,
        "prompts": partial(
            layer_curves,
            measure="r_per_prompt",
            along="prompt",
            title="Three-axis r prompt by prompt",
            subtitle="one line a head",
            y_title="r",
        ),
    }
