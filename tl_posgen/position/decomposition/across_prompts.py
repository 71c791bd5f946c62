"""What is the same in every prompt: how much of each head's scores is position, whatever the encoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.collector import Collector, Variable, added
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.decomposition.position_shares import PositionParts, position_shares, row_centred
from tl_posgen.position.decomposition.rounding import is_rounding
from tl_posgen.position.first_token import VARIANTS, WITHOUT_FIRST_TOKEN, without_first_token
from tl_posgen.report.circuits import CROP as MAP_CROP
from tl_posgen.report.figures import DIVERGING, Panels, head_map, model_label, sides, token_map
from tl_posgen.report.sentences import at_head, extremes, means, null_of, said, with_interval
from tl_posgen.summary import Summary

CROP = 256


@dataclass(frozen=True)
class AcrossPrompts(Options):
    r"""W^p_ij = P_ij + M^p_ij: P the same in every prompt (position), M^p what changes with the text (content).

    Scores are centred within rows, which is what softmax sees; shares are of their mean square. Of position, some is a
    function of i - j alone, some of j alone, some a(i - j) + c(j); position - by_either takes query and key position
    both. A straight line in j is, within a row, one in i - j, so by_distance and by_key overlap. What chance leaves in
    a mean over n prompts, |M|^2 / n, is subtracted: shares are unbiased, and small ones may fall below 0.

    Position is all that prompts share: also what texts of this kind do at these places on average. Prompts should be
    cut from different places, and count as independent.

    Args:
        crop: the first so many tokens of every prompt; memory holds crop^2 / 2 numbers for every head of the model.
        examples: heads whose mean is kept as a map, those with most position; 0 for none.

    Raises:
        InputError: fewer than 2 prompts, prompts of different lengths (after the crop), fewer than 3 tokens.

    Source: ours. It needs scores alone, so it means the same for RoPE, ALiBi, learned positions, and none.

    Example:
        >>> from tl_posgen.position.decomposition import across_prompts
        >>> texts = ["The cat sat on the mat.", "A dog ran down the road."]
        >>> across_prompts("mini", texts, crop=6, null_seeds=()).summary["prompts"]
        2
    """

    crop: int = CROP
    examples: int = 3

    def check(self) -> None:
        check_whole("across_prompts", 3, crop=self.crop)
        check_whole("across_prompts", 0, examples=self.examples)


@dataclass
class LayerSums:
    """Sums over prompts for one layer: its scores over the pairs that count, and their `PositionParts.energy`."""

    heads: list[int]
    parts: list[PositionParts]
    scores: Float[Tensor, "head pair"]
    energy: Float[Tensor, "variant head part=5"]

    def __add__(self, other: "LayerSums") -> "LayerSums":
        return replace(self, scores=self.scores + other.scores, energy=self.energy + other.energy)


class AcrossPromptsCollector(Collector):
    options: AcrossPrompts

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._layers: dict[int, LayerSums] = {}
        self._parts: dict[int | None, list[PositionParts]] = {}  # by window, with the first token and without
        self._prompts: set[int] = set()

    def update(self, layer: LayerCapture) -> None:
        n = min(self.options.crop, layer.length)
        self._prompts.add(layer.prompt)
        window = layer.geometry.window
        if window == 1:
            raise InputError(
                f"across_prompts: in layer {layer.layer} a token sees itself alone (a window of 1), so nothing varies "
                "within rows; leave the layer out by layers="
            )
        if window not in self._parts:
            self._parts[window] = [PositionParts(mask) for mask in masks_of(n, window, layer.positions.device)]
        parts = self._parts[window]
        check_lengths([n, parts[0].n])
        scores = layer.scores(n)
        seen, within = scores[:, parts[0].mask].double(), row_centred(scores, parts[0].mask).square().sum((1, 2))
        constant = is_rounding(within, layer, CausalPairs(n, window), seen.square().sum(-1))
        seen, scores = seen.masked_fill(constant[:, None], 0), scores.masked_fill(constant[:, None, None], 0)
        new = LayerSums(list(layer.heads), parts, seen, energies(scores, parts))
        self._layers = added(self._layers, {layer.layer: new})

    def joined(self, other: Any) -> Any:
        check_lengths([parts[0].n for one in (self, other) for parts in one._parts.values()])
        both = super().joined(other)
        both._layers, both._parts = added(self._layers, other._layers), self._parts | other._parts
        both._prompts = self._prompts | other._prompts
        return both

    def dataset(self) -> xr.Dataset:
        if len(self._prompts) < 2:
            raise InputError("across_prompts compares prompts and was given one; give n_prompts=2 or more")
        rows: list[xr.Dataset] = [self._shares(layer).assign_coords(layer=layer) for layer in sorted(self._layers)]
        dataset = xr.concat(rows, "layer", data_vars="all", join="outer")
        for suffix in VARIANTS:
            position = dataset[f"position{suffix}"]
            surely = position.where(position > dataset[f"chance{suffix}"])
            for name in ("distance", "key", "either"):
                dataset[f"{name}_of_position{suffix}"] = dataset[f"by_{name}{suffix}"] / surely
        return dataset.assign(self._example_maps(dataset)).assign_attrs(prompts=len(self._prompts))

    def _mean_scores(self, sums: LayerSums) -> Float[Tensor, "head query key"]:
        mask = sums.parts[0].mask
        mean = sums.scores.new_zeros(len(sums.scores), *mask.shape)
        mean[:, mask] = sums.scores / len(self._prompts)
        return mean

    def _shares(self, layer: int) -> xr.Dataset:
        sums, n, data = self._layers[layer], len(self._prompts), {}
        prompts, mean = sums.energy / n, energies(self._mean_scores(sums), sums.parts)
        for of_prompts, of_mean, parts, suffix in zip(prompts, mean, sums.parts, VARIANTS, strict=True):
            shares = position_shares(of_prompts, of_mean, n, int(parts.mask.sum()))
            data |= {f"{name}{suffix}": ("head", share.cpu().numpy()) for name, share in shares.items()}
        return xr.Dataset(data, {"head": sums.heads})

    def _example_maps(self, dataset: xr.Dataset) -> dict[str, tuple]:
        position = dataset["position_without_first_token"].transpose("layer", "head").to_series()
        most = position.dropna().nlargest(self.options.examples).index.to_list()
        if not most:
            return {}
        (layers, heads), maps = zip(*most, strict=True), []
        for layer, head in most:
            sums = self._layers[layer]
            mean = self._mean_scores(sums)[[sums.heads.index(head)]]
            maps.append(row_centred(mean, sums.parts[1].mask)[0, :MAP_CROP, :MAP_CROP].float().cpu().numpy())
        found: dict[str, tuple] = {"example_layer": ("example", list(layers)), "example_head": ("example", list(heads))}
        return found | {"example_position": (("example", "query", "key"), np.stack(maps))}


def energies(scores: Tensor, parts: Sequence[PositionParts]) -> Float[Tensor, "variant head part=5"]:
    return torch.stack([part.energy(row_centred(scores, part.mask)) for part in parts])


def masks_of(n: int, window: int | None, device: torch.device) -> Bool[Tensor, "variant query key"]:
    """Which pairs count, with and without the first token."""
    positions = torch.arange(n, device=device)
    both = (CausalPairs(n, window, first_token=first) for first in (True, False))
    return torch.stack([pairs.mask(positions, positions) for pairs in both])


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuse prompts that cannot be compared pair by pair."""
    if len(set(lengths)) > 1:
        raise InputError(
            f"across_prompts: prompts of {' and '.join(map(str, dict.fromkeys(lengths)))} tokens cannot be compared "
            "pair by pair; give length= to cut all alike"
        )
    if min(lengths) < 3:
        raise InputError(f"across_prompts: prompts of {min(lengths)} tokens; give 3 at least")


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    shown = ("position", "by_distance", "by_key", "by_either", "by_line", "chance", "distance_of_position")
    return {
        "prompts": int(data.attrs["prompts"]),
        **means(data, *(f"{name}{suffix}" for name in shown for suffix in VARIANTS)),
        **extremes(data, "position_without_first_token"),
    }


NOT_RESOLVED = "not resolved"


def resolved(own: Summary, key: str, form: str = ".1%") -> str:
    """A share of the summary; one below 0 is noise about a small share."""
    return NOT_RESOLVED if own[key] < 0 else with_interval(own, key, form)


def findings(own: Summary, null: Any) -> list[str]:
    def share(name: str, suffix: str = WITHOUT_FIRST_TOKEN) -> str:
        key = f"{name}{suffix}"
        noise = null is not None and null[key] < 0
        return f"{resolved(own, key)} ({f'random init {NOT_RESOLVED}' if noise else null_of(null, key, '.1%')})"

    most = "position_without_first_token_highest"
    found = [
        f"Position, the same in all {own['prompts']} prompts, is {share('position')} of the score variance within "
        f"rows, first token left out (with it {share('position', '')}). Most: "
        f"{at_head(own[f'{most}_head'], own[most])}.",
        f"A function of distance alone holds {share('by_distance')} of that variance, one of the key's position alone "
        f"{share('by_key')}, both together {share('by_either')}; a straight line, {share('by_line')}, is in each, "
        "since within a row distance and key position are one line.",
    ]
    if any(NOT_RESOLVED in sentence for sentence in found):
        chance = said(own[f"chance{WITHOUT_FIRST_TOKEN}"], ".1%")
        found.append(f"Not resolved: chance leaves {chance} in a mean over so few prompts; give more of them.")
    return found


def mean_maps(result: Any) -> go.Figure:
    """The mean over prompts for the heads with most position; the null's below."""
    both = sides(result)
    n = max(data.sizes["example"] for _, data, _ in both)
    titles = [map_title(data, number, side) for side, data, _ in both for number in range(n)]
    panels = Panels(titles, columns=n, row_height=330, horizontal_spacing=0.06)
    for row, (_, data, _) in enumerate(both):
        for number in range(data.sizes["example"]):
            scores = data["example_position"].isel(example=number).transpose("query", "key")
            shown = scores.where(np.tri(*scores.shape, dtype=bool))
            reach = float(abs(shown).quantile(0.98))
            colours = {"colorscale": DIVERGING, "reversescale": True, "zmin": -reach, "zmax": reach}
            panels.add(row * n + number, token_map(shown, **colours))
    panels.figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    panels.figure.update_annotations(font_size=11)
    return panels.axes("key position", "query position").finish(
        f"What is the same in every prompt · {model_label(result.dataset)}",
        f"mean over {result.summary['prompts']} prompts of scores within rows, first token left out; the heads with "
        "most position; red high, blue low, each map on its own scale",
    )


def map_title(data: xr.Dataset, number: int, side: str) -> str:
    if number >= data.sizes["example"]:
        return ""
    layer, head = (int(data[f"example_{name}"][number]) for name in ("layer", "head"))
    share = float(data["position_without_first_token"].sel(layer=layer, head=head))
    told = NOT_RESOLVED if share < 0 else said(share, ".0%")
    return f"L{layer}H{head}, position {told} · {side}"


def by_layer(data: xr.Dataset) -> pd.DataFrame:
    """Per layer, means over heads."""
    columns = {"position": "position", "by_distance": "by distance", "by_key": "by key position"}
    columns |= {"by_either": "by either", "chance": "chance"}
    columns = {f"{name}_without_first_token": label for name, label in columns.items()} | {"position": "with 1st token"}
    frame = data[list(columns)].mean("head").to_dataframe().reset_index()
    return frame.rename(columns=columns)[["layer", *columns.values()]]


OF_SCORES = "share of the mean square of the scores within rows"
OF_POSITION = "as a share of position; none where that is less than chance"
PARTS = {
    "position": Variable(
        "position", description=f"the same in every prompt; {OF_SCORES}", interval=True, bounds=(0.0, 1.0)
    ),
    "by_distance": Variable(
        "distance alone", description=f"a function of i - j; {OF_SCORES}", interval=True, bounds=(0.0, 1.0)
    ),
    "by_key": Variable(
        "key position alone", description=f"a function of j; {OF_SCORES}", interval=True, bounds=(0.0, 1.0)
    ),
    "by_either": Variable(
        "distance + key position", description=f"a(i - j) + c(j); {OF_SCORES}", interval=True, bounds=(0.0, 1.0)
    ),
    "by_line": Variable("straight line", description=f"linear in j, so in i - j; {OF_SCORES}"),
    "chance": Variable("chance", description="what chance leaves in a mean over so few prompts; subtracted already"),
    "variance": Variable("variance within rows", "logits^2", "mean square of the scores within rows"),
    "distance_of_position": Variable("distance alone, of position", description=OF_POSITION),
    "key_of_position": Variable("key position alone, of position", description=OF_POSITION),
    "either_of_position": Variable("distance + key position, of position", description=OF_POSITION),
}
VARIABLES = {
    **PARTS,
    **without_first_token(PARTS),
    "example_position": Variable(
        "mean over prompts of scores within rows",
        "logits",
        "of the heads with most position, first token left out, first 128 tokens",
        dims=("example", "query", "key"),
    ),
    "example_layer": Variable("layer of an example", dims=("example",)),
    "example_head": Variable("head of an example", dims=("example",)),
}

MEASURE = Measure(
    name="across_prompts",
    question="How much of the scores is the same in every prompt?",
    explanation=(
        "Scores within rows, prompt by prompt: what is the same at the same query and key position in all of them is "
        "position, the rest is content. Needs no RoPE, so it means the same for every encoding. Corrected for what "
        "chance leaves in a mean over few prompts."
    ),
    source="ours",
    options=AcrossPrompts,
    collector=AcrossPromptsCollector,
    min_prompts=2,
    check_prompts=lambda options, tokens: check_lengths([min(options.crop, len(prompt)) for prompt in tokens]),
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={
        "map": head_map(
            *(f"position{suffix}" for suffix in VARIANTS),
            title="Position across prompts",
            subtitle="share of the score variance within rows that is the same in all prompts, chance removed",
        ),
        "parts": head_map(
            *(f"by_{name}{WITHOUT_FIRST_TOKEN}" for name in ("distance", "key", "either")),
            title="Position by distance and by key",
            subtitle="shares of the score variance within rows; a straight line, which within a row is the same for "
            "both, counts as both",
        ),
        "maps": mean_maps,
    },
    drawn=lambda data: ["map", "parts", *(["maps"] if "example_position" in data else [])],
    table=by_layer,
    legend=(
        "shares of the mean square of the scores within rows, means over heads; position: the same in every prompt; "
        "chance: subtracted already; with 1st token: position, nothing left out."
    ),
    caveats={
        "absolute": "random position vectors are the same in every prompt too, so random init is no zero; look at how "
        "much of position is a function of distance.",
        "alibi": "the slope is the same in every prompt, at random init too, where little content stands beside it, so "
        "the null is no zero. What the slope adds is all in the straight line.",
    },
)
