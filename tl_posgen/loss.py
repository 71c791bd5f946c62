"""The loss of the untouched model on the prompts: what every experiment in the running model is compared with."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.collector import Collector, Variable
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import losses_of
from tl_posgen.report.figures import finish, line, model_label, sides
from tl_posgen.report.sentences import beside
from tl_posgen.summary import Summary


class LossCollector(Collector):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._losses: list[np.ndarray] = []

    def update(self, layer: LayerCapture) -> None:
        """Nothing of a single layer."""

    def finish(self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocabulary"]) -> None:
        self._losses.append(losses_of(logits[None], tokens[None].to(logits.device))[0].cpu().numpy())

    def dataset(self) -> xr.Dataset:
        longest = max(len(row) for row in self._losses)
        table = np.full((len(self._losses), longest), np.nan)
        for row, losses in zip(table, self._losses, strict=True):
            row[: len(losses)] = losses
        token_loss = xr.DataArray(table, {"position": np.arange(1, longest + 1)}, ("prompt", "position"))
        data = {"token_loss": token_loss, "loss": token_loss.mean("position")}
        return xr.Dataset(data, {"prompt": range(len(table))}, {"rows": "prompt"})


def summarise(data: xr.Dataset) -> Summary:
    return {"loss": float(data["loss"].mean()), "prompts": data.sizes["prompt"]}


def by_position(result: Any) -> go.Figure:
    """Mean loss of the tokens at each position, over prompts."""
    curves = [
        line(data["position"].values, data["token_loss"].mean("prompt").values, side, colour)
        for side, data, colour in sides(result)
    ]
    figure = go.Figure(curves).update_xaxes(title_text="position").update_yaxes(title_text="loss, nats per token")
    subtitle = f"mean over {result.summary['prompts']} prompts; over all positions {result.summary['loss']:.3f}"
    return finish(figure, f"Loss by position · {model_label(result.dataset)}", subtitle)


MEASURE = Measure(
    name="loss",
    question="How well does the model predict the text?",
    explanation="-ln p of each next token in nats, the model as it is: experiments in the running model start from it.",
    source="cross-entropy",
    collector=LossCollector,
    needs=frozenset({"logits"}),
    variables={
        "loss": Variable("loss", "nats per token", "mean over the prompt", dims=("prompt",)),
        "token_loss": Variable("loss of each token", "nats", "-ln p(token | before it)", dims=("prompt", "position")),
    },
    summarise=summarise,
    findings=lambda own, null: [f"Loss: {beside(own, null, 'loss')} nats per token."],
    figures={"position": by_position},
)
