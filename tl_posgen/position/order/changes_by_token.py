"""Change of the loss token by token on the first prompt of a perturbation, for circuitsvis."""

from collections.abc import Sequence
from typing import Any

import xarray as xr

from tl_posgen.core.measure import TokenView
from tl_posgen.report.circuits import token_colours

SHOWN = 0.1  # the ratio nearest to this is shown


def shown_ratio(ratios: Sequence[float]) -> float:
    """Return the ratio whose changes are shown: of those above 0, if there are any, the nearest to SHOWN.

    Example:
        >>> shown_ratio([0.0, 0.02, 0.2, 0.5]), shown_ratio([0.0])
        (0.02, 0.0)
    """
    return min([ratio for ratio in ratios if ratio] or ratios, key=lambda ratio: abs(ratio - SHOWN))


def token_labels(data: xr.Dataset) -> list[str]:
    """Return the condition of each example."""
    share = f"{shown_ratio(data['ratio'].values.tolist()):.0%}"
    words = [str(condition).replace("_", " ") for condition in data["condition"].values]
    return [f"{one}, {share} moved: change of each token's loss, first prompt; red: worse" for one in words]


def token_page(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt in the order the model saw them, coloured by the change of their loss."""
    one = data[["token_change", "token_text"]].isel(condition=example)
    return token_colours([str(token) for token in one["token_text"].values], one["token_change"].values)


TOKEN_VIEW = TokenView(token_labels, token_page)
