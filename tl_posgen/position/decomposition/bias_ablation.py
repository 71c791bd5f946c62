"""Biases of queries and keys at zero: the loss of the running model, and how much of its scores is position then."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import xarray as xr

from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.editing.without_biases import without_biases
from tl_posgen.interventions import Interventions
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.variance_shares import PARTS
from tl_posgen.position.decomposition.variance import shares_of, triple_moments_of
from tl_posgen.report.kinds import bars

_SIDES = {"no_biases": "qk", "no_q_bias": "q", "no_k_bias": "k"}


def _parts_of_scores(sums: Sums, n: int) -> xr.Dataset:
    """Return position, content and interaction of what softmax sees [layer, head], over n distances."""
    layer_parts = {}
    for layer, (geometry, heads) in sums.layers.items():
        moments = sums.by_layer("moments")[layer]
        seen = shares_of(moments, geometry, heads, n, "uniform").within_rows
        varies = 1.0 if moments.q.n > 1 and geometry.window != 1 else torch.nan  # else a token sees itself alone
        layer_parts[layer] = {part: varies * seen.share(*components) for part, components in PARTS.items()}
    return sums.variables_of(layer_parts)


@dataclass(frozen=True)
class BiasAblation(Interventions):
    r"""rise = L(b_q = 0, b_k = 0) - L, and the share of position in what softmax then sees.

    The biases of queries, of keys, and of both are set to zero in all layers at once. What is left: the loss, and the
    shares of position, content and interaction of the scores of the model that runs so.

    Biases are taken off by hooks before RoPE (`tl_posgen.hooks.without_biases`); weights stay as they are. Shares are
    those of `variance`, first token left out. In `bias_pairs` each layer is asked by itself, on the inputs that the
    whole model gives it; here later layers read what is left. At random init all biases are zero, so nothing changes.

    Raises:
        InputError: prompts of several lengths.
        UnsupportedModelError: a model without biases of queries and keys; one with a norm or clipping behind them; a
            layer whose queries and keys are not made by W_Q and W_K from one input.

    Source: ours

    Example:
        >>> from tl_posgen.errors import UnsupportedModelError
        >>> try:
        ...     BiasAblation()("mini", "Down, down, down.", nulls=0)
        ... except UnsupportedModelError as refusal:
        ...     print(refusal)
        no layer of this model has biases of queries or keys (none, or all are zero)
    """

    edits_all_layers = True
    question = "What do the biases of queries and keys cost, and how much position is left without them?"
    matrices = 9
    variables = {
        **Interventions.variables,
        **{
            part: Variable(part, "", f"{' + '.join(components)}, as a share of what softmax sees", ("condition", *HEAD))
            for part, components in PARTS.items()
        },
    }
    words = {
        "no_biases": "biases of q and k at zero",
        "no_q_bias": "bias of q at zero",
        "no_k_bias": "bias of k at zero",
    }
    figures = {
        **Interventions.figures,
        "parts": bars(
            {part: [(part, part)] for part in PARTS},
            "condition",
            title="Scores without biases of queries and keys",
            subtitle="shares of the score variance that softmax can see, mean over heads, first token left out",
            form=".1%",
        ),
    }
    caveats = {
        encoding: "nothing rotates, so biases of queries and keys make no position."
        for encoding in ("absolute", "alibi", "none")
    }

    def requires(self, session: Session) -> None:
        session.require_biases()

    def conditions(self, run: Run) -> Mapping[str, Any]:
        there = run.session.biased()  # at random init: none
        return {name: without_biases(run.session, [*of]) if there & {*of} else [] for name, of in _SIDES.items()}

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the loss, and the parts of the scores of the same passes."""
        sums = Sums({part: Variable("", dims=HEAD) for part in PARTS})

        def consumer(layer: LayerCapture) -> None:
            sums.add_layer(layer, {"moments": triple_moments_of(layer)[1]})

        loss = run.losses_under(hooks, consumer).mean(-1).numpy()
        parts = _parts_of_scores(sums, run.tokens.shape[1])
        return {"loss": loss, **{str(part): array for part, array in parts.items()}}

    def findings(self, numbers: Numbers) -> list[str]:
        shares = "; ".join(f"{self.in_words(name)} {numbers('position', condition=name):.0%}" for name in _SIDES)
        return [
            *super().findings(numbers),
            f"Position is {numbers('position'):.0%} of the score variance that softmax sees; with {shares}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition: loss, rise with its ends, and the parts of the scores."""
        parts = numbers.frame({part: numbers.dataset[part] for part in PARTS}, "condition")
        return super().table(numbers).merge(parts, on="condition", how="left")
