"""The loss of the untouched model on the prompts: what every experiment in the running model is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.models.loss import losses_of_logits
from tl_posgen.models.session import Session
from tl_posgen.report.figures import drawn_models, line, model_label, titled


def by_position(result: Any) -> go.Figure:
    """Draw the mean loss of the tokens at each position, over prompts."""
    curves = [
        line(data["position"].values, data["token_loss"].mean("prompt").values, side, colour)
        for side, data, colour in drawn_models(result)
    ]
    figure = go.Figure(curves).update_xaxes(title_text="position").update_yaxes(title_text="loss, nats per token")
    loss = result.trained["loss"]
    subtitle = f"mean over {loss.sizes['prompt']} prompts; over all positions {float(loss.mean()):.3f}"
    return titled(figure, f"Loss by position · {model_label(result.trained)}", subtitle)


@dataclass(frozen=True)
class Loss(Measure):
    r"""-ln p(token | those before it), in nats: mean over the tokens of each prompt, the first left out.

    The mean of -ln p of each next token, in nats, of the model as it is. Experiments in the running model start from
    it.

    Source: cross-entropy.

    Example:
        >>> result = Loss()("mini", "Down, down, down.", nulls=0)
        >>> bool(result.trained["loss"][0] == result.trained["token_loss"].mean())
        True
    """

    question = "How well does the model predict the text?"
    variables = {
        "loss": Variable("loss", "nats per token", "mean over the prompt", ("prompt",)),
        "token_loss": Variable("loss of each token", "nats", "-ln p(token | before it)", ("prompt", "position")),
    }
    needs = frozenset({"logits"})
    rows = ("prompt",)
    figures = {"position": by_position}

    def of_logits(
        self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocabulary"], session: Session
    ) -> Mapping[str, Any]:
        return {"token_loss": losses_of_logits(session, logits[None], tokens[None].to(logits.device))[0]}

    def of_sums(self, sums: Sums) -> xr.Dataset:
        losses = sums.mean("token_loss")
        losses = losses.assign_coords(position=losses["position"] + 1)  # the first token is predicted from nothing
        return xr.Dataset({"token_loss": losses, "loss": losses.mean("position")})

    def findings(self, numbers: Numbers) -> list[str]:
        return [f"Loss: {numbers('loss'):.3f} nats per token."]
