"""Token-level examples: a head's true attention beside the attention of its additive fit."""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from tl_posgen.analyzers.three_axis import fit_capture
from tl_posgen.models.capture import LayerCapture, scores_from

CROP = 128
Pick = tuple[int, int, str]


def pick_heads(three_axis: xr.Dataset, n: int) -> list[Pick]:
    """(layer, head, why) of the n heads that follow position + query + key most within rows, and of the n least."""
    ranked = three_axis["r_visible"].to_series().dropna().sort_values(ascending=False)
    units = [(int(layer), int(head)) for layer, head in ranked.index.to_list()]
    n = max(1, min(n, len(units) // 2))
    best = [(*unit, "closest to position + key") for unit in units[:n]]
    return best + [(*unit, "furthest from position + key") for unit in units[-n:] if unit not in units[:n]]


class AttentionExamples:
    r"""softmax(W) beside softmax(a_{i-j} + b_i + c_j) for chosen heads: first prompt, first 128 tokens.

    The fit is made over the whole prompt, then cropped. b_i never changes a pattern.

    Args:
        picks: (layer, head, why it was picked).
        tokens: the prompt's tokens as they are to be shown.
    """

    name: str = "attention_examples"
    needs: frozenset[str] = frozenset()

    def __init__(self, picks: Sequence[Pick], tokens: Sequence[str]):
        self.picks, self.tokens = list(picks), list(tokens)[:CROP]
        self._maps: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._r_visible: dict[tuple[int, int], float] = {}

    def update(self, capture: LayerCapture) -> None:
        heads = list(capture.heads)
        chosen = [heads.index(head) for layer, head, _ in self.picks if layer == capture.layer]
        if capture.prompt or not chosen:
            return
        fit, _ = fit_capture(capture)
        crop = torch.arange(min(CROP, capture.q.shape[1]), device=capture.q.device)
        n = len(crop)
        scores = scores_from(capture.rotated_q[:, :n], capture.rotated_k[:, :n], capture.geometry, heads)
        additive = fit.fitted(crop, crop).nan_to_num(-torch.inf)
        for index in chosen:
            true, split = scores[index].double().softmax(-1), additive[index].softmax(-1)
            maps = {"pattern": true, "additive_pattern": split, "residual": true - split}
            self._maps[capture.layer, heads[index]] = {name: x.float().cpu().numpy() for name, x in maps.items()}
            self._r_visible[capture.layer, heads[index]] = float(fit.r_visible[index])

    def result(self) -> xr.Dataset:
        maps = [self._maps[layer, head] for layer, head, _ in self.picks]
        n = len(maps[0]["pattern"])
        names = ("pattern", "additive_pattern", "residual")
        data: dict[str, tuple] = {
            name: (("example", "query", "key"), np.stack([m[name] for m in maps])) for name in names
        }
        data["r_visible"] = ("example", [self._r_visible[layer, head] for layer, head, _ in self.picks])
        layers, heads, reasons = zip(*self.picks, strict=True)
        coords = {
            "layer": ("example", list(layers)),
            "head": ("example", list(heads)),
            "why": ("example", list(reasons)),
        }
        coords |= {"token": ("key", self.tokens[:n]), "example": np.arange(len(maps))}
        return xr.Dataset(data, coords, attrs={"rows": ["example"]})
