"""What the three-axis fit leaves: how much, of what shape, at which distances, in which planes and token pairs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.collector import Collector, Variable, added
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, TokenView
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.decomposition.pair_moments import pair_moments_from_rows, query_ranges
from tl_posgen.position.decomposition.residual_figures import FIGURES, drawn, labels, show, strongest_pairs, table
from tl_posgen.position.decomposition.residual_moments import PlaneParts, ResidualSums, less_fit
from tl_posgen.position.decomposition.rounding import is_rounding
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.decomposition.three_axis_fit import ThreeAxisFit, fit_three_axis
from tl_posgen.position.decomposition.token_pairs import KEEP, TokenPairTally
from tl_posgen.position.first_token import VARIANTS, without_first_token
from tl_posgen.report.circuits import CROP
from tl_posgen.report.sentences import at_head, beside, extremes, means, said
from tl_posgen.rope.spectra import singular_values, spectrum_of_values
from tl_posgen.summary import Summary

SPECTRUM_CROP = 512  # tokens whose residual the spectrum is of; the time grows with their cube
SHORTEST = 5  # tokens: with fewer, position + query + key fit any scores once the first token is left out
ENTRIES = 2**21  # token pairs held at once: heads are taken in groups
TOKEN_IDS = {"holds": "token ids"}  # `analysis.with_token_texts` puts the tokens' texts beside such a variable
EXAMPLE_MAP = ("example", "query", "key")


@dataclass(frozen=True)
class Residual(Options):
    r"""e_ij = W_ij - a_{i-j} - b_i - c_j: what the least-squares three-axis fit of every head leaves.

    Every row of e sums to zero, because b is free; so all of e is within what softmax sees. It depends on no gauge.
    Energies (sums of e^2) are added up over prompts, the spectrum is a mean over them; what is no more than float32
    rounds counts as nothing, and of nothing there are no shares. The planes' shares
    <W_m, e> / <e, e>, W_m the plane's part of the score, add up to 1 with `rest_share`, what does not rotate; they are
    there where q and k rotate and nothing caps the score. Kinds of token pair are those that explain most of e: exact
    while a head meets no more than 1024 kinds, see `TokenPairTally`.

    Args:
        n_pairs: kinds of token pair to name for each head, 1024 at most.
        components: singular values to keep, 512 at most.
        examples: heads to show token by token, those with the largest share on the first prompt; 0 for none.

    Raises:
        InputError: a prompt of fewer than 5 tokens, or an option out of range.

    Source: "what is in the residual" is named as open by readers of Han & Ji 2025 (arXiv 2503.13305); measures ours.

    Example:
        >>> from tl_posgen.position.decomposition import residual
        >>> data = residual("mini", "Down, down, down.", examples=0, null_seeds=()).dataset
        >>> bool((data["plane_share"].sum("plane") + data["rest_share"] - 1).max() < 1e-3)
        True
    """

    n_pairs: int = 10
    components: int = 8
    examples: int = 2

    def check(self) -> None:
        check_whole("residual", 1, KEEP, n_pairs=self.n_pairs)
        check_whole("residual", 1, SPECTRUM_CROP, components=self.components)
        check_whole("residual", 0, examples=self.examples)


class ResidualCollector(Collector):
    options: Residual

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tallies: dict[tuple[int, str], TokenPairTally] = {}  # (layer, variant)
        self._heads: dict[int, list[int]] = {}
        self._wavelengths: dict[int, np.ndarray] = {}  # of the layers whose scores are sums over planes
        self._saturated: set[int] = set()  # layers whose window leaves as many parameters as pairs
        self._examples: xr.Dataset | None = None  # the heads that leave most of the first prompt

    def update(self, layer: LayerCapture) -> None:
        check_length(layer.length)
        self._heads[layer.layer] = list(layer.heads)
        fit = layer.once(fit_capture)[0]
        groups = [self._measure(part, fit.of_heads(of)) for of, part in head_groups(layer)]
        sums, tallies = zip(*groups, strict=True)
        self.add(layer, **{name: torch.cat([group[name] for group in sums]) for name in sums[0]})
        for suffix in tallies[0]:
            key, tally = (layer.layer, suffix), TokenPairTally.join_heads([group[suffix] for group in tallies])
            self._tallies[key] = self._tallies[key] + tally if key in self._tallies else tally

    def _measure(self, part: LayerCapture, fit: ThreeAxisFit) -> tuple[dict[str, Tensor], dict[str, TokenPairTally]]:
        """The sums of some heads on one prompt by name, and their token pairs by variant."""
        found, tallies = {}, {}
        for suffix, sums in zip(VARIANTS, residual_sums(part, fit), strict=True):
            values = self._values(part, sums)
            found |= {f"{name}{suffix}": value for name, value in values.items()}
            tallies |= {} if sums.tokens is None else {suffix: sums.tokens.tally(sums.energy)}
            if suffix and part.prompt == 0 and self.options.examples:
                self._keep_examples(part, sums)
        return found, tallies

    def _values(self, part: LayerCapture, sums: ResidualSums) -> dict[str, Tensor]:
        n_at = sums.n_distance.double().expand_as(sums.energy_at)
        found = {"energy": sums.energy, "within": sums.within, "pairs": n_at.sum(-1)}
        found |= {"energy_at": sums.energy_at, "abs_at": sums.abs_at, "pairs_at": n_at}
        if sums.pairs.saturated:  # any scores would be fitted: nothing is known of what they leave
            self._saturated.add(part.layer)
            found["energy"] = torch.full_like(sums.energy, torch.nan)
        if sums.planes is not None:
            rope = part.geometry.rope
            self._wavelengths[part.layer] = (2 * torch.pi / rope.inv_freq).cpu().numpy()
            for name, products in (("plane", sums.in_planes), ("score_plane", sums.within_planes)):
                planes, rest = products.tensor_split([len(rope.inv_freq)], -1)
                found |= {f"{name}_sum": planes, f"{name}_rest_sum": rest.sum(-1)}
        return found | self._shape(sums.corner)

    def _shape(self, left: Tensor) -> dict[str, Tensor]:
        values = singular_values(left)
        n = self.options.components
        share = (values.square() / values.square().sum(-1, keepdim=True))[:, :n]
        rank = spectrum_of_values(values).participation_ratio
        return {"spectrum": pad(share, (0, n - share.shape[1])), "effective_rank": rank}

    def _keep_examples(self, part: LayerCapture, sums: ResidualSums) -> None:
        tokens = (part.positions if part.tokens is None else part.tokens)[:CROP].cpu().numpy()
        maps = {"residual": sums.corner, "scores": sums.within_corner}
        numbers = {"layer": torch.full((len(part.heads),), part.layer), "head": torch.tensor(part.heads)}
        numbers |= {"share": sums.energy / sums.within}
        heads = xr.Dataset(
            {f"example_{name}": (EXAMPLE_MAP, x[:, :CROP, :CROP].float().cpu().numpy()) for name, x in maps.items()}
            | {f"example_{name}": ("example", x.cpu().numpy()) for name, x in numbers.items()}
            | {"example_token": ("key", tokens, TOKEN_IDS)}
        )
        heads = heads.isel(example=heads["example_share"].values > 0)
        both = xr.concat([one for one in (self._examples, heads) if one is not None], "example", data_vars="minimal")
        most = np.argsort(-both["example_share"].values, kind="stable")[: self.options.examples]
        self._examples = both.isel(example=most) if len(most) else None

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._tallies = added(self._tallies, other._tallies)
        both._heads, both._wavelengths = self._heads | other._heads, self._wavelengths | other._wavelengths
        both._saturated = self._saturated | other._saturated
        both._examples = other._examples if self._examples is None else self._examples
        return both

    def dataset(self) -> xr.Dataset:
        data: dict[str, Any] = {}
        for suffix in VARIANTS:
            values = self._shares(suffix) | self._token_pairs(suffix)
            data |= {f"{name}{suffix}": value for name, value in values.items()}
        dataset = xr.Dataset(data)
        if self._wavelengths:
            lengths = pd.DataFrame({layer: pd.Series(one) for layer, one in sorted(self._wavelengths.items())}).T
            dataset["wavelength"] = xr.DataArray(lengths.values, {"layer": lengths.index}, ("layer", "plane"))
        dataset = dataset.assign_attrs(not_defined=self._why_not_defined(dataset))
        return dataset if self._examples is None else dataset.merge(self._examples)

    def _why_not_defined(self, data: xr.Dataset) -> str:
        """Why there are no numbers of some heads, or of what is left of them; "" where there are all."""
        share, shape = data["share_without_first_token"], data["top_share_without_first_token"]
        asked = self.rows.array("pairs").notnull().any("prompt")
        saturated, constant = share["layer"].isin(list(self._saturated)), share.isnull() & asked
        why = {
            "a window of 1 or 2 tokens leaves no more pairs than the fit has parameters": saturated & constant,
            "scores are constant within rows": constant & ~saturated,
            "the fit leaves no more than float32 rounds": shape.isnull() & asked & ~constant,
        }
        found = [f"in {int(heads.sum())} heads {words}" for words, heads in why.items() if heads.any()]
        return "; ".join(found)

    def _shares(self, suffix: str) -> dict[str, xr.DataArray]:
        def total(name: str, *dims: str) -> xr.DataArray:
            return self.rows.array(f"{name}{suffix}", *dims).sum("prompt", min_count=1)

        energy, pairs, within = (total(name) for name in ("energy", "pairs", "within"))
        within, known = within.where(within > 0), energy.where(energy > 0)
        shape = self.rows.array(f"spectrum{suffix}", "component").mean("prompt").where(known.notnull())
        shape = shape.assign_coords(component=shape["component"] + 1)
        rank = self.rows.array(f"effective_rank{suffix}").mean("prompt").where(known.notnull())
        energy_at, abs_at, pairs_at = (total(f"{name}_at", "distance") for name in ("energy", "abs", "pairs"))
        pairs_at = pairs_at.where(pairs_at > 0)
        found = {
            **{"share": energy / within, "std": (energy / pairs) ** 0.5, "spectrum": shape, "effective_rank": rank},
            "top_share": shape.isel(component=0, drop=True),
            "distance_share": energy_at / known,
            "distance_ratio": energy_at / pairs_at / (known / pairs),
            "distance_abs": (abs_at / pairs_at).where(energy.notnull()),
        }
        if self._wavelengths:
            for name, whole in (("plane", known), ("score_plane", within)):
                found[f"{name}_share"] = total(f"{name}_sum", "plane") / whole
                found[f"{name.replace('plane', 'rest')}_share"] = total(f"{name}_rest_sum") / whole
        return found

    def _token_pairs(self, suffix: str) -> dict[str, xr.DataArray]:
        tallies = {layer: tally for (layer, kind), tally in sorted(self._tallies.items()) if kind == suffix}
        if not tallies:
            return {}
        names = {"query_token": "query_token", "key_token": "key_token"}
        names |= {f"pair_{name}": name for name in ("share", "mean", "count")}

        def of_layer(layer: int, tally: TokenPairTally) -> xr.Dataset:
            columns = {column: getattr(tally, name)[:, : self.options.n_pairs] for column, name in names.items()}
            data = {column: (("head", "rank"), x.cpu().numpy()) for column, x in columns.items()}
            n = len(data["pair_mean"][1].T)
            return xr.Dataset(data, {"layer": layer, "head": self._heads[layer], "rank": range(n)})

        no_id = dict.fromkeys(("query_token", "key_token"), -1)
        whole = xr.concat([of_layer(*one) for one in tallies.items()], "layer", join="outer", fill_value=no_id)
        whole = whole.drop_vars("rank")
        return {name: x.assign_attrs(TOKEN_IDS if name in no_id else {}) for name, x in whole.data_vars.items()}


def residual_sums(part: LayerCapture, fit: ThreeAxisFit) -> list[ResidualSums]:
    """What the fits of these heads' scores leave, with the first token and without; of rounding, nothing.

    What a first fit, over all tokens, leaves is fitted once more, to the scores themselves: sums over q and k round in
    float32, and e must be at right angles to every fit.
    """
    first = {name: getattr(fit, name).nan_to_num() for name in "abc"}
    geometry, n = part.geometry, part.length
    rows = lambda start, stop: less_fit(part.score_rows(start, stop), **first)  # noqa: E731
    moments = pair_moments_from_rows(rows, n, window=geometry.window)
    rotates = part.bilinear and len(geometry.rope.inv_freq) > 0
    planes = PlaneParts.from_qk(part.rotated_q, part.rotated_k, geometry.rope, geometry.scale) if rotates else None
    fits = [fit_three_axis(one) for one in (moments, moments.without_first_token or moments)]
    found = [ResidualSums(fit, planes, part.tokens, crop=SPECTRUM_CROP, crop_within=CROP) for fit in fits]
    for start, stop in query_ranges(len(part.heads), n):
        scores, rest = part.score_rows(start, stop), rows(start, stop)
        for sums in found:
            sums.add(scores, rest)
    for sums in found:
        sums.drop(*(is_rounding(x, part, sums.pairs, sums.squares) for x in (sums.energy, sums.within)))
    return found


def check_length(n: int) -> None:
    if n < SHORTEST:
        raise InputError(f"residual: a prompt of {n} tokens leaves none; give {SHORTEST} tokens at least")


def head_groups(layer: LayerCapture) -> Iterator[tuple[slice, LayerCapture]]:
    """The same capture, some heads at a time, so that their sums by token pair fit in memory."""
    step = max(1, ENTRIES // layer.length**2)
    parts = (slice(start, start + step) for start in range(0, len(layer.heads), step))
    return ((of, layer.of_heads(of)) for of in parts)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    shown = ("share", "std", "top_share", "effective_rank")
    found = means(data, *(f"{name}{suffix}" for name in shown for suffix in VARIANTS))
    found |= extremes(data, "share_without_first_token") | {"not_defined": data.attrs.get("not_defined", "")}
    if "plane_share_without_first_token" in data:
        found |= plane_numbers(data)
    if len(pairs := strongest_pairs(data)):
        first = pairs.iloc[0]
        found |= {"pair_head": f"{first['layer']}.{first['head']}", "pair_count": int(first["pairs"])}
        found |= {"pair_query": first["query token"], "pair_key": first["key token"]}
        found |= {"pair_mean": float(first["mean residual"]), "pair_share": float(first["share"])}
    return found


def plane_numbers(data: xr.Dataset) -> dict[str, Any]:
    """The plane that holds most of the residual, its share of the scores, and every plane's share of the residual."""
    names = ("plane_share_without_first_token", "score_plane_share_without_first_token")
    left, scores = (data[name].mean(("layer", "head")) for name in names)
    shares = {f"plane_{plane}": float(share) for plane, share in enumerate(left.values)}
    if left.isnull().all():
        return shares
    top = int(left.fillna(-np.inf).argmax("plane"))
    lengths = np.unique(data["wavelength"].isel(plane=top).dropna("layer").values.round(1))
    found = {"top_plane": top, "top_plane_wavelengths": lengths.tolist(), "top_plane_of_scores": float(scores[top])}
    return found | shares


def findings(own: Summary, null: Any) -> list[str]:
    def share(name: str, form: str = ".0%") -> str:
        return beside(own, null, f"{name}_without_first_token", form)

    most, least = (
        at_head(own[f"share_without_first_token_{end}_head"], own[f"share_without_first_token_{end}"])
        for end in ("highest", "lowest")
    )
    found = [
        f"Position + query + key leave {beside(own, null, 'share', '.0%')} of the score variance within rows, without "
        f"the first token {share('share')}. Most: {most}; least: {least}.",
        f"One singular direction holds {share('top_share')} of what is left; its effective rank is "
        f"{share('effective_rank', '.1f')}.",
    ]
    if own["not_defined"]:
        found.append(f"Not defined: {own['not_defined']}.")
    if "top_plane" in own:
        plane = own["top_plane"]
        lengths = ", ".join(f"{length:g}" for length in own["top_plane_wavelengths"])
        found.append(
            f"Of the residual, {beside(own, null, f'plane_{plane}', '.0%')} is in plane {plane} (wavelength {lengths} "
            f"tokens), which holds {said(own['top_plane_of_scores'], '.0%')} of the scores within rows."
        )
    if "pair_head" in own:
        layer, head = own["pair_head"].split(".")
        found.append(
            f"Kind of token pair that explains most in layer {layer} head {head}: query {own['pair_query']} on key "
            f"{own['pair_key']}, {said(own['pair_mean'], '+.2f')} logits over {own['pair_count']} pairs, "
            f"{own['pair_share']:.1%} of the head's residual."
        )
    return found


HEAD = ("layer", "head")
OVER_DISTANCE, OVER_PLANE, OVER_RANK = ((*HEAD, dim) for dim in ("distance", "plane", "rank"))
IN_LOGITS = "within rows, first prompt, first token left out"
OF_FIT = {
    "share": Variable(
        "share left",
        "",
        "sum e^2 over that of the scores within rows",
        headline="residual_share",
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "std": Variable("residual", "logits", "root mean square of e", headline="residual_std", interval=True),
    "top_share": Variable(
        "in one direction", description="s_1^2 / sum s^2, s the singular values of e", interval=True, bounds=(0.0, 1.0)
    ),
    "effective_rank": Variable("effective rank", description="(sum s^2)^2 / sum s^4, first 512 tokens", interval=True),
    "spectrum": Variable("spectrum", description="s_r^2 / sum s^2", dims=(*HEAD, "component")),
    "distance_share": Variable("share by distance", description="of sum e^2", dims=OVER_DISTANCE),
    "distance_ratio": Variable("energy ratio", "", "mean e^2 at the distance over that of all pairs", OVER_DISTANCE),
    "distance_abs": Variable("mean |e|", "logits", "at the distance", dims=OVER_DISTANCE),
    "plane_share": Variable("of the residual", description="<W_m, e> / <e, e>", dims=OVER_PLANE),
    "rest_share": Variable("of the residual, not rotated", description="<W_rest, e> / <e, e>"),
    "score_plane_share": Variable("of the scores within rows", description="<W_m, W> / <W, W>", dims=OVER_PLANE),
    "score_rest_share": Variable("of the scores within rows, not rotated", description="<W_rest, W> / <W, W>"),
    "query_token": Variable("query token", description="id; -1 where there are fewer kinds", dims=OVER_RANK),
    "key_token": Variable("key token", description="id; -1 where there are fewer kinds", dims=OVER_RANK),
    "pair_share": Variable("explained by the kind of pair", description="n mean(e)^2 / sum e^2", dims=OVER_RANK),
    "pair_mean": Variable("mean residual of the kind of pair", "logits", dims=OVER_RANK),
    "pair_count": Variable("pairs of the kind", "pairs", dims=OVER_RANK),
    "query_token_text": Variable("query token, in words", dims=OVER_RANK),
    "key_token_text": Variable("key token, in words", dims=OVER_RANK),
}
VARIABLES = {
    **OF_FIT,
    **without_first_token(OF_FIT),
    "wavelength": Variable("wavelength of the plane", "tokens", "2 pi / theta_m", dims=("layer", "plane")),
    "example_residual": Variable("left over", "logits", f"e, {IN_LOGITS}", dims=EXAMPLE_MAP),
    "example_scores": Variable("scores", "logits", IN_LOGITS, dims=EXAMPLE_MAP),
    "example_layer": Variable("layer of an example", dims=("example",)),
    "example_head": Variable("head of an example", dims=("example",)),
    "example_share": Variable("share left of an example", description="on the first prompt", dims=("example",)),
    "example_token": Variable("token ids of the first prompt", dims=("key",)),
    "example_token_text": Variable("tokens of the first prompt", dims=("key",)),
}

MEASURE = Measure(
    name="residual",
    question="What do position + query + key leave?",
    explanation=(
        "The residual of the least-squares three-axis fit. Its rows sum to zero and no gauge enters, so softmax sees "
        "it all. How much it is, how few directions hold it, and at which distances, RoPE planes and token pairs it "
        "sits."
    ),
    source="ours; named as open by readers of Han & Ji 2025 (arXiv 2503.13305)",
    options=Residual,
    collector=ResidualCollector,
    check_prompts=lambda options, tokens: check_length(min(map(len, tokens))),
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=("spectrum_without_first_token", "distance_ratio_without_first_token"),
    by_head=frozenset({"spectrum", "distances"}),
    figures=FIGURES,
    drawn=drawn,
    table=table,
    tokens=TokenView(labels, show),
    caveats={
        "absolute": "the residual holds what query and key position do together beyond their distance, as well as what "
        "query and key tokens do together; there are no planes to share it among.",
        "alibi": "the slope is fitted exactly and is not in the residual: that is content, or position that earlier "
        "layers wrote into the tokens. The variance that the share is of has the slope in it, at random init most of "
        "all: compare std, in logits. There are no planes.",
        "none": "the residual is content, or position that earlier layers wrote into the tokens. There are no planes.",
    },
)
