"""The planes behind a slash: what each adds to the logit, and the slash that rank one would give."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.sentences import at_most, said
from tl_posgen.rope.frequency_bands import bands_by_thirds, bands_by_wavelength
from tl_posgen.rope.rotation import Rope, complex_frequencies
from tl_posgen.slash.dominance import Dominance, check_any_reached, is_dominant
from tl_posgen.slash.head_groups import GROUPS, PER_HEAD, VariantCollector, count, group_means, group_table
from tl_posgen.slash.plane_contributions import match_profiles, plane_contributions, rank_one_profile
from tl_posgen.slash.slash_planes_figures import ALL_BANDS, FIGURES, SCHEMES, drawn
from tl_posgen.summary import NullSummary, Summary

NEAR = 8  # tokens: how far from the best distance the others of "edge" are
PLACES = {"best": "lift", "edge": "edge"}
PREDICTED = ("correlation", "chance_correlation", "same_peak", "chance_peak")


@dataclass(frozen=True)
class SlashPlanes(Dominance):
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)], and g(D) = sum_l A_l cos(theta_l D + phi_l).

    InnerProd(i, j, l) is the share of RoPE plane l in the logit scale <R_i q_i, R_j k_j>, so the sum of C_l(D) over
    planes is how far diagonal D stands above the mean logit. g is the logit that Q and K cut down to their top singular
    directions give; `predicted` is the slash score that g alone gives, and chance its match with the profiles of the
    other heads measured: of a choice (`heads=`, `layers=`) only those, and of one head none. C is taken at the
    distances given; as "best", at the prompt's own highest score; as "edge", that less its mean over the others up to 8
    tokens away, as a slow plane lifts all short distances alike and makes no line. Bands are thirds of the planes or go
    by wavelength (< 32, 32 .. N, > N tokens). Means over prompts.

    Args:
        kappa, distances: what makes a head slash-dominant, and where C is taken.

    Raises:
        InputError: kappa outside (0, 1], no distance, a negative one, or none that a prompt reaches.

    Source: that the slash is made by medium and high frequencies of nearly rank-one Q and K is claimed by Cheng et al.
    2026 (arXiv 2601.08297); C, edge, bands, the prediction's score and chance are ours. Soft caps and ALiBi are not in
    C and g.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", measures="slash_planes", null_seeds=())
        >>> report["slash_planes"].dataset["bands"].dims
        ('variant', 'layer', 'head', 'at', 'scheme', 'band')
    """


class SlashPlanesCollector(VariantCollector):
    options: SlashPlanes

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ropes: dict[int, tuple[Rope, int]] = {}
        self._longest = 0
        self._distances = sorted(set(self.options.distances))

    def measured(
        self, layer: LayerCapture, first: int, score: Float[Tensor, "head distance"]
    ) -> dict[str, Float[Tensor, "head *dims"]]:
        geometry, q, k = layer.geometry, layer.q[:, first:], layer.k[:, first:]
        self._ropes[layer.layer] = (geometry.rope, geometry.d_head)
        self._longest = max(self._longest, layer.q.shape[1])
        planes = plane_contributions(q, k, geometry.rope, geometry.scale, geometry.window)
        predicted = rank_one_profile(q, k, geometry.rope, geometry.scale, geometry.window).score
        return {"contribution": self._chosen(planes, score, geometry.window), "predicted": predicted}

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._ropes, both._longest = self._ropes | other._ropes, max(self._longest, other._longest)
        return both

    def dataset(self) -> xr.Dataset:
        data, layers = super().dataset(), sorted(self._ropes)
        planes = [planes_of(*self._ropes[layer], self._longest) for layer in layers]
        masks = xr.concat([mask for _, mask in planes], pd.Index(layers, name="layer"))
        bands = xr.dot(data["contribution"].fillna(0.0), masks, dim="plane")
        data["bands"] = bands.where(data["contribution"].notnull().any("plane"))
        data["wavelength"] = (("layer", "plane"), np.stack([wavelength for wavelength, _ in planes]))
        return data.assign_attrs(tokens=self._longest)

    def _chosen(
        self, planes: Float[Tensor, "head plane distance"], score: Float[Tensor, "head distance"], window: int | None
    ) -> Float[Tensor, "head at plane"]:
        """C at the distances (NaN where prompt or window is too short), at the highest score over D < N/2, and its
        edge over the distances that are seen (NaN where there is one alone)."""
        n = score.shape[-1]
        seen = min(n, window or n)
        fixed = planes.new_full((*planes.shape[:2], len(self._distances)), torch.nan)
        reached = [distance for distance in self._distances if distance < seen]
        fixed[..., : len(reached)] = planes[..., reached]
        best = score[:, : max(1, n // 2)].argmax(-1)
        away = (torch.arange(n, device=best.device) - best[:, None]).abs()
        others = (away > 0) & (away <= NEAR) & (torch.arange(n, device=best.device) < seen)
        own, near = (away == 0).to(planes), others.to(planes)
        at_best, beside = ((planes @ mask[..., None]) / mask.sum(-1)[:, None, None] for mask in (own, near))
        return torch.cat([fixed, at_best, at_best - beside], dim=-1).mT

    def of_variant(self, first: int, rows: HeadRows) -> xr.Dataset:
        profiles = {name: rows.array(name, "distance").mean("prompt") for name in ("score", "predicted", "uniform")}
        contribution = rows.array("contribution", "at", "plane").mean("prompt")
        contribution = contribution.assign_coords(at=[*(str(distance) for distance in self._distances), *PLACES])
        data = xr.Dataset(profiles | {"contribution": contribution})
        data["dominant"] = is_dominant(data["score"], self.options)
        return data.merge(compared(data))


def planes_of(rope: Rope, d_head: int, n: int) -> tuple[np.ndarray, xr.DataArray]:
    """2 pi / theta of each plane of a layer, infinite where nothing turns; and which plane is in which band.

    By scheme, bands by wavelength in a prompt of n tokens; the unrotated remainder is a band of its own.
    """
    wavelength = 2 * np.pi / complex_frequencies(rope, d_head).double().cpu()
    turning = len(rope.inv_freq)
    masks = torch.zeros(len(SCHEMES), len(ALL_BANDS), len(wavelength), dtype=torch.float64)
    masks[:, :-1, :turning] = torch.stack([bands_by_thirds(turning), bands_by_wavelength(rope, n).cpu()]).double()
    masks[:, -1, turning:] = 1
    coords = {"scheme": list(SCHEMES), "band": list(ALL_BANDS)}
    return wavelength.numpy(), xr.DataArray(masks.numpy(), coords, ("scheme", "band", "plane"))


def compared(data: xr.Dataset) -> xr.Dataset:
    """Each head's predicted profile beside its own measured one, and beside those of all other heads."""
    heads = data[["score", "predicted", "uniform"]].stack(place=("layer", "head")).dropna("place", how="all")
    score, predicted, uniform = (torch.from_numpy(heads[name].transpose("place", ...).values) for name in heads)
    found = {name: ("place", x.numpy()) for name, x in vars(match_profiles(score, predicted, uniform)).items()}
    return xr.Dataset(found, {"place": heads["place"]}).unstack("place").reindex_like(data[["layer", "head"]])


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    bands = {
        f"{at}_{scheme}_{band}": data["bands"].sel(at=at, scheme=scheme, band=band, drop=True)
        for at in PLACES
        for scheme in SCHEMES
        for band in ALL_BANDS
    }
    whole = data["contribution"].sum("plane", min_count=1)
    bands |= {f"{at}_total": whole.sel(at=at, drop=True) for at in PLACES}
    means = group_means(data.assign(bands), [*bands, *PREDICTED], VARIABLES)
    over_heads = abs(data["bands"].sel(at=list(PLACES)).mean(("layer", "head")))
    return {
        **means,
        **{name: float(data[name].sel(variant="all").mean()) for name in PREDICTED},
        "turns": bool(np.isfinite(data["wavelength"]).any()),
        "largest_lift": float(over_heads.max()),
    }


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    if not own["n_dominant"]:
        return ["No head is slash-dominant, so no band makes a slash.", *prediction(own, null)]
    above = {"best": "the mean logit", "edge": "the diagonals up to 8 tokens away"}
    lines = [f"The best diagonal of slash-dominant heads stands above {above[at]} by {lift(own, at)}." for at in PLACES]
    if null is not None:
        most = at_most(null, "largest_lift")
        lines[-1] += f" In the random init no band lifts it by more than {most} logits, mean over heads."
    return lines + prediction(own, null)


def lift(own: Summary, at: str) -> str:
    """'26.25 logits: by thirds of the planes high 8.48, medium 9.49, low 8.29; by wavelength ..'."""
    total, parts = own[f"{at}_total_dominant"], []
    if total != total:
        return "an amount that is not defined"
    for scheme, words in SCHEMES.items():
        of_band = {band: own[f"{at}_{scheme}_{band}_dominant"] for band in ALL_BANDS}
        # what a model rotates all, or nothing, of is not worth a word
        parts.append(f"{words} {', '.join(f'{band} {value:.2f}' for band, value in of_band.items() if value != 0)}")
    return f"{total:.2f} logits: {'; '.join(parts)}"


def prediction(own: Summary, null: Any) -> list[str]:
    if not own["turns"]:
        return ["No plane of this model turns, so queries and keys of rank one would make no slash."]
    lines = [
        f"In {count(own[f'n_{group}'], words)} the slash scores predicted from rank one, less those of uniform "
        f"attention, correlate with the measured ones at {said(own[f'correlation_{group}'], '.3f')} (with the other "
        f"heads measured: {said(own[f'chance_correlation_{group}'], '.3f')}); the peak is right in "
        f"{own[f'same_peak_{group}']:.0%} (of another head, in {said(own[f'chance_peak_{group}'], '.0%')})."
        for group, words in GROUPS.items()
        if own[f"n_{group}"]
    ]
    if null is not None:
        r, chance = (said(null[name], ".3f") for name in ("correlation", "chance_correlation"))
        lines[-1] += f" Random init: {r} and {chance}."
    return lines


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row for each place, scheme, choice of tokens and group of heads: lift by band, in logits."""
    own = summarise(data)
    parts = [
        group_table(own, {f"{at}_{scheme}_{band}": band for band in ALL_BANDS}).assign(
            measure=measure, **{"bands by": scheme}
        )
        for at, measure in PLACES.items()
        for scheme in SCHEMES
    ]
    return pd.DataFrame(pd.concat(parts, ignore_index=True)[["measure", "bands by", "tokens", "heads", *ALL_BANDS]])


BY_DISTANCE = (*PER_HEAD, "distance")
VARIABLES = {
    "score": Variable("slash score", description="measured", dims=BY_DISTANCE),
    "predicted": Variable("slash score predicted from rank one", description="what g(D) alone gives", dims=BY_DISTANCE),
    "uniform": Variable("slash score of uniform attention", dims=BY_DISTANCE),
    "contribution": Variable("lift by plane", "logits", "C_l", dims=(*PER_HEAD, "at", "plane")),
    "bands": Variable("lift by band", "logits", "C_l summed over a band", dims=(*PER_HEAD, "at", "scheme", "band")),
    "wavelength": Variable(
        "wavelength", "tokens", "2 pi / theta; infinite where nothing turns", dims=("layer", "plane")
    ),
    "dominant": Variable("slash-dominant", description="score >= kappa at one of the distances", dims=PER_HEAD),
    "best_score": Variable(
        "highest slash score", description="over D < N/2", dims=PER_HEAD, interval=True, bounds=(0.0, 1.0)
    ),
    "best_distance": Variable("its distance", "tokens", dims=PER_HEAD),
    "predicted_peak": Variable("distance of the predicted peak", "tokens", dims=PER_HEAD),
    "score_at_peak": Variable(
        "measured score at the predicted peak",
        description="over the highest measured score",
        dims=PER_HEAD,
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "correlation": Variable(
        "correlation with its own profile",
        description="predicted with measured, less uniform attention",
        dims=PER_HEAD,
        interval=True,
        bounds=(-1.0, 1.0),
    ),
    "chance_correlation": Variable(
        "correlation with other heads' profiles", description="mean over the other heads measured", dims=PER_HEAD
    ),
    "same_peak": Variable("its own peak is right", description="1 or 0", dims=PER_HEAD),
    "chance_peak": Variable("other heads' peaks that agree", description="share of the others measured", dims=PER_HEAD),
}

MEASURE = Measure(
    name="slash_planes",
    question="Which frequencies make the slash, and is rank one enough?",
    explanation=(
        "How far each RoPE plane lifts the logits of the head's best diagonal: above the mean logit (lift), and above "
        "the diagonals up to 8 tokens away (edge). Summed into bands by thirds of the planes and by wavelength (high < "
        "32 tokens, low > the prompt). Beside it the slash profile that rank-one queries and keys would have, against "
        "the measured one; chance is the profile of another head."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); all measures here: ours",
    options=SlashPlanes,
    collector=SlashPlanesCollector,
    needs=frozenset({"pattern"}),
    check_prompts=check_any_reached,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    drawn=drawn,
    table=table,
    legend=(
        "lift: best diagonal less the mean logit; edge: less the diagonals up to 8 tokens away; both in logits, by the "
        "band of RoPE's planes that it comes from."
    ),
    caveats={
        "absolute": "no plane turns, so every plane counts as unrotated, and queries and keys of rank one would make "
        "no slash; what C adds up is content and position vectors together.",
        "alibi": "no plane turns, and the slopes, which make near slashes by themselves, are neither in the lift nor "
        "in the prediction.",
        "none": "no plane turns, so every plane counts as unrotated; the lift is all content.",
    },
)
