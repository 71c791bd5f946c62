"""The residual of the three-axis fit: its size, its shape, its distances, its planes and its token pairs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import double, row_ranges
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, TOKENS, Measure, TokenView, Variable, by_tokens
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Whole, Within
from tl_posgen.core.sums import First, Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.position.decomposition import residual_figures as figures_of
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_rows, query_ranges
from tl_posgen.position.decomposition.numbers.residual_moments import (
    KEEP,
    PlaneParts,
    ResidualSums,
    TokenPairTally,
    less_fit,
)
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit, fit_three_axis
from tl_posgen.position.decomposition.residual_figures import OUT
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.report.circuits import CROP
from tl_posgen.rope.spectra import singular_values, spectrum_of_values

ROUNDING = 1e-13  # share of sum |scale q_i|^2 |k_j|^2 below which a sum of squares is float32 rounding
SPECTRUM_CROP = 512  # tokens whose residual the spectrum is of; the time grows with their cube
DIMS = ("tokens", *HEAD)
OF = ("residual", "scores")
OVER_PARTS = (*DIMS, "of")
ENTRIES = 2**21  # token pairs held at once: heads are taken in groups
SHORTEST = 5  # tokens: with fewer, position + query + key fit any scores once the first token is left out
OVER_DISTANCE, OVER_RANK = ((*DIMS, dim) for dim in ("distance", "rank"))


def _is_rounding(
    squares: Float[Tensor, " head"], capture: LayerCapture, pairs: CausalPairs, score_squares: Float[Tensor, " head"]
) -> Bool[Tensor, " head"]:
    """sum x^2 <= 1e-13 sum |scale q_i|^2 |k_j|^2 over the pairs: `squares` of a part x of the scores are rounding.

    A score is a sum that may cancel, so its rounding error scales with the lengths of its query and key. It scales with
    the score itself (`score_squares`) where hooks edit the scores, or where the score is larger (ALiBi).
    """
    size = score_squares
    if not isinstance(capture, EditedCapture):
        q, k = (double(x[:, : pairs.n_tokens]).square().sum(-1) for x in (capture.q, capture.k))
        none = torch.zeros_like(k[:, pairs.first_key :])
        of_keys = torch.stack([none, none, k[:, pairs.first_key :]])
        seen = pairs.normal(of_keys, pairs.counts(k.device))[1].flip(-1)  # by query, over the keys that it sees
        size = size.maximum(capture.geometry.scale**2 * (q[:, pairs.first_query :] * seen).sum(-1))
    return squares <= ROUNDING * size


def residual_sums(part: LayerCapture, fit: ThreeAxisFit) -> list[ResidualSums]:
    """Return the sums of what the fits of these heads' scores leave, with the first token and without; of rounding, 0.

    What the first fit leaves is fitted once more, to the scores themselves: sums over q and k round in float32, and e
    must be at right angles to every fit.
    """
    first = {name: getattr(fit, name).nan_to_num() for name in "abc"}
    geometry, n = part.geometry, part.length
    rows = lambda start, stop: less_fit(part.score_rows(start, stop), **first)  # noqa: E731
    moments = pair_moments_from_rows(rows, n, window=geometry.window)
    rotates = part.bilinear and len(geometry.rope.inv_freq) > 0
    planes = PlaneParts(part.rotated_q, part.rotated_k, geometry.rope, geometry.scale) if rotates else None
    fits = [fit_three_axis(one) for one in (moments, moments.without_first_token or moments)]
    found = [ResidualSums(fit, planes, part.tokens, crop=SPECTRUM_CROP, crop_within=CROP) for fit in fits]
    for start, stop in query_ranges(len(part.heads), n, moments.sums.device):
        scores, rest = part.score_rows(start, stop), rows(start, stop)
        for sums in found:
            sums.add(scores, rest)
    for sums in found:
        sums.drop(*(_is_rounding(x, part, sums.pairs, sums.squares) for x in (sums.energy, sums.within)))
    return found


def _head_groups(layer: LayerCapture) -> Iterator[tuple[slice, LayerCapture]]:
    """Yield the capture some heads at a time, so that their sums by token pair fit in memory."""
    parts = (slice(*heads) for heads in row_ranges(len(layer.heads), layer.length**2, ENTRIES))
    return ((heads, layer.of_heads(heads)) for heads in parts)


def _examples_of(part: LayerCapture, sums: ResidualSums) -> xr.Dataset:
    """Return the residual of these heads token by token, beside their scores, where the fit leaves any."""
    tokens = (part.positions if part.tokens is None else part.tokens)[:CROP]
    maps = torch.stack([sums.corner[:, :CROP, :CROP], sums.within_corner])
    arrays = {
        "example_map": (("of", "example", "query", "key"), maps.float()),
        "example_layer": ("example", torch.full((len(part.heads),), part.layer)),
        "example_head": ("example", torch.tensor(part.heads)),
        "example_share": ("example", sums.energy / sums.within),
        "example_token": ("key", tokens),
    }
    heads = xr.Dataset({name: (dims, array.cpu().numpy()) for name, (dims, array) in arrays.items()})
    return heads.isel(example=heads["example_share"].values > 0)


def _largest(examples: Sequence[xr.Dataset], n: int) -> xr.Dataset:
    """Return the n examples with most residual, the first of equals first."""
    whole = xr.concat(examples, "example", data_vars="minimal")
    most = np.argsort(-whole["example_share"].values, kind="stable")[:n]
    return whole.isel(example=most).assign_coords(example=np.arange(len(most)))


def _plane_shares(sums: Sums, left: xr.DataArray, scores: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the planes' shares of e and of the scores within rows, whose sums of squares are `left` and `scores`, what
    does not rotate, and the wavelengths, of layers whose scores are sums over planes."""
    whole = xr.concat([left.expand_dims(of=[OF[0]]), scores.expand_dims(of=[OF[1]])], "of")
    rotating = {layer: sums.layers[layer][0].rope.inv_freq for layer in sums.by_layer("in_planes")}
    energy = sums.sum("in_planes", (*OVER_PARTS, "plane"))  # of a layer's planes, then of what does not rotate
    n_planes = xr.DataArray([len(one) for one in rotating.values()], {"layer": list(rotating)}, ("layer",))
    is_plane, lengths = energy["plane"] < n_planes, {at: 2 * torch.pi / one for at, one in rotating.items()}
    return {
        "plane_share": energy.where(is_plane).isel(plane=slice(int(n_planes.max()))) / whole,
        "rest_share": energy.where(~is_plane | energy.isnull(), 0).sum("plane", min_count=1) / whole,
        "wavelength": sums.over_layers("wavelength", {at: one.cpu().numpy() for at, one in lengths.items()}),
    }


def _token_pairs(sums: Sums, n_pairs: int) -> xr.Dataset:
    """Return the kinds of token pair that explain most, by rank; none where token ids are not known."""

    def columns(tally: TokenPairTally) -> dict[str, Tensor]:  # [head, rank] of a layer
        tokens = double(torch.stack([tally.query_token, tally.key_token], -1))
        found = {"pair_share": tally.share, "pair_residual": tally.mean, "pair_count": tally.count}
        return {name: column[:, :n_pairs] for name, column in (found | {"pair_token": tokens}).items()}

    tallies = [sums.by_layer(f"pairs, {tokens}") for tokens in TOKENS]
    if not tallies[0]:
        return xr.Dataset()
    found = sums.variables_of({at: by_tokens(*(columns(one[at]) for one in tallies)) for at in tallies[0]})
    found = found.assign_coords(rank=found["rank"] + 1)
    return found.assign(pair_token=found["pair_token"].fillna(-1).astype(np.int64))


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
        _require_length(min(map(len, tokens)))
        return self

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        _require_length(layer.length)
        fit = layer.once(fit_capture)[0]
        values, tallies, examples = [], [], []
        for heads, part in _head_groups(layer):
            both = residual_sums(part, fit.of_heads(heads))
            values.append(by_tokens(*map(self.sums_of, both)))
            tallies.append([sums.tokens.tally(sums.energy) for sums in both if sums.tokens])
            if layer.prompt == 0 and self.examples:
                examples.append(_examples_of(part, both[1]))
            del both  # before those of the next heads take memory
        found: dict[str, Any] = {name: torch.cat([one[name] for one in values], 1) for name in values[0]}
        for tokens, parts in zip(TOKENS, zip(*tallies, strict=True), strict=False):  # none without token ids
            found[f"pairs, {tokens}"] = TokenPairTally.join_heads(parts)
        return found | ({"examples": First(_largest(examples, self.examples))} if examples else {})

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
            found |= _plane_shares(sums, known, within)
        data = xr.Dataset(found).merge(_token_pairs(sums, self.n_pairs))
        data = data.assign_attrs(not_defined=_why_not_defined(sums, data, n))
        examples = [one.value for one in sums.by_layer("examples").values()]
        examples = [one for one in examples if one.sizes["example"]]
        return data.merge(_largest(examples, self.examples).assign_coords(of=list(OF))) if examples else data

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
        return found

    def table(self, own: Numbers) -> pd.DataFrame:
        return figures_of.table(own)


def _require_length(n: int) -> None:
    """Refuse prompts so short that any scores are fitted."""
    if n < SHORTEST:
        raise InputError(f"residual: a prompt of {n} tokens leaves none; give {SHORTEST} tokens at least")


def _why_not_defined(sums: Sums, data: xr.Dataset, n: xr.DataArray) -> str:
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
