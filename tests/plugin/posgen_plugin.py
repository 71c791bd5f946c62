"""How much of a head's keys is their mean? A whole measure in one file, named like a module of tl_posgen on purpose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen import Measure, Variable
from tl_posgen.core.measure import TokenView
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Whole
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.circuits import attention_maps


def bars(result: Any) -> go.Figure:
    share = result.trained["share"]
    figure = go.Figure(go.Bar(x=share.mean("head").values, y=[f"layer {one}" for one in share["layer"].values]))
    title = f"Mean key share {result.numbers('share').plain:.2f} · {result.trained.attrs['model']}"
    return figure.update_layout(title=title)


def show(data: xr.Dataset, example: int) -> Any:
    tokens = [str(place) for place in data["query"].values]
    heads = [f"head {head}" for head in data["head"].values]
    return attention_maps(data["overlap"].isel(layer=example).values, tokens, heads)


@dataclass(frozen=True)
class Figures(Measure):
    """|E k|^2 / E |k|^2 of the keys before RoPE.

    The share of the energy of keys that their mean holds.

    Args:
        first: the first token that counts.

    Source: an example of ours
    """

    first: Whole = 0

    question = "How much of a head's keys is their mean?"
    variables = {
        "share": Variable("mean key share", "", "|E k|^2 / E |k|^2", headline="mean_key_share", short="mean"),
        "overlap": Variable("overlap of keys", dims=("layer", "head", "query", "key")),
    }
    figures = {"bars": bars}
    token_view = TokenView(lambda data: [f"layer {layer}" for layer in data["layer"].values], show)
    caveats = {"rotary": "keys are taken before they rotate."}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        keys = layer.k[:, self.first :].double()
        share = keys.mean(1).square().sum(-1) / keys.square().sum(-1).mean(-1)
        return {"share": share} | ({"overlap": (keys @ keys.mT).softmax(-1)} if layer.prompt == 0 else {})

    def findings(self, numbers: Numbers) -> list[str]:
        return [f"Mean keys hold {numbers('share'):.0%} of the energy of keys."]
