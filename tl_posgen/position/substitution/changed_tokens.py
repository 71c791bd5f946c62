"""Change of each token's loss under stand-ins on the first prompt, for circuitsvis."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.measure import TokenView
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.position.substitution.substitution_figures import in_words
from tl_posgen.report.circuits import CROP, token_colours

TARGET = "shown_target"
VARIABLES = {
    "token_change": Variable(
        "change of the loss", "nats", "first prompt, stand-in minus unchanged", dims=("condition", TARGET)
    ),
    "token_text": Variable("token", "", "first prompt", dims=(TARGET,)),
}


def changes(
    model: Any, tokens: Int[Tensor, " pos"], losses: Mapping[str, Float[Tensor, " target"]]
) -> dict[str, tuple[Any, Any]]:
    """Return the variables of a prompt from its losses by condition, "unchanged" among them."""
    unchanged = losses["unchanged"]
    by_condition = np.stack([(one - unchanged)[:CROP].float().numpy() for one in losses.values()])
    texts = np.array(token_strings(model, tokens[1 : CROP + 1]), dtype=object)
    return {"token_change": (("condition", TARGET), by_condition), "token_text": ((TARGET,), texts)}


def shown(data: xr.Dataset) -> list[str]:
    """Return the shown conditions: the best stand-in, its two parts alone, three_axis and uniform attention."""
    if "token_change" not in data:
        return []
    others = [*CONTROLS, "three_axis", "uniform_attention"]
    best = data["recovered"].drop_sel(condition=[*others, "unchanged"]).fillna(-np.inf)
    return [str(best["condition"].values[int(best.values.argmax())]), *others]


def labels(data: xr.Dataset) -> list[str]:
    """Return the label of each example: its stand-in."""
    return [f"{in_words(one)}: change of each token's loss, first prompt; red: worse" for one in shown(data)]


def show(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by the change of their loss."""
    changed = data["token_change"].sel(condition=shown(data)[example])
    return token_colours([str(token) for token in data["token_text"].values], changed.values)


TOKENS = TokenView(labels, show)
