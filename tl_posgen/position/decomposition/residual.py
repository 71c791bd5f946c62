"""The residual of the three-axis fit: its size, its shape, its distances, its planes and its token pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import double
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, TOKENS, Measure, TokenView, Variable, by_tokens
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Whole, Within
from tl_posgen.core.sums import First, Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.position.decomposition import residual_figures as figures_of
from tl_posgen.position.decomposition.layer_fits import fit_capture
from tl_posgen.position.decomposition.layer_residuals import (
    DIMS,
    OF,
    OVER_PARTS,
    SPECTRUM_CROP,
    examples_of,
    head_groups,
    largest,
    plane_shares,
    residual_sums,
    token_pairs,
)
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.residual_moments import ResidualSums
from tl_posgen.position.decomposition.numbers.token_pairs import KEEP, TokenPairTally
from tl_posgen.position.decomposition.residual_figures import OUT
from tl_posgen.rope.spectra import singular_values, spectrum_of_values

SHORTEST = 5  # tokens: with fewer, position + query + key fit any scores once the first token is left out
OVER_DISTANCE, OVER_RANK = ((*DIMS, dim) for dim in ("distance", "rank"))


@dataclass(frozen=True)
class Residual(Measure):
    r"""e_ij = W_ij - a_{i-j} - b_i - c_j: what the least-squares three-axis fit of every head leaves.

    The residual of the least-squares three-axis fit. Its rows sum to zero and no gauge enters, so softmax sees it all.
    How much it is, how few directions hold it, and at which distances, RoPE planes and token pairs it sits.

    Every row of e sums to zero, because b is free; so all of e is within what softmax sees. It depends on no gauge.
    Energies (sums of e^2) are added up over prompts, the spectrum is a mean over them; what is no more than float32
    rounds counts as nothing, and of nothing there are no shares. The planes' shares
    <W_m, e> / <e, e>, W_m the plane's part of the score, add up to 1 with `rest_share`, what does not rotate; they are
    there where q and k rotate and nothing caps the score. The kinds of token pair that explain most of e are exact
    while a head meets no more than 1024 kinds, see `TokenPairTally`.

    Args:
        n_pairs: kinds of token pair to name for each head, 1024 at most.
        components: singular values to keep, 512 at most.
        examples: heads to show token by token, those with the largest share on the first prompt; 0 for none.

    Raises:
        InputError: a prompt of fewer than 5 tokens.

    Source: ours; named as open by readers of Han & Ji 2025 (arXiv 2503.13305).

    Example:
        >>> data = Residual(examples=0)("mini", "Down, down, down.", null_seeds=()).own
        >>> bool(abs(data["plane_share"].sum("plane") + data["rest_share"] - 1).max() < 1e-3)
        True
    """

    n_pairs: Annotated[int, Within(1, KEEP, f"a whole number, 1 to {KEEP}")] = 10
    components: Annotated[int, Within(1, SPECTRUM_CROP, f"a whole number, 1 to {SPECTRUM_CROP}")] = 8
    examples: Whole = 2

    question = "What do position + query + key leave?"
    variables = {
        "share": Variable(
            *("share left", "", "sum e^2 over that of the scores within rows", DIMS, "residual_share"),
            interval=True,
            bounds=(0, 1),
        ),
        "std": Variable("residual", "logits", "root mean square of e", DIMS, "residual_std", interval=True),
        "top_share": Variable(
            "in one direction", "", "s_1^2 / sum s^2, s the singular values of e", DIMS, interval=True, bounds=(0, 1)
        ),
        "effective_rank": Variable(
            "effective rank", "", "(sum s^2)^2 / sum s^4, first 512 tokens", DIMS, interval=True
        ),
        "spectrum": Variable("spectrum", "", "s_r^2 / sum s^2", (*DIMS, "component")),
        "energy_share": Variable("share by distance", "", "of sum e^2", OVER_DISTANCE),
        "energy_ratio": Variable("energy ratio", "", "mean e^2 at the distance over that of all pairs", OVER_DISTANCE),
        "abs_residual": Variable("mean |e|", "logits", "at the distance", OVER_DISTANCE),
        "plane_share": Variable(
            *("share by plane", "", "<W_m, e> / <e, e>; of the scores within rows: <W_m, W> / <W, W>"),
            (*OVER_PARTS, "plane"),
        ),
        "rest_share": Variable("share of what is not rotated", "", "as of a plane", OVER_PARTS),
        "wavelength": Variable("wavelength of the plane", "tokens", "2 pi / theta_m", ("layer", "plane")),
        "pair_token": Variable(
            *("token of the kind of pair", "", "id; -1 where there are fewer kinds", (*OVER_RANK, "side")),
            holds="token ids",
        ),
        "pair_token_text": Variable("token of the kind of pair, in words", dims=(*OVER_RANK, "side")),
        "pair_share": Variable("explained by the kind of pair", "", "n mean(e)^2 / sum e^2", OVER_RANK),
        "pair_residual": Variable("mean residual of the kind of pair", "logits", "", OVER_RANK),
        "pair_count": Variable("pairs of the kind", "pairs", "", OVER_RANK),
        "example_map": Variable(
            *("residual, or scores, of an example", "logits", "within rows, first prompt, first token left out"),
            ("of", "example", "query", "key"),
        ),
        "example_layer": Variable("layer of an example", dims=("example",)),
        "example_head": Variable("head of an example", dims=("example",)),
        "example_share": Variable("share left of an example", "", "on the first prompt", ("example",)),
        "example_token": Variable("tokens of the first prompt", "", "ids", ("key",), holds="token ids"),
        "example_token_text": Variable("tokens of the first prompt, in words", dims=("key",)),
    }
    curves = ("spectrum", "energy_ratio")
    by_head = frozenset({"spectrum", "distances"})
    figures = figures_of.FIGURES
    token_view = TokenView(figures_of.labels, figures_of.show)
    caveats = {
        "absolute": "the residual holds what query and key position do together beyond their distance, as well as what "
        "query and key tokens do together; there are no planes to share it among.",
        "alibi": "the slope is fitted exactly and is not in the residual: that is content, or position that earlier "
        "layers wrote into the tokens. The variance that the share is of has the slope in it, at random init most of "
        "all: compare std, in logits. There are no planes.",
        "none": "the residual is content, or position that earlier layers wrote into the tokens. There are no planes.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"of": OF}

    def usual(self) -> Mapping[str, Any]:
        return {"of": "residual"}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return figures_of.kinds(data)

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Residual":
        require_length(min(map(len, tokens)))
        return self

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        require_length(layer.length)
        fit = layer.once(fit_capture)[0]
        values, tallies, examples = [], [], []
        for heads, part in head_groups(layer):
            both = residual_sums(part, fit.of_heads(heads))
            values.append(by_tokens(*map(self.sums_of, both)))
            tallies.append([sums.tokens.tally(sums.energy) for sums in both if sums.tokens])
            if layer.prompt == 0 and self.examples:
                examples.append(examples_of(part, both[1]))
            del both  # before those of the next heads take memory
        found: dict[str, Any] = {name: torch.cat([one[name] for one in values], 1) for name in values[0]}
        for tokens, parts in zip(TOKENS, zip(*tallies, strict=True), strict=False):  # none without token ids
            found[f"pairs, {tokens}"] = TokenPairTally.join_heads(parts)
        return found | ({"examples": First(largest(examples, self.examples))} if examples else {})

    def sums_of(self, sums: ResidualSums) -> dict[str, Tensor]:
        """Return [head, ...] of one prompt; no energy where any scores would be fitted, so nothing is known of e."""
        n_at = double(sums.n_distance).expand_as(sums.energy_at)
        values = singular_values(sums.corner)
        share = (values.square() / values.square().sum(-1, keepdim=True))[:, : self.components]
        found = {
            "energy": torch.full_like(sums.energy, torch.nan) if sums.pairs.saturated else sums.energy,
            **{"within": sums.within, "n": n_at.sum(-1)},
            **{"energy_at": sums.energy_at, "abs_at": sums.abs_at, "n_at": n_at},
            "spectrum": pad(share, (0, self.components - share.shape[1])),
            "effective_rank": spectrum_of_values(values).participation_ratio,
        }
        if sums.planes is not None:
            found["in_planes"] = torch.stack([sums.in_planes, sums.within_planes], 1)
        return found

    def finish(self, sums: Sums) -> xr.Dataset:
        energy, within, n = (sums.sum(name, DIMS) for name in ("energy", "within", "n"))
        within, known = within.where(within > 0), energy.where(energy > 0)
        spectrum = sums.mean("spectrum").where(known.notnull())
        spectrum = spectrum.assign_coords(component=spectrum["component"] + 1)
        energy_at, abs_at, n_at = (sums.sum(name, OVER_DISTANCE) for name in ("energy_at", "abs_at", "n_at"))
        n_at = n_at.where(n_at > 0)
        found = {
            **{"share": energy / within, "std": (energy / n) ** 0.5, "spectrum": spectrum},
            "effective_rank": sums.mean("effective_rank").where(known.notnull()),
            "top_share": spectrum.sel(component=1, drop=True),
            "energy_share": energy_at / known,
            "energy_ratio": energy_at / n_at / (known / n),
            "abs_residual": (abs_at / n_at).where(energy.notnull()),
        }
        if "in_planes" in sums:
            found |= plane_shares(sums, known, within)
        data = xr.Dataset(found).merge(token_pairs(sums, self.n_pairs))
        data = data.assign_attrs(not_defined=why_not_defined(sums, data, n))
        examples = [one.value for one in sums.by_layer("examples").values()]
        examples = [one for one in examples if one.sizes["example"]]
        return data.merge(largest(examples, self.examples).assign_coords(of=list(OF))) if examples else data

    def findings(self, own: Numbers) -> list[str]:
        most, least = (own.extreme("share", top, **OUT) for top in (True, False))
        found = [
            f"Position + query + key leave {own('share'):.0%} of the score variance within rows, without the first "
            f"token {own('share', **OUT):.0%}. Most: {most:.3f}; least: {least:.3f}.",
            f"One singular direction holds {own('top_share', **OUT):.0%} of what is left; its effective rank is "
            f"{own('effective_rank', **OUT):.1f}.",
        ]
        if own.attrs["not_defined"]:
            found.append(f"Not defined: {own.attrs['not_defined']}.")
        return found + plane_findings(own) + pair_findings(own.data)

    def table(self, own: Numbers) -> pd.DataFrame:
        return figures_of.table(own)


def require_length(n: int) -> None:
    """Refuse prompts so short that any scores are fitted."""
    if n < SHORTEST:
        raise InputError(f"residual: a prompt of {n} tokens leaves none; give {SHORTEST} tokens at least")


def why_not_defined(sums: Sums, data: xr.Dataset, n: xr.DataArray) -> str:
    """Return why there are no numbers of some heads, or of what is left of them; "" where there are all."""
    share, shape, asked = data["share"].sel(OUT), data["top_share"].sel(OUT), n.sel(OUT).notnull()
    lengths = set(sums.lengths.values())
    windows = {layer: geometry.window for layer, (geometry, _) in sums.layers.items()}
    fitted = [at for at, window in windows.items() if any(CausalPairs(m, window, False).saturated for m in lengths)]
    saturated, constant = share["layer"].isin(fitted), share.isnull() & asked
    why = {
        "a window of 1 or 2 tokens leaves no more pairs than the fit has parameters": saturated & constant,
        "scores are constant within rows": constant & ~saturated,
        "the fit leaves no more than float32 rounds": shape.isnull() & asked & ~constant,
    }
    return "; ".join(f"in {counted(int(heads.sum()), 'head')} {words}" for words, heads in why.items() if heads.any())


def plane_findings(own: Numbers) -> list[str]:
    """Return a sentence about the plane that holds most of the residual, if there are planes."""
    if "plane_share" not in own:
        return []
    left = own.data["plane_share"].sel(OUT | {"of": "residual"}).mean(HEAD)
    if left.isnull().all():
        return []
    plane = int(left.fillna(-np.inf).argmax("plane"))
    lengths = np.unique(own.data["wavelength"].sel(plane=plane).dropna("layer").values.round(1))
    scores = own("plane_share", of="scores", plane=plane, **OUT).plain
    return [
        f"Of the residual, {own('plane_share', plane=plane, **OUT):.0%} is in plane {plane} (wavelength "
        f"{', '.join(f'{length:g}' for length in lengths)} tokens), which holds {scores:.0%} of the scores within rows."
    ]


def pair_findings(data: xr.Dataset) -> list[str]:
    """Return a sentence about the strongest kind of token pair of the head with most residual, if there are any."""
    if not len(pairs := figures_of.strongest_pairs(data)):
        return []
    first = pairs.iloc[0]
    return [
        f"Kind of token pair that explains most in {head_name(first['layer'], first['head'])}: query "
        f"{first['query token']} on key {first['key token']}, {first['mean residual']:+.2f} logits over "
        f"{counted(int(first['pairs']), 'pair')}, {first['share']:.1%} of the head's residual."
    ]
