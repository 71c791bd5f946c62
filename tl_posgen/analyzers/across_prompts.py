"""Analyzer of what is the same in every prompt: how much of each head's scores is position, whatever the encoding."""

from dataclasses import dataclass, fields

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.maths.across_prompts import PositionParts, PositionShares, position_shares, row_centred
from tl_posgen.models.capture import LayerCapture, scores_from

CROP = 256
MAP_CROP = 128


@dataclass
class LayerSums:
    """Sums over prompts for one layer: its scores over visible pairs, and their `PositionParts.energy`."""

    scores: Float[Tensor, "head pair"]
    energy: Float[Tensor, "variant head part=5"]


class AcrossPrompts:
    r"""W^p_ij = P_ij + M^p_ij: P the same in every prompt (position), M^p what changes with the text (content).

    Scores are centred within rows, which is what softmax sees. Per head, as shares of their mean square: `position`,
    and of it what is a function of i - j alone (`by_distance`), of j alone (`by_key`), and a(i - j) + c(j) together
    (`by_either`); position - by_either takes query and key position both. A straight line in j is, within a row, one
    in i - j (`by_line`), so by_distance and by_key overlap. `distance_of_position`, `key_of_position` and
    `either_of_position` are shares of position, NaN where it is less than `chance`: what chance leaves in a mean over
    so few prompts, |M|^2 / n. That part is subtracted, so shares are unbiased, and small ones may fall below 0.
    `*_no_first`: the first token left out. Over `example`, the heads with the largest `position_no_first`:
    `example_position`, the mean over prompts, first 128 tokens.

    Position is all that prompts share: also what texts of this kind do at these places on average. Prompts should be
    cut from different places, and count as independent.

    Args:
        crop: the first so many tokens of every prompt; memory holds crop^2 / 2 numbers for every head of the model.
        examples: heads whose mean is kept as a map.

    Raises:
        InputError: fewer than 2 prompts, prompts of different lengths (after the crop), fewer than 3 tokens.

    Source: ours. It needs scores alone, so it means the same for RoPE, ALiBi, learned positions, and none.

    Example:
        >>> import tl_posgen
        >>> from tl_posgen.analyzers.across_prompts import AcrossPrompts
        >>> texts = ["The cat sat on the mat.", "A dog ran down the road."]
        >>> model = tl_posgen.load_model("mini")
        >>> report = tl_posgen.analyze(model, texts, analyzers=[AcrossPrompts(crop=6)], null_seed=None)
        >>> report["across_prompts"].dataset.attrs["prompts"]
        2
    """

    name: str = "across_prompts"
    needs: frozenset[str] = frozenset()
    min_prompts: int = 2

    def __init__(self, *, crop: int = CROP, examples: int = 3):
        if crop < 3 or examples < 0:
            raise InputError(f"crop={crop}, examples={examples}: 3 tokens at least, and no negative number")
        self.crop, self.n_examples = crop, examples
        self._layers: dict[int, LayerSums] = {}
        self._masks: dict[int, Bool[Tensor, "variant query key"]] = {}
        self._parts: dict[bytes, PositionParts] = {}
        self._prompts: set[int] = set()
        self._heads: list[int] = []

    def update(self, capture: LayerCapture) -> None:
        n = min(self.crop, capture.q.shape[1])
        self._heads = list(capture.heads)
        self._prompts.add(capture.prompt)
        scores = scores_from(capture.rotated_q[:, :n], capture.rotated_k[:, :n], capture.geometry, capture.heads)
        masks = self._masks.setdefault(capture.layer, self._masks_of(capture, n))
        if masks.shape[-1] != n:
            raise InputError(
                f"across_prompts: prompts of {n} and {masks.shape[-1]} tokens cannot be compared pair by pair; give "
                "length= to cut all alike"
            )
        energy = self._energy(scores, masks)
        seen = scores[:, masks[0]].double()
        if capture.layer in self._layers:
            sums = self._layers[capture.layer]
            seen, energy = seen + sums.scores, energy + sums.energy
        self._layers[capture.layer] = LayerSums(seen, energy)

    def result(self) -> xr.Dataset:
        if len(self._prompts) < self.min_prompts:
            raise InputError("across_prompts compares prompts and was given one; give n_prompts=2 or more")
        found = {layer: self._shares(layer) for layer in sorted(self._layers)}
        data = {}
        for variant, suffix in enumerate(("", "_no_first")):
            for field in fields(PositionShares):
                by_layer = [getattr(shares[variant], field.name).cpu() for shares in found.values()]
                data[f"{field.name}{suffix}"] = (("layer", "head"), torch.stack(by_layer).numpy())
        dataset = xr.Dataset(data, {"layer": list(found), "head": self._heads})
        for suffix in ("", "_no_first"):
            position = dataset[f"position{suffix}"]
            surely = position.where(position > dataset[f"chance{suffix}"])
            for name in ("distance", "key", "either"):
                dataset[f"{name}_of_position{suffix}"] = dataset[f"by_{name}{suffix}"] / surely
        dataset = dataset.assign(self._example_maps(dataset["position_no_first"]))
        return dataset.assign_attrs(prompts=len(self._prompts), crop=self.crop)

    def _masks_of(self, capture: LayerCapture, n: int) -> Bool[Tensor, "variant query key"]:
        every = capture.geometry.visible(n, capture.q.device)
        later = torch.arange(n, device=every.device) > 0
        return torch.stack([every, every & later & later[:, None]])

    def _energy(self, scores: Tensor, masks: Tensor) -> Float[Tensor, "variant head part=5"]:
        return torch.stack([self._parts_of(mask).energy(row_centred(scores, mask)) for mask in masks])

    def _parts_of(self, mask: Tensor) -> PositionParts:
        """Made once for every mask: layers of one window share it."""
        key = np.packbits(mask.cpu().numpy()).tobytes()
        if key not in self._parts:
            self._parts[key] = PositionParts(mask)
        return self._parts[key]

    def _mean_scores(self, layer: int) -> Float[Tensor, "head query key"]:
        sums, visible = self._layers[layer].scores, self._masks[layer][0]
        mean = sums.new_zeros(len(sums), *visible.shape)
        mean[:, visible] = sums / len(self._prompts)
        return mean

    def _shares(self, layer: int) -> list[PositionShares]:
        masks, n = self._masks[layer], len(self._prompts)
        prompts, mean = self._layers[layer].energy / n, self._energy(self._mean_scores(layer), masks)
        return [position_shares(prompts[i], mean[i], n, int(mask.sum())) for i, mask in enumerate(masks)]

    def _example_maps(self, position: xr.DataArray) -> dict[str, tuple]:
        ranked = position.to_series().dropna().sort_values(ascending=False).index[: self.n_examples].to_list()
        if not ranked:
            return {}
        maps = []
        for layer, head in ranked:
            mean = self._mean_scores(layer)[[self._heads.index(head)]]
            maps.append(row_centred(mean, self._masks[layer][1])[0, :MAP_CROP, :MAP_CROP].float().cpu().numpy())
        layers, heads = zip(*ranked, strict=True)
        found: dict[str, tuple] = {"example_layer": ("example", list(layers)), "example_head": ("example", list(heads))}
        return found | {"example_position": (("example", "query", "key"), np.stack(maps))}
