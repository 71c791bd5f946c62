"""How much of a head's keys is their mean? A whole measure in one file, named like a module of tl_posgen on purpose."""

from dataclasses import dataclass

import plotly.graph_objects as go
import xarray as xr
from tl_posgen.collector import Collector, Variable
from tl_posgen.report.sentences import beside

from tl_posgen.core.measure import Measure, TokenView
from tl_posgen.core.options import Options
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.circuits import attention_maps


@dataclass(frozen=True)
class MeanKeyShare(Options):
    """|E k|^2 / E |k|^2 of the keys before RoPE, over the tokens from `first` on."""

    first: int = 0

    def check(self) -> None:
        if self.first < 0:
            raise InputError(f"first = {self.first}: give 0 or more")


class MeanKeyShareCollector(Collector):
    options: MeanKeyShare

    def update(self, layer: LayerCapture) -> None:
        keys = layer.k[:, self.options.first :].double()
        self.add(layer, share=keys.mean(1).square().sum(-1) / keys.square().sum(-1).mean(-1))
        if layer.prompt == 0:
            self.add(layer, overlap=(keys @ keys.mT).softmax(-1))

    def dataset(self) -> xr.Dataset:
        data = super().dataset()
        return data.assign_attrs(tokens=data.sizes["query"])


def bars(result) -> go.Figure:
    share = result.dataset["share"]
    figure = go.Figure(go.Bar(x=share.mean("head").values, y=[f"layer {one}" for one in share["layer"].values]))
    return figure.update_layout(title=f"Mean key share {result.summary['share']:.2f} · {result.dataset.attrs['model']}")


def show(data: xr.Dataset, example: int):
    tokens = [str(place) for place in range(data.attrs["tokens"])]
    heads = [f"head {head}" for head in data["head"].values]
    return attention_maps(data["overlap"].isel(layer=example).values, tokens, heads)


MEASURE = Measure(
    name="figures",
    question="How much of a head's keys is their mean?",
    explanation="|E k|^2 / E |k|^2 of the keys before RoPE.",
    source="an example of ours",
    options=MeanKeyShare,
    collector=MeanKeyShareCollector,
    variables={
        "share": Variable("mean key share", description="|E k|^2 / E |k|^2", headline="mean_key_share", short="mean"),
        "overlap": Variable("overlap of keys", dims=("layer", "head", "query", "key")),
    },
    summarise=lambda data: {"share": float(data["share"].mean())},
    findings=lambda own, null: [f"Mean keys hold {beside(own, null, 'share', '.0%')} of the energy of keys."],
    figures={"bars": bars},
    tokens=TokenView(lambda data: [f"layer {layer}" for layer in data["layer"].values], show),
    caveats={"rotary": "keys are taken before they rotate."},
)
