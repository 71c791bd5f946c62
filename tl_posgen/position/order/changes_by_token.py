"""Change of the loss token by token on the first prompt of a perturbation, for circuitsvis."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.measure import TokenView
from tl_posgen.models.tokens import token_strings
from tl_posgen.report.circuits import CROP, token_colours

SHOWN = 0.1  # the ratio nearest to this is shown


def shown_ratio(ratios: Sequence[float]) -> float:
    """Return the ratio whose changes are shown: of those above 0, if there are any, the nearest to SHOWN.

    Example:
        >>> shown_ratio([0.0, 0.02, 0.2, 0.5]), shown_ratio([0.0])
        (0.02, 0.0)
    """
    return min([ratio for ratio in ratios if ratio] or ratios, key=lambda ratio: abs(ratio - SHOWN))


class ShownPrompt:
    """First draw of the first prompt under every condition, at one reach and ratio.

    Args:
        reach, ratio: reach and ratio of the runs that are kept.
    """

    def __init__(self, reach: Any, ratio: float):
        self.reach, self.ratio = reach, ratio
        self._of_condition: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(
        self,
        condition: str,
        reach: Any,
        ratio: float,
        draw: int,
        prompt: int,
        tokens: Int[Tensor, " pos"],
        change: Float[Tensor, " target"],
    ) -> None:
        """Keep a run's tokens in the order the model saw them, and their changes of the loss, if the run is shown."""
        if (draw, prompt, str(reach), float(ratio)) == (0, 0, str(self.reach), float(self.ratio)):
            self._of_condition[condition] = tokens[1 : CROP + 1], change[:CROP]

    def variables(self, model: Any) -> dict[str, tuple]:
        """Return variables over (condition, shown target): changes in nats, and the tokens' texts."""
        changes = np.stack([change.float().cpu().numpy() for _, change in self._of_condition.values()])
        texts = np.array([token_strings(model, tokens) for tokens, _ in self._of_condition.values()], dtype=object)
        dims = ("condition", "shown_target")
        return {"token_change": (dims, changes), "token_text": (dims, texts), "shown_ratio": ((), float(self.ratio))}


def labels(data: xr.Dataset) -> list[str]:
    """Return the label of each example: its condition."""
    if "token_change" not in data:
        return []
    share = f"{float(data['shown_ratio']):.0%}"
    words = [str(condition).replace("_", " ") for condition in data["condition"].values]
    return [f"{one}, {share} moved: change of each token's loss, first prompt; red: worse" for one in words]


def show(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt in the order the model saw them, coloured by the change of their loss."""
    one = data[["token_change", "token_text"]].isel(condition=example)
    return token_colours([str(token) for token in one["token_text"].values], one["token_change"].values)


TOKENS = TokenView(labels, show)
