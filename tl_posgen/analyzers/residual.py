"""Analyzer of what the three-axis fit leaves: how much, of what shape, at which distances, planes and token pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.analyzers.three_axis import fit_capture
from tl_posgen.errors import InputError
from tl_posgen.maths.across_prompts import row_centred
from tl_posgen.maths.bilinear_sums import sums_along_diagonals
from tl_posgen.maths.residual import residual_sums
from tl_posgen.maths.spectra import singular_values, spectrum_of_values
from tl_posgen.maths.token_pairs import TokenPairTally
from tl_posgen.models.capture import LayerCapture

CROP = 128  # tokens of an example
SPECTRUM_CROP = 512  # tokens whose residual the spectrum is of; the time grows with their cube
SHORTEST = 5  # tokens: with fewer, position + query + key fit any scores once the first token is left out
ROUNDING = 1e-13  # energy below this share of the scores' mean square is what float32 leaves of an exact fit
ENTRIES = 2**24  # scores held at once: heads are taken in groups
VARIANTS = ("", "_no_first")
TOKEN_IDS = {"holds": "token ids"}  # `analyzers.feed` puts the tokens' text beside such a variable


@dataclass(frozen=True)
class Example:
    """One head on the first prompt: maps [query, key] by name, and the residual's share."""

    layer: int
    head: int
    share: float
    maps: dict[str, np.ndarray]
    tokens: np.ndarray


class Residual:
    r"""e_ij = W_ij - a_{i-j} - b_i - c_j: what the least-squares three-axis fit of every head leaves.

    Every row of e sums to zero, because b is free; so all of e is within what softmax sees. It depends on no gauge.
    Energies are summed over prompts, the spectrum is a mean over them. `*_no_first`: the fit without the first token.

    - per head: `share` of the scores' variance within rows, `std` in logits, `top_share` of the strongest singular
      direction, `effective_rank` = (sum s^2)^2 / sum s^4; s of the first 512 tokens, hidden pairs at zero;
    - over `component`: `spectrum`, s_r^2 / sum s^2;
    - over `distance`: `distance_share` of the energy, `distance_ratio` (a pair's energy there over that of the average
      pair) and `distance_abs`, mean |e|;
    - over `plane`, where q and k rotate and nothing caps the score: `plane_share` = <W_m, e> / <e, e> with W_m the
      plane's part of the score, beside `score_plane_share`, its share of the scores within rows. With the unrotated
      `rest_share` and `score_rest_share` each adds up to 1. `wavelength` in tokens;
    - over `rank`: the kinds of token pair `query_token`, `key_token` that explain most, `pair_mean` of e over
      `pair_count` pairs, and `pair_share` = n mean^2 / sum e^2; exact while a head meets no more than 1024 kinds, see
      `maths.token_pairs`;
    - over `example`, the heads with the largest share on the first prompt, first token left out: `example_residual` and
      `example_scores` (within rows) of the first 128 tokens.

    Args:
        n_pairs: kinds of token pair to name for each head.
        components: singular values to keep.
        examples: heads to show token by token; 0 for none.

    Raises:
        InputError: a prompt of fewer than 5 tokens, or an argument out of range.

    Source: "what is in the residual" is named as open by readers of Han & Ji 2025 (arXiv 2503.13305); measures ours.

    Example:
        >>> import tl_posgen
        >>> from tl_posgen.analyzers.residual import Residual
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=[Residual()], null_seed=None)
        >>> data = report["residual"].dataset
        >>> bool((data["plane_share"].sum("plane") + data["rest_share"] - 1).max() < 1e-3)
        True
    """

    name: str = "residual"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, n_pairs: int = 10, components: int = 8, examples: int = 2):
        if min(n_pairs, components) < 1 or examples < 0:
            raise InputError(f"n_pairs={n_pairs}, components={components}, examples={examples}: give 1, 1, 0 at least")
        self.n_pairs, self.components, self.n_examples = n_pairs, components, examples
        self._rows = HeadRows()
        self._tallies: dict[tuple[int, str], TokenPairTally] = {}  # (layer, variant)
        self._wavelengths: dict[int, np.ndarray] = {}  # of the layers whose scores are sums over planes
        self._examples: list[Example] = []

    def update(self, capture: LayerCapture) -> None:
        n = capture.q.shape[1]
        if n < SHORTEST:
            raise InputError(f"a prompt of {n} tokens leaves no residual; give {SHORTEST} tokens at least")
        groups = [self._measure(part) for part in head_groups(capture)]
        sums, tallies = zip(*groups, strict=True)
        self._rows.add(capture, **{name: torch.cat([group[name] for group in sums]) for name in sums[0]})
        for suffix in tallies[0]:
            key, tally = (capture.layer, suffix), TokenPairTally.of_heads([group[suffix] for group in tallies])
            self._tallies[key] = self._tallies[key] + tally if key in self._tallies else tally

    def _measure(self, part: LayerCapture) -> tuple[dict[str, Tensor], dict[str, TokenPairTally]]:
        """The sums of some heads on one prompt by name, and their token pairs by variant."""
        found, tallies = {}, {}
        for suffix, fit in zip(VARIANTS, fit_capture(part), strict=True):
            assert fit is not None
            visible = fit.band.visible(part.positions, part.positions)
            scores = part.scores().double().masked_fill(~visible, 0)
            left = (scores - fit.fitted(part.positions, part.positions)).masked_fill_(~visible, 0)
            within = row_centred(scores, visible)
            measures = sums_of(left, within, scores, visible) | self._shape(left)
            measures |= self._planes(part, left, within, visible)
            found |= {f"{name}{suffix}": value for name, value in measures.items()}
            if part.tokens is not None:
                tallies[suffix] = TokenPairTally.of(left, visible, part.tokens.to(left.device))
            if suffix and part.prompt == 0:
                self._keep_examples(part, left, within)
        return found, tallies

    def _shape(self, left: Tensor) -> dict[str, Tensor]:
        values = singular_values(left[:, :SPECTRUM_CROP, :SPECTRUM_CROP])
        share = (values.square() / values.square().sum(-1, keepdim=True))[:, : self.components]
        rank = spectrum_of_values(values).participation_ratio
        return {"spectrum": pad(share, (0, self.components - share.shape[1])), "effective_rank": rank}

    def _planes(self, part: LayerCapture, left: Tensor, within: Tensor, visible: Tensor) -> dict[str, Tensor]:
        geometry = part.geometry
        planes = len(geometry.rope.inv_freq)
        if not (geometry.bilinear and planes):
            return {}
        self._wavelengths[part.layer] = (2 * torch.pi / geometry.rope.inv_freq).cpu().numpy()
        found = {}
        for name, x in (("plane", left), ("score_plane", within)):
            sums = residual_sums(x, visible, part.rotated_q, part.rotated_k, geometry.rope, geometry.scale).planes
            found |= {f"{name}_sum": sums[:, :planes], f"{name}_rest_sum": sums[:, planes:].sum(-1)}
        return found

    def _keep_examples(self, part: LayerCapture, left: Tensor, within: Tensor) -> None:
        share = left.square().sum((1, 2)) / within.square().sum((1, 2))
        tokens = part.positions if part.tokens is None else part.tokens
        for index, head in enumerate(part.heads):
            maps = {
                name: x[index, :CROP, :CROP].float().cpu().numpy()
                for name, x in (("residual", left), ("scores", within))
            }
            self._examples.append(Example(part.layer, head, float(share[index]), maps, tokens[:CROP].cpu().numpy()))
        self._examples.sort(key=lambda example: -example.share)
        del self._examples[self.n_examples :]

    def result(self) -> xr.Dataset:
        data: dict[str, Any] = {}
        for suffix in VARIANTS:
            measures = self._heads(suffix) | self._token_pairs(suffix)
            data |= {f"{name}{suffix}": value for name, value in measures.items()}
        dataset = xr.Dataset(data | self._example_maps())
        if self._wavelengths:
            layers = sorted(self._wavelengths)
            rows = padded([self._wavelengths[layer] for layer in layers], np.nan)
            dataset["wavelength"] = xr.DataArray(rows, {"layer": layers}, ("layer", "plane"))
        return dataset.assign_attrs(fit="least squares, gauge-free", examples="first prompt, first token left out")

    def _heads(self, suffix: str) -> dict[str, xr.DataArray]:
        def total(name: str, *dims: str) -> xr.DataArray:
            return self._rows.array(f"{name}{suffix}", *dims).sum("prompt", min_count=1)

        energy, pairs, squares = total("energy"), total("pairs"), total("squares")
        within = total("within")
        within = within.where(within > ROUNDING * squares)
        known = energy.where(energy > ROUNDING * squares)
        found = {"share": energy / within, "std": (energy / pairs) ** 0.5}
        shape = self._rows.array(f"spectrum{suffix}", "component").mean("prompt").where(known.notnull())
        shape = shape.assign_coords(component=np.arange(1, self.components + 1))
        rank = self._rows.array(f"effective_rank{suffix}").mean("prompt").where(known.notnull())
        found |= {"spectrum": shape, "top_share": shape.isel(component=0, drop=True), "effective_rank": rank}
        energy_at, pairs_at = total("energy_at", "distance"), total("pairs_at", "distance")
        pairs_at = pairs_at.where(pairs_at > 0)
        found["distance_share"] = energy_at / known
        found["distance_ratio"] = energy_at / pairs_at / (known / pairs)
        found["distance_abs"] = total("abs_at", "distance") / pairs_at
        if self._wavelengths:
            for name, whole in (("plane", known), ("score_plane", within)):
                found[f"{name}_share"] = total(f"{name}_sum", "plane") / whole
                found[f"{name.replace('plane', 'rest')}_share"] = total(f"{name}_rest_sum") / whole
        return found

    def _token_pairs(self, suffix: str) -> dict[str, xr.DataArray]:
        tallies = {layer: tally for (layer, kind), tally in self._tallies.items() if kind == suffix}
        if not tallies:
            return {}
        coords = {"layer": list(tallies), "head": self._rows.array("energy")["head"].values}

        def stack(name: str, fill: int | float) -> xr.DataArray:
            rows = [getattr(tally, name)[:, : self.n_pairs].cpu().numpy() for tally in tallies.values()]
            return xr.DataArray(padded(rows, fill), coords, ("layer", "head", "rank"))

        ids = {name: stack(name, -1).assign_attrs(TOKEN_IDS) for name in ("query_token", "key_token")}
        return ids | {f"pair_{name}": stack(name, np.nan) for name in ("share", "mean", "count")}

    def _example_maps(self) -> dict[str, tuple]:
        if not self._examples:
            return {}
        maps = {
            f"example_{name}": (("example", "query", "key"), np.stack([e.maps[name] for e in self._examples]))
            for name in ("residual", "scores")
        }
        maps |= {
            f"example_{name}": ("example", [getattr(e, name) for e in self._examples])
            for name in ("layer", "head", "share")
        }
        return maps | {"example_token": ("key", self._examples[0].tokens, TOKEN_IDS)}


def head_groups(capture: LayerCapture) -> Iterator[LayerCapture]:
    """The same capture, some heads at a time, so that their score matrices fit in memory."""
    heads = list(capture.heads)
    step = max(1, ENTRIES // capture.q.shape[1] ** 2)
    for start in range(0, len(heads), step):
        part = slice(start, start + step)
        yield LayerCapture(
            capture.geometry, heads[part], capture.prompt, capture.tokens, capture.q[part], capture.k[part]
        )


def sums_of(left: Tensor, within: Tensor, scores: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Sums over pairs, of each head and of each of its distances; hidden pairs are zero in all three matrices."""
    pairs_at = sums_along_diagonals(visible[None].double()).expand(len(left), -1)
    return {
        "energy": left.square().sum((1, 2)),
        "within": within.square().sum((1, 2)),
        "squares": scores.square().sum((1, 2)),
        "pairs": pairs_at.sum(-1),
        "energy_at": sums_along_diagonals(left.square()),
        "abs_at": sums_along_diagonals(left.abs()),
        "pairs_at": pairs_at,
    }


def padded(rows: Sequence[np.ndarray], fill: int | float) -> np.ndarray:
    """Rows of one length, stacked; shorter ones are filled up along their last axis."""
    width = max(row.shape[-1] for row in rows)
    return np.stack(
        [np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, width - row.shape[-1])], constant_values=fill) for row in rows]
    )
