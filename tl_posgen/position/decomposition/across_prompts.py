"""Position across prompts: how much of each head's scores is the same in every prompt, whatever the encoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import HEAD, Measure, Variable, by_tokens
from tl_posgen.core.numbers import Number, Numbers, mean_of_nulls
from tl_posgen.core.options import Whole, Within
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.position_shares import (
    FUNCTIONS,
    PositionParts,
    position_shares,
    row_centred,
)
from tl_posgen.position.decomposition.rounding import is_rounding
from tl_posgen.report.circuits import CROP as MAP_CROP
from tl_posgen.report.figures import DIVERGING, Panels, model_label, sides, token_map
from tl_posgen.report.head_figures import head_map

DIMS = ("tokens", *HEAD)
OUT = {"tokens": "without first"}
NOT_RESOLVED = "not resolved"
OF_SCORES = "share of the mean square of the scores within rows"
OF_FUNCTION = f"of i - j, of j, a(i - j) + c(j), or linear in j, so in i - j; {OF_SCORES}"
OF_POSITION = "as a share of position; none where that is less than chance"
MEAN_SQUARE = "mean square of the scores within rows"
SHARED: WeakValueDictionary[tuple, PositionParts] = WeakValueDictionary()  # by tokens, window, first token, device


def resolved(number: Number, form: str = ".1%") -> str:
    """Return a share with its interval; one below 0 is noise about a small share."""
    return NOT_RESOLVED if number.value < 0 else f"{number.with_interval:{form}}"


def resolved_beside_null(number: Number) -> str:
    """Return a share with its interval, and the null models' shares."""
    nulls = (f"{kind} {resolved(mean_of_nulls(one))}" for kind, one in number.by_null.items())
    return resolved(number) + in_brackets(", ".join(nulls))


def draw_maps(result: Any) -> go.Figure:
    """Draw the mean over prompts for the heads with most position; the null's below."""
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
        f"What is the same in every prompt · {model_label(result.own)}",
        f"mean over {result.own.attrs['prompts']} prompts of scores within rows, first token left out; the heads with "
        "most position; red high, blue low, each map on its own scale",
    )


def map_title(data: xr.Dataset, number: int, side: str) -> str:
    """Return the title of an example's map."""
    if number >= data.sizes["example"]:
        return ""
    layer, head = (int(data[f"example_{name}"][number]) for name in HEAD)
    share = float(data["position"].sel(OUT | {"layer": layer, "head": head}))
    return f"{head_name(layer, head)}, position {NOT_RESOLVED if share < 0 else f'{share:.0%}'} · {side}"


@dataclass(frozen=True)
class AcrossPrompts(Measure):
    r"""W^p_ij = P_ij + M^p_ij: P the same in every prompt (position), M^p what changes with the text (content).

    Scores within rows, prompt by prompt: what is the same at the same query and key position in all of them is
    position, the rest is content. Needs no RoPE, so it means the same for every encoding. Corrected for what chance
    leaves in a mean over few prompts.

    Scores are centred within rows, which is what softmax sees; shares are of their mean square. Of position, some is a
    function of i - j alone ("distance"), some of j alone ("key"), some a(i - j) + c(j) ("either"); what "either" leaves
    of position takes query and key position both. A straight line in j is, within a row, one in i - j ("line"), so
    "distance" and "key" overlap. What chance leaves in
    a mean over n prompts, |M|^2 / n, is subtracted: shares are unbiased, and small ones may fall below 0.

    Position is all that prompts share: also what texts of this kind do at these places on average. Prompts should be
    cut from different places, and count as independent.

    Args:
        crop: the first so many tokens of every prompt; memory holds crop^2 / 2 numbers for every head of the model.
        examples: heads whose mean is kept as a map, those with most position; 0 for none.

    Raises:
        InputError: fewer than 2 prompts, prompts of different lengths (after the crop), fewer than 3 tokens.

    Source: ours

    Example:
        >>> texts = ["The cat sat on the mat.", "A dog ran down the road."]
        >>> AcrossPrompts(crop=6)("mini", texts, null_seeds=()).own.attrs["prompts"]
        2
    """

    crop: Annotated[int, Within(3, words="a whole number, 3 or more")] = 256
    examples: Whole = 3

    question = "How much of the scores is the same in every prompt?"
    variables = {
        "position": Variable("position", "", f"the same in every prompt; {OF_SCORES}", DIMS, interval=True),
        "share": Variable("share of a function", "", OF_FUNCTION, (*DIMS, "function"), interval=True),
        "chance": Variable("chance", "", "what chance leaves in a mean over so few prompts; subtracted already", DIMS),
        "variance": Variable("variance within rows", "logits^2", MEAN_SQUARE, DIMS),
        "part_of_position": Variable("part of position", "", f"share of a function {OF_POSITION}", (*DIMS, "function")),
        "example_position": Variable(
            *("mean over prompts of scores within rows", "logits"),
            "of the heads with most position, first token left out, first 128 tokens",
            ("example", "query", "key"),
        ),
        "example_layer": Variable("layer of an example", dims=("example",)),
        "example_head": Variable("head of an example", dims=("example",)),
    }
    figures = {
        "map": head_map(
            *("position", ("position", OUT)),
            title="Position across prompts",
            subtitle="share of the score variance within rows that is the same in all prompts, chance removed",
        ),
        "parts": head_map(
            *(("share", {"function": function, **OUT}) for function in FUNCTIONS[:3]),
            title="Position by distance and by key",
            subtitle="shares of the score variance within rows; a straight line, which within a row is the same for "
            "both, counts as both",
        ),
        "maps": draw_maps,
    }
    legend = (
        "shares of the mean square of the scores within rows, means over heads; position: the same in every prompt; "
        "chance: subtracted already; with 1st token: position, nothing left out."
    )
    caveats = {
        "absolute": "random position vectors are the same in every prompt too, so random init is no zero; look at how "
        "much of position is a function of distance.",
        "alibi": "the slope is the same in every prompt, at random init too, where little content stands beside it, so "
        "the null is no zero. What the slope adds is all in the straight line.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"function": FUNCTIONS}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["map", "parts", *(["maps"] if "example_position" in data else [])]

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "AcrossPrompts":
        if len(tokens) < 2:
            raise InputError(f"across_prompts compares prompts: 2 at least, not {len(tokens)}; give n_prompts=2")
        require_same_length([min(self.crop, len(prompt)) for prompt in tokens])
        return self

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        n, window = min(self.crop, layer.length), layer.geometry.window
        require_same_length([n])
        if window == 1:
            raise InputError(
                f"across_prompts: in layer {layer.layer} a token sees itself alone (a window of 1), so nothing varies "
                "within rows; leave the layer out by layers="
            )
        parts = position_parts(n, window, layer.positions.device)
        scores = layer.scores(n)
        seen, within = double(scores[:, parts[0].mask]), row_centred(scores, parts[0].mask).square().sum((1, 2))
        constant = is_rounding(within, layer, CausalPairs(n, window), seen.square().sum(-1))
        seen, scores = seen.masked_fill(constant[:, None], 0), scores.masked_fill(constant[:, None, None], 0)
        return {"scores": ScoreSums(parts, seen, energies(scores, parts))}

    def finish(self, sums: Sums) -> xr.Dataset:
        n_prompts = len(sums.lengths)
        if n_prompts < 2:
            raise InputError("across_prompts compares prompts and was given one; give n_prompts=2 or more")
        data = sums.variables_of({layer: one.shares(n_prompts) for layer, one in sums.by_layer("scores").items()})
        surely = data["position"].where(data["position"] > data["chance"])
        data = data.assign(part_of_position=data["share"] / surely)
        return data.assign(self.example_maps(data, sums)).assign_attrs(prompts=n_prompts)

    def example_maps(self, data: xr.Dataset, sums: Sums) -> dict[str, tuple]:
        """Return the means over prompts of the heads with most position; nothing where there are none."""
        position = data["position"].sel(OUT).transpose(*HEAD).to_series()
        most = position.dropna().nlargest(self.examples).index.to_list()
        if not most:
            return {}
        maps, layers = [], sums.by_layer("scores")
        for layer, head in most:
            one = layers[layer]
            mean = one.mean(len(sums.lengths))[[sums.layers[layer][1].index(head)]]
            within = row_centred(mean, one.parts[1].mask.to(mean.device))[0, :MAP_CROP, :MAP_CROP]
            maps.append(within.float().cpu().numpy())
        places = {f"example_{name}": ("example", one) for name, one in zip(HEAD, np.array(most).T, strict=True)}
        return {**places, "example_position": (("example", "query", "key"), np.stack(maps))}

    def findings(self, own: Numbers) -> list[str]:
        position, everything = (resolved_beside_null(own("position", **labels)) for labels in (OUT, {}))
        shares = [resolved_beside_null(own("share", function=function, **OUT)) for function in FUNCTIONS]
        distance, key, either, line = shares
        found = [
            f"Position, the same in all {own.attrs['prompts']} prompts, is {position} of the score variance "
            f"within rows, first token left out (with it {everything}). Most: "
            f"{own.extreme('position', tokens='without first'):.3f}.",
            f"A function of distance alone holds {distance} of that variance, one of the key's position alone {key}, "
            f"both together {either}; {line}, a straight line, could be either: within a row, distance and key "
            "position add up to a constant.",
        ]
        if any(NOT_RESOLVED in sentence for sentence in found):
            chance = own("chance", **OUT).plain
            found.append(f"Not resolved: chance leaves {chance:.1%} in a mean over so few prompts; give more of them.")
        return found

    def table(self, own: Numbers) -> pd.DataFrame:
        labels = dict(zip(("by distance", "by key position", "by either"), FUNCTIONS, strict=False))
        columns = {"position": own.array("position", **OUT)}
        columns |= {label: own.array("share", function=one, **OUT) for label, one in labels.items()}
        columns |= {"chance": own.array("chance", **OUT), "with 1st token": own.array("position")}
        return own.frame(columns, "layer")


@dataclass
class ScoreSums:
    """Sums over prompts of a layer's scores over the pairs that count, and of their `PositionParts.energy`: `a + b`.

    `parts` stay on the device of the model, as all layers and prompts share them.
    """

    parts: list[PositionParts]
    scores: Float[Tensor, "head pair"]
    energy: Float[Tensor, "variant head part=5"]

    def __add__(self, other: "ScoreSums") -> "ScoreSums":
        require_same_length([one.parts[0].n for one in (self, other)])
        return replace(self, scores=self.scores + other.scores, energy=self.energy + other.energy)

    def mean(self, n_prompts: int) -> Float[Tensor, "head query key"]:
        """Return the mean scores; 0 where a pair does not count."""
        mask = self.parts[0].mask.to(self.scores.device)
        mean = self.scores.new_zeros(len(self.scores), *mask.shape)
        mean[:, mask] = self.scores / n_prompts
        return mean

    def shares(self, n_prompts: int) -> dict[str, Float[Tensor, "tokens head *function"]]:
        """Return the numbers of `position_shares`, with the first token and without."""
        means = energies(self.mean(n_prompts).to(self.parts[0].mask.device), self.parts).to(self.energy.device)
        both = [
            position_shares(energy / n_prompts, of_mean, n_prompts, int(parts.mask.sum()))
            for energy, of_mean, parts in zip(self.energy, means, self.parts, strict=True)
        ]
        return by_tokens(*both)


def energies(scores: Tensor, parts: Sequence[PositionParts]) -> Float[Tensor, "variant head part=5"]:
    """Return `PositionParts.energy` of the scores within rows, with the first token and without."""
    return torch.stack([part.energy(row_centred(scores, part.mask)) for part in parts])


def position_parts(n: int, window: int | None, device: torch.device) -> list[PositionParts]:
    """Return the spaces of functions of position over the pairs that count, with the first token and without; the same
    ones for all layers and prompts, as long as somebody holds them."""
    found = []
    for first_token in (True, False):
        place = n, window, first_token, str(device)
        if (parts := SHARED.get(place)) is None:
            positions = torch.arange(n, device=device)
            parts = PositionParts(CausalPairs(n, window, first_token=first_token).mask(positions, positions))
            SHARED[place] = parts
        found.append(parts)
    return found


def require_same_length(lengths: Sequence[int]) -> None:
    """Refuse prompts that cannot be compared pair by pair."""
    if len(set(lengths)) > 1:
        raise InputError(
            f"across_prompts: prompts of {' and '.join(map(str, dict.fromkeys(lengths)))} tokens cannot be compared "
            "pair by pair; give length= to cut all alike"
        )
    if min(lengths) < 3:
        raise InputError(f"across_prompts: prompts of {min(lengths)} tokens; give 3 at least")
