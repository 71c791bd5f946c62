"""Change of each token's loss under stand-ins on the first prompt, for circuitsvis."""

from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import TokenView
from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.position.substitution.substitution_figures import in_words
from tl_posgen.report.circuits import token_colours


def shown_conditions(data: xr.Dataset) -> list[str]:
    """Return the shown conditions: the best stand-in, its two parts alone, three_axis and uniform attention."""
    others = [*CONTROLS, "three_axis", "uniform_attention"]
    best = data["recovered"].sel(end="value").drop_sel(condition=[*others, "unchanged"]).fillna(-np.inf)
    return [str(best["condition"].values[int(best.values.argmax())]), *others]


def token_labels(data: xr.Dataset) -> list[str]:
    """Return the label of each example: its stand-in."""
    return [f"{in_words(one)}: change of each token's loss, first prompt; red: worse" for one in shown_conditions(data)]


def token_page(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by the change of their loss."""
    changed = data["token_change"].sel(condition=shown_conditions(data)[example])
    return token_colours([str(token) for token in data["token_text"].values], changed.values)


TOKEN_VIEW = TokenView(token_labels, token_page)
