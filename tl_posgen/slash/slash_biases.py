"""Slash scores of the biases of queries and keys alone, beside the measured ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import points
from tl_posgen.slash.dominance import (
    AT_BEST,
    PER_HEAD,
    Dominance,
    at_best,
    at_distance,
    starts_of,
    statistics_of,
)
from tl_posgen.slash.numbers.plane_contributions import constant_logit, score_of_profile

_MOST_DISTANCES = 5  # drawn


def _panels(result: Any) -> dict[str, dict[str, Any]]:
    panels = {}
    for distance in result.trained["short_distance"].values.tolist()[:_MOST_DISTANCES]:
        r = result.measure.correlation(result.numbers, distance)
        panels[f"D = {distance}: r {r.plain:.2f}{in_brackets(f'{r.null:.2f}')}"] = {"distance": distance}
    return panels


@dataclass(frozen=True)
class SlashBiases(Dominance):
    r"""1/(N-D) sum_{i>=D} e^{g(D)} / sum_{d<=i} e^{g(d)}, g(D) = scale Re sum_m b^q_m conj(b^k_m) e^{i theta_m D}.

    The slash scores that a head would have if its queries and keys were their biases and nothing else, for which no
    text is read: do they foretell the measured ones over heads, and which heads are slash-dominant by their biases
    alone?

    With q = x W_Q + b_Q and k = x W_K + b_K one of the four products that a score is the sum of, that of the biases,
    depends on distance alone. Its slash scores are those of the softmax over the keys that a query sees, the mean over
    queries of prompts as long as those measured. A layer's soft cap is part of it, ALiBi is not. Of a random init all
    biases are zero, and attention by them uniform.

    Args:
        kappa: slash score from which a head is slash-dominant.
        distances: how many tokens back that score is looked at.

    Raises:
        InputError: no prompt reaches any of the distances.
        UnsupportedModelError: a model without biases of queries and keys; one with a norm or clipping behind them; a
            layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: slash score and dominance: Cheng et al. 2026 (arXiv 2601.08297); that of biases alone is ours.

    Example:
        >>> from tl_posgen.errors import UnsupportedModelError
        >>> try:
        ...     SlashBiases()("mini", "Down, down, down.", nulls=0)
        ... except UnsupportedModelError as refusal:
        ...     print(refusal)
        no layer of this model has biases of queries or keys (none, or all are zero)
    """

    question = "Which slash heads do the biases of queries and keys make by themselves?"
    needs = frozenset({"pattern", "inputs"})
    rows = PER_HEAD
    variables = {
        "score": Variable("slash score", "", "measured", (*PER_HEAD, "distance")),
        "alone": Variable("slash score of biases alone", "", "softmax of g", (*PER_HEAD, "distance")),
        "uniform": Variable("slash score of uniform attention", dims=("tokens", "layer", "distance")),
        **AT_BEST,
        "alone_at_best": Variable("slash score of biases alone", "", "at the measured one's best distance", PER_HEAD),
        "dominant": Variable(
            "slash-dominant",
            description="score >= kappa, or twice uniform attention, at this distance",
            dims=(*PER_HEAD, "short_distance"),
        ),
        "dominant_alone": Variable(
            "slash-dominant by biases alone", description="the same of biases alone", dims=(*PER_HEAD, "short_distance")
        ),
    }
    legend = (
        "r, Spearman: of slash scores of biases alone and measured ones, over heads; dominant: heads that reach kappa."
    )
    caveats = {
        encoding: "nothing turns q and k, so by their biases alone every head attends uniformly."
        for encoding in ("absolute", "alibi", "none")
    }
    without_meaning = frozenset(caveats)
    figures = {
        "scatter": points(
            ("alone", {}),
            ("score", {}),
            _panels,
            title="Slash scores by biases alone",
            subtitle="r: Pearson over heads",
            x_title="biases of q and k alone",
            y_title="measured",
            equal=True,
            columns=3,
        ),
        "map": head_map(
            "slash_score",
            "alone_at_best",
            title="Slash scores, and those of biases alone",
            subtitle="at each head's best distance on text, D below half the prompt",
        ),
    }
    all_reached = False

    def requires(self, session: Session) -> None:
        session.require_biases()

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        measured, by_start = layer.shared(statistics_of), []
        for first in starts_of(layer):
            n = layer.length - first
            sinks = None if first else layer.sink_logits()  # scores without the first token are of the other keys alone
            alone = score_of_profile(_logit_of_biases(layer, n), layer.geometry.window, sinks)
            values = {"score": measured.score[first, :, :n], "alone": alone}
            by_start.append(values | {"uniform": measured.uniform[first, :n]})
        return by_start[0], by_start[1]

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data = sums.means()
        score, alone, uniform = data["score"], data["alone"], data["uniform"]
        data = data.assign(at_best(score, uniform))
        return data.assign(
            alone_at_best=at_distance(alone, data["slash_distance"]),
            dominant=self.dominant_at(score, uniform),
            dominant_alone=self.dominant_at(alone, uniform),
        )

    def correlation(self, numbers: Numbers, distance: int, tokens: str = "all", ranks: bool = False) -> Number:
        """Return r over heads of the scores of biases alone with the measured ones, or Spearman's of ranks."""
        alone, score = (numbers.array(name, distance=distance, tokens=tokens) for name in ("alone", "score"))
        return numbers.correlation(alone, score, ranks=ranks)

    def n_dominant(self, numbers: Numbers, *names: str, distance: int | None = None) -> Number:
        """Return how many heads are dominant at a distance (at any if left out), by each of `dominant` and
        `dominant_alone` that is named."""
        heads: Any = True
        for name in names:
            dominant = numbers.array(name, short_distance=distance).astype(bool)
            heads = heads & (dominant.any("short_distance") if distance is None else dominant)
        return numbers.number(heads.sum(HEAD))

    def findings(self, numbers: Numbers) -> list[str]:
        distances = numbers.data["short_distance"].values.tolist()
        r = ", ".join(f"{self.correlation(numbers, at).plain:.2f} at D = {at}" for at in distances)
        alone, text, joint = (
            self.n_dominant(numbers, *names)
            for names in (("dominant_alone",), ("dominant",), ("dominant_alone", "dominant"))
        )
        return [
            f"Slash scores of the biases of q and k alone, which need no text, correlate with the measured ones over "
            f"heads at {r}. By biases alone {counted(alone.value, 'head')} would be slash-dominant"
            f"{in_brackets(alone.null_range)}; {joint.plain:.0f} of them are on this text, where {text.plain:.0f} are.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row per distance: agreement over heads, and how many are dominant."""
        rows = []
        for distance in numbers.data["short_distance"].values.tolist():
            row = {"D": distance, "r": self.correlation(numbers, distance).value}
            row |= {"Spearman": self.correlation(numbers, distance, ranks=True).value}
            row |= {"r without first token": self.correlation(numbers, distance, TOKENS[1]).value}
            row |= {"dominant by biases": self.n_dominant(numbers, "dominant_alone", distance=distance).value}
            row |= {"on text": self.n_dominant(numbers, "dominant", distance=distance).value}
            row |= {"by each": self.n_dominant(numbers, "dominant_alone", "dominant", distance=distance).value}
            rows.append(row)
        return pd.DataFrame(rows)


def _logit_of_biases(layer: LayerCapture, n: int) -> Float[Tensor, "head distance"]:
    """g(D) of the chosen heads, D = 0 .. n - 1, with the layer's soft cap."""
    assert layer.projections is not None
    q, k = (bias[list(layer.heads)] for bias in layer.projections.biases)
    return layer.geometry.capped(constant_logit(q, k, layer.geometry.rope, layer.geometry.scale, n))
