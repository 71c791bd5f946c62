"""Analyzer of the planes behind a slash: what each adds to the logit, and the slash that rank one would give."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.analyzers.slash import check_dominance
from tl_posgen.maths.bands import (
    BANDS,
    bands_by_thirds,
    bands_by_wavelength,
    match_profiles,
    plane_contributions,
    rank_one_profile,
)
from tl_posgen.maths.rope import Rope, complex_frequencies
from tl_posgen.maths.slash import SHORT_DISTANCES, SHORT_KAPPA, slash_statistics
from tl_posgen.models.capture import LayerCapture

VARIANTS = {"all": 0, "without_first": 1}  # name -> tokens left out at the start
NEAR = 8  # tokens: how far from the best distance the others of "edge" are
SCHEMES = ("thirds", "wavelength")


class SlashPlanes:
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)], and g(D) = sum_l A_l cos(theta_l D + phi_l).

    InnerProd(i, j, l) is the share of RoPE plane l in the logit scale <R_i q_i, R_j k_j>, so the sum of C_l(D) over
    planes is how far diagonal D stands above the mean logit. g is the logit that Q and K cut down to their top singular
    directions give; `predicted` is the slash score that g alone gives.

    Over (variant, layer, head), variant being "all" tokens or "without_first": over distance `score`, `predicted` and
    `baseline` (uniform attention). Over (at, plane) `contribution` C_l, in logits: at the distances given; as "best",
    at the prompt's own highest score; as "edge", that less its mean over the other distances up to 8 tokens away, as a
    slow plane lifts all short distances alike and makes no line. Over (at, scheme, band) `bands`, its sums: high,
    medium and low by thirds of the planes or by wavelength (< 32, 32 .. N, > N tokens), and what is not rotated.
    Per head: `best_score` at `best_distance` (over D < N/2), `dominant` (score >= kappa at one of the distances), and
    of the prediction beside the measured score, over the same D: `predicted_peak`, `score_at_peak` (measured score
    there over the highest) and `correlation`, both less the scores of uniform attention; by chance, i.e. against the
    measured profiles of all other heads, `chance_correlation` and `chance_peak` (how many of them peak there), beside
    `same_peak` (whether its own does). Over (layer, plane) `wavelength`, in tokens. Means over prompts.

    Args:
        kappa, distances: what makes a head slash-dominant, and where C is taken.

    Raises:
        InputError: kappa outside (0, 1], no distance, or a negative one.

    Source: that the slash is made by medium and high frequencies of nearly rank-one Q and K is claimed by Cheng et al.
    2026 (arXiv 2601.08297); C, edge, bands, the prediction's score and chance are ours. Soft caps and ALiBi are not in
    C and g.

    Example:
        >>> import tl_posgen
        >>> analyzer = SlashPlanes()
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=[analyzer], null_seed=None)
        >>> report["slash_planes"].dataset["bands"].dims
        ('variant', 'layer', 'head', 'at', 'scheme', 'band')
    """

    name: str = "slash_planes"
    needs: frozenset[str] = frozenset({"pattern"})

    def __init__(self, *, kappa: float = SHORT_KAPPA, distances: Sequence[int] = SHORT_DISTANCES):
        check_dominance(kappa, distances)
        self.kappa, self.distances = kappa, sorted(set(distances))
        self._rows = {variant: HeadRows() for variant in VARIANTS}
        self._ropes: dict[int, tuple[Rope, int]] = {}
        self._longest = 0

    def update(self, capture: LayerCapture) -> None:
        assert capture.pattern is not None
        geometry = capture.geometry
        self._ropes[capture.layer] = (geometry.rope, geometry.d_head)
        self._longest = max(self._longest, capture.q.shape[1])
        measured = slash_statistics(capture.pattern, window=geometry.window, entropy=False)
        scores = (measured.score, measured.score_without_first)
        baselines = (measured.baseline, measured.baseline_without_first)
        for (variant, first), score, baseline in zip(VARIANTS.items(), scores, baselines, strict=True):
            q, k = capture.q[:, first:], capture.k[:, first:]
            profile = rank_one_profile(q, k, geometry.rope, geometry.scale)
            planes = plane_contributions(q, k, geometry.rope, geometry.scale, geometry.window)
            self._rows[variant].add(
                capture, score=score, predicted=profile.score, contribution=self._chosen(planes, score)
            )
            self._rows[variant].add(capture, baseline=baseline.expand(len(q), -1))

    def result(self) -> xr.Dataset:
        parts = [self._variant(rows) for rows in self._rows.values()]
        # one token less: no value at the last distance
        joined = xr.concat(parts, xr.DataArray(list(VARIANTS), dims="variant", name="variant"), join="outer")
        data = joined.assign(wavelength=(("layer", "plane"), self._wavelengths(joined.sizes["plane"])))
        bands = xr.dot(data["contribution"].fillna(0.0), self._masks(data), dim="plane")
        data["bands"] = bands.where(data["contribution"].notnull().any("plane"))
        return data.assign_attrs(kappa=self.kappa, tokens=self._longest, rows=["variant", "layer", "head"])

    def _chosen(
        self, planes: Float[Tensor, "head plane distance"], score: Float[Tensor, "head distance"]
    ) -> Float[Tensor, "head at plane"]:
        """C at the distances (NaN where the prompt is too short), at the highest score over D < N/2, and its edge."""
        n = score.shape[-1]
        fixed = planes.new_full((*planes.shape[:2], len(self.distances)), torch.nan)
        reached = [distance for distance in self.distances if distance < n]
        fixed[..., : len(reached)] = planes[..., reached]
        best = score[:, : max(1, n // 2)].argmax(-1)
        away = (torch.arange(n, device=best.device) - best[:, None]).abs()
        own, near = ((away == 0).to(planes), ((away > 0) & (away <= NEAR)).to(planes))
        at_best, beside = ((planes @ mask[..., None]) / mask.sum(-1)[:, None, None] for mask in (own, near))
        return torch.cat([fixed, at_best, at_best - beside], dim=-1).mT

    def _variant(self, rows: HeadRows) -> xr.Dataset:
        profiles = {name: rows.array(name, "distance").mean("prompt") for name in ("score", "predicted", "baseline")}
        contribution = rows.array("contribution", "at", "plane").mean("prompt")
        contribution = contribution.assign_coords(at=[*(str(distance) for distance in self.distances), "best", "edge"])
        data = xr.Dataset(profiles | {"contribution": contribution})
        near = data["score"].sel(distance=[d for d in self.distances if d < data.sizes["distance"]])
        data["dominant"] = (near >= self.kappa).any("distance")
        return data.assign(compared(data["score"], data["predicted"], data["baseline"]))

    def _wavelengths(self, n_planes: int) -> np.ndarray:
        """2 pi / theta by layer and plane; infinite where nothing turns."""
        table = np.full((len(self._ropes), n_planes), np.inf)
        for row, layer in zip(table, sorted(self._ropes), strict=True):
            theta = complex_frequencies(*self._ropes[layer]).cpu().numpy()
            row[: len(theta)] = np.divide(2 * np.pi, theta, out=np.full(len(theta), np.inf), where=theta > 0)
        return table

    def _masks(self, data: xr.Dataset) -> xr.DataArray:
        """Which plane is in which band, by layer and scheme; the unrotated remainder is a band of its own."""
        masks = np.zeros((len(self._ropes), len(SCHEMES), len(BANDS) + 1, data.sizes["plane"]))
        for mask, layer in zip(masks, sorted(self._ropes), strict=True):
            rope, _ = self._ropes[layer]
            turning = len(rope.inv_freq)
            bands = (bands_by_thirds(turning), bands_by_wavelength(rope, self._longest))
            mask[:, :-1, :turning] = torch.stack([band.cpu() for band in bands]).numpy()
            mask[:, -1, turning:] = 1
        coords = {"layer": data["layer"], "scheme": list(SCHEMES), "band": [*BANDS, "unrotated"]}
        return xr.DataArray(masks, coords, ("layer", "scheme", "band", "plane"))


def compared(
    score: xr.DataArray, predicted: xr.DataArray, baseline: xr.DataArray
) -> Mapping[str, tuple[tuple[str, str], np.ndarray]]:
    """Each head's predicted profile beside its own measured one, and beside those of all other heads."""
    shape = score.shape[:2]
    measured, guess, uniform = (torch.from_numpy(x.values).flatten(0, 1) for x in (score, predicted, baseline))
    reach = max(1, measured.shape[-1] // 2)
    match = match_profiles(guess, measured, reach)
    # less uniform attention, whose own decay would correlate any two heads that attend nowhere in particular
    excess, truth = (standardised((x - uniform)[:, :reach]) for x in (guess, measured))
    between = excess @ truth.mT
    same = (match.predicted_peak[:, None] == match.measured_peak).double()
    others = 1 - torch.eye(len(same), dtype=torch.float64)
    found = {
        "best_distance": match.measured_peak,
        "best_score": measured[:, :reach].amax(-1),
        "predicted_peak": match.predicted_peak,
        "score_at_peak": match.score_at_peak,
        "correlation": between.diagonal(),
        "same_peak": same.diagonal(),
        "chance_correlation": between.where(others > 0, torch.nan).nanmean(-1),
        "chance_peak": (same * others).sum(-1) / others.sum(-1),
    }
    return {name: (("layer", "head"), value.reshape(shape).numpy()) for name, value in found.items()}


def standardised(x: Float[Tensor, "head distance"]) -> Float[Tensor, "head distance"]:
    """Rows without their mean and of length one, so that products of rows are Pearson's correlations."""
    return torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
