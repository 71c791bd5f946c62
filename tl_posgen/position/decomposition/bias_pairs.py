"""Bias pairs: how much of position, content and interaction the biases of queries and keys make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import xarray as xr

from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Distances
from tl_posgen.core.sums import OfFirstPrompt, Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.bias_pairs import PAIRS, bias_pair_shares
from tl_posgen.position.decomposition.numbers.variance_shares import PARTS, DistanceWeights
from tl_posgen.position.decomposition.variance import triple_moments_of
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import bars

_DIMS = ("tokens", *HEAD)
_OF_PAIR = (*_DIMS, "pair", "part")
ALONE, REST = PAIRS[0], PAIRS[-1]  # biases alone, and neither
WORDS = {  # of PAIRS, query first
    "bias-bias": "biases alone",
    "bias-rest": "bias of queries, rest of keys",
    "rest-bias": "rest of queries, bias of keys",
    "rest-rest": "neither bias",
}


@dataclass(frozen=True)
class BiasPairs(Measure):
    r"""score = (x W_Q + b_Q) R (x' W_K + b_K): share of each of the four products in position, content, interaction.

    Where queries and keys have biases, a score is the sum of four: of biases alone, which depends on distance alone, of
    each bias with the rest of the other side, and of the rest with the rest. Given is what each of them adds to the
    shares of position, content and interaction of what softmax sees (those of `variance`), and what it would make
    alone; position with both biases at zero stands beside, in each layer alone.

    The variance of a sum is no sum of variances. But position, content and interaction of a score are each linear in
    it, so that of the sum is the sum of those of the four; `share` is the covariance of a product's part with the part
    of the whole score, over the variance that softmax sees. Over the four these add up to the share of the part
    exactly, over everything to 1; a product that works against the others has a share below 0. `alone` is the
    product's own variance over the same one: these add up to nothing. The rest is what is left of q and k before RoPE
    without the bias, its mean over tokens included. Numbers are those without the first token, unless tokens="all" is
    asked for. Of a random init all biases are zero. Neither a soft cap nor ALiBi is part of these scores.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).

    Raises:
        UnsupportedModelError: a model without biases of queries and keys; one with a norm or clipping behind them; a
            layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: ours; of the variance's own split, functional ANOVA (Hoeffding 1948, Sobol 1993)

    Example:
        >>> from tl_posgen.errors import UnsupportedModelError
        >>> try:
        ...     BiasPairs()("mini", "Down, down, down.", nulls=0)
        ... except UnsupportedModelError as refusal:
        ...     print(refusal)
        no layer of this model has biases of queries or keys (none, or all are zero)
    """

    n_distances: Distances | None = None
    weights: DistanceWeights = "uniform"

    question = "How much of position do the biases of queries and keys make?"
    needs = frozenset({"inputs"})
    variables = {
        "of_biases": Variable(
            "position by biases alone",
            description="`share` of bias-bias in position",
            dims=_DIMS,
            headline="bias_position",
            short="bias pos",
            interval=True,
        ),
        "share": Variable(
            "share",
            description="cov(part of the product's scores, of all) / Var of what softmax sees; sums to 1",
            dims=_OF_PAIR,
            interval=True,
        ),
        "alone": Variable(
            "share alone",
            description="Var(part of the product's scores) / Var of what softmax sees",
            dims=_OF_PAIR,
            interval=True,
        ),
    }
    words = WORDS
    legend = (
        "position, content, interaction: share of the score variance that softmax sees, by covariance with the whole "
        "score; alone: variance of the product's own part over the same."
    )
    figures = {
        "pairs": bars(
            {part: [("share", "share", {"part": part}), ("alone", "alone", {"part": part})] for part in PARTS},
            "pair",
            title="What biases of queries and keys make",
            subtitle="shares of the score variance that softmax can see, first token left out; alone: without the "
            "other products",
        ),
        "map": head_map(
            *(("share", {"pair": pair, "part": "position"}) for pair in (ALONE, REST)),
            title="Position by biases alone, and by neither",
            subtitle="shares of the score variance that softmax can see, first token left out",
        ),
    }
    caveats = {
        encoding: "nothing rotates, so biases alone add one number to all scores, and position is zero by "
        "construction; the table tells how much of the content the bias of queries makes."
        for encoding in ("absolute", "alibi", "none")
    }
    without_meaning = frozenset(caveats)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"pair": PAIRS, "part": list(PARTS)}

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": TOKENS[1], "pair": ALONE, "part": "position"}

    def requires(self, session: Session) -> None:
        session.require_biases()

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        assert layer.projections is not None
        biases = tuple(bias[list(layer.heads)] for bias in layer.projections.biases)
        return dict(zip(TOKENS, layer.shared(triple_moments_of), strict=True)) | {"biases": OfFirstPrompt(biases)}

    def of_sums(self, sums: Sums) -> xr.Dataset:
        n = self.n_distances or max(sums.lengths.values())
        layer_shares = {}
        for layer, (geometry, _) in sums.layers.items():
            bias_q, bias_k = sums.by_layer("biases")[layer].value
            where = (geometry.rope, geometry.scale, geometry.reach(n))
            values = []
            for tokens in TOKENS:
                moments = sums.by_layer(tokens)[layer]
                shares = vars(bias_pair_shares(moments, bias_q, bias_k, *where, weights=self.weights))
                varies = moments.q.n > 1 and geometry.window != 1  # else a token sees itself alone, or nothing varies
                values.append({name: x if varies else torch.full_like(x, torch.nan) for name, x in shares.items()})
            layer_shares[layer] = values[0], values[1]
        data = sums.variables_of(layer_shares)
        return data.assign(of_biases=data["share"].sel(pair=ALONE, part="position", drop=True))

    def position(self, numbers: Numbers) -> Number:
        """Return the share of position in what softmax sees: the sum over the four."""
        return numbers.number(numbers.array("share", pair=None).sum("pair", skipna=False), (0, 1))

    def _position_without(self, numbers: Numbers) -> Number:
        """Return the share of position in what softmax sees of the rest with the rest: both biases at zero, in each
        layer alone."""
        alone = numbers.array("alone", pair=REST, part=None)
        return numbers.number(alone.sel(part="position", drop=True) / alone.sum("part", skipna=False), (0, 1))

    def findings(self, numbers: Numbers) -> list[str]:
        shares = ", ".join(f"{WORDS[pair]} {numbers('share', pair=pair):.1%}" for pair in PAIRS)
        most, total = numbers.extreme("of_biases"), self.position(numbers)
        return [
            f"Position is {total:.1%} of the score variance that softmax sees, mean over heads, first token left out: "
            f"{shares}. Most by biases alone: {most:.1%}.",
            "Without the biases of queries and keys, in each layer alone, it would be "
            f"{self._position_without(numbers):.1%} of what softmax then sees.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row for each of the four: its share of position, content and interaction, and alone."""
        rows = []
        for pair in PAIRS:
            values = {part: numbers("share", pair=pair, part=part).value for part in PARTS}
            alone = {f"{part} alone": numbers("alone", pair=pair, part=part).value for part in PARTS}
            rows.append({"query-key": WORDS[pair], **values, **alone})
        return pd.DataFrame(rows)
