"""The planes behind a slash: what each adds to the logit, and the slash that rank one would give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from tl_posgen.arithmetic import double
from tl_posgen.core.formatting import format_bound
from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.kinds import bars, lines
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import complex_frequencies
from tl_posgen.slash.dominance import (
    AT_BEST,
    GROUPS,
    PER_HEAD,
    Dominance,
    at_best,
    group_mean,
    group_table,
    mean_over_group,
    n_heads,
    spectra_of,
    starts_of,
    statistics_of,
)
from tl_posgen.slash.numbers.plane_contributions import (
    match_profiles,
    plane_contributions,
    rank_one_logit,
    score_of_profile,
)

_ALL_BANDS = (*BANDS, "unrotated")
_BY_DISTANCE = (*PER_HEAD, "distance")


def _lift(numbers: Numbers, name: str, group: str) -> xr.DataArray:
    """Return the mean over a group of heads of the lift, by plane or by band; bands without a plane are left out."""
    lift = mean_over_group(numbers, numbers.array(name), group)
    is_there = (lift.fillna(0) != 0).any([dim for dim in lift.dims if dim != "band"])
    return lift.isel(band=is_there) if "band" in lift.dims else lift


@dataclass(frozen=True)
class SlashPlanes(Dominance):
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)], and g(D) = sum_l A_l cos(theta_l D + phi_l).

    How far does each RoPE plane lift the logits of the head's best diagonal above the mean logit? The planes are summed
    into bands, thirds of them. The slash profile that rank-one queries and keys would have is compared with the
    measured one; chance is the profile of another head.

    InnerProd(i, j, l) is the share of RoPE plane l in the logit scale <R_i q_i, R_j k_j>, so the sum of C_l(D) over
    planes is how far diagonal D stands above the mean logit. g is the logit that Q and K cut down to their top singular
    directions give; `predicted` is the slash score that g alone gives, and chance its match with the profiles of the
    other heads measured: of a choice (`heads=`, `layers=`) only those, and of one head none. C is taken at the
    distances given; as "best", at the prompt's own highest score. A slow plane lifts all short distances alike, so a
    large lift of it makes no line. Means over prompts.

    Args:
        kappa: slash score from which a head is slash-dominant.
        distances: how many tokens back that score is looked at; C is taken there, too.

    Raises:
        InputError: no prompt reaches any of the distances.

    Source: that the slash is made by medium and high frequencies of nearly rank-one Q and K is claimed by Cheng et al.
    2026 (arXiv 2601.08297); C, bands, the prediction's score and chance are ours. Soft caps and ALiBi are not in
    C and g.

    Example:
        >>> result = SlashPlanes()("mini", "Down, down, down.", nulls=0)
        >>> result.sel(tokens="all", at="best")["bands"].dims
        ('layer', 'head', 'band')
    """

    question = "Which frequencies make the slash, and is rank one enough?"
    needs = frozenset({"pattern"})
    rows = PER_HEAD
    variables = {
        "score": Variable("slash score", "", "measured", _BY_DISTANCE),
        "predicted": Variable("slash score predicted from rank one", "", "what g(D) alone gives", _BY_DISTANCE),
        "uniform": Variable("slash score of uniform attention", dims=("tokens", "layer", "distance")),
        "contribution": Variable("lift by plane", "logits", "C_l", (*PER_HEAD, "at", "plane")),
        "bands": Variable("lift by band", "logits", "C_l summed over a band", (*PER_HEAD, "at", "band")),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta; infinite: never turns", ("layer", "plane")),
        **AT_BEST,
        "correlation": Variable.correlation(
            "correlation with its own profile", "predicted with measured, less uniform attention", PER_HEAD
        ),
        "chance_correlation": Variable(
            "correlation with other heads' profiles", "", "mean over the other heads measured", PER_HEAD
        ),
    }
    legend = (
        "high, medium, low, unrotated: lift of the best diagonal above the mean logit, in logits, by band of planes."
    )
    caveats = {
        "absolute": "no plane turns, so every plane counts as unrotated, and queries and keys of rank one would make "
        "no slash; what C adds up is content and position vectors together.",
        "alibi": "no plane turns, and the slopes, which make near slashes by themselves, are neither in the lift nor "
        "in the prediction.",
        "none": "no plane turns, so every plane counts as unrotated; the lift is all content.",
    }
    figures = {
        "bands": bars(
            {"": [(label, partial(_lift, name="bands", group=group)) for group, label in GROUPS.items()]},
            "band",
            title="Which frequencies make the slash",
            subtitle="lift of the best diagonal above the mean logit, logits, summed over thirds of the planes",
            form=".2f",
        ),
        "planes": lines(
            {"": [(label, partial(_lift, name="contribution", group=group)) for group, label in GROUPS.items()]},
            "plane",
            title="Which planes make the slash",
            subtitle="lift of the best diagonal above the mean logit; planes by number, the fastest first",
            y_title="logits",
        ),
    }
    all_reached = False

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"at": [*map(str, sorted(self.distances)), "best"]}

    def usual(self) -> Mapping[str, Any]:
        return {"at": "best"}

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        measured = layer.shared(statistics_of)
        geometry = layer.geometry
        distances = sorted(self.distances)
        by_start = []
        for first in starts_of(layer):
            q, k, n = layer.q[:, first:], layer.k[:, first:], layer.length - first
            score = measured.score[first, :, :n]
            planes = plane_contributions(q, k, geometry.rope, geometry.scale, geometry.window)
            reached = [distance for distance in distances if distance < geometry.reach(n)]
            chosen = planes.new_full((*planes.shape[:2], len(distances) + 1), torch.nan)
            chosen[..., : len(reached)] = planes[..., reached]
            best = score[:, : max(1, n // 2)].argmax(-1)
            chosen[..., -1] = planes.gather(-1, best[:, None, None].expand(-1, planes.shape[1], 1))[..., 0]
            tops = [spectrum.top for spectrum in layer.shared(spectra_of, first).values()]
            logit = rank_one_logit(q, k, geometry.rope, geometry.scale, tops)
            sinks = None if first else layer.sink_logits()  # scores without the first token are of the other keys alone
            predicted = score_of_profile(logit, geometry.window, sinks)
            values = {"contribution": chosen.mT, "predicted": predicted, "score": score}
            by_start.append(values | {"uniform": measured.uniform[first, :n]})
        return by_start[0], by_start[1]

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data = sums.means()
        wavelengths, masks = [], []
        for _, (geometry, _) in sorted(sums.layers.items()):
            wavelength = 2 * np.pi / double(complex_frequencies(geometry.rope, geometry.d_head)).cpu()
            turning = len(geometry.rope.inv_freq)
            mask = torch.zeros(len(_ALL_BANDS), len(wavelength)).double()
            mask[:-1, :turning] = double(bands_by_thirds(turning))
            mask[-1, turning:] = 1
            wavelengths.append(wavelength.numpy())
            masks.append(mask.numpy())
        coords = {"layer": data["layer"], "band": list(_ALL_BANDS)}
        of_band = xr.DataArray(np.stack(masks), coords, ("layer", "band", "plane"))
        bands = xr.dot(data["contribution"].fillna(0.0), of_band, dim="plane")
        score, uniform = data["score"], data["uniform"]
        data = data.assign(at_best(score, uniform)).assign(
            bands=bands.where(data["contribution"].notnull().any("plane")),
            wavelength=(("layer", "plane"), np.stack(wavelengths)),
            dominant=self.dominant_at(score, uniform).any("short_distance"),
        )
        correlations = []
        for tokens in TOKENS:  # how each head's predicted profile matches its own measured one, and those of the others
            heads = data[["score", "predicted"]].sel(tokens=tokens).stack(place=HEAD)
            heads = heads.dropna("place", how="all").dropna("distance", how="all")
            uniform_profile = uniform.sel(tokens=tokens, distance=heads["distance"], layer=heads["layer"])
            profiles = (
                profile.transpose("place", "distance").values
                for profile in (heads["score"], heads["predicted"], uniform_profile)
            )
            correlation, chance = (("place", x.numpy()) for x in match_profiles(*map(torch.from_numpy, profiles)))
            matched = xr.Dataset({"correlation": correlation, "chance_correlation": chance}, {"place": heads["place"]})
            correlations.append(matched.unstack("place").reindex_like(data[list(HEAD)]))
        return data.merge(xr.concat(correlations, data["tokens"]))

    def findings(self, numbers: Numbers) -> list[str]:
        lines = ["No head is slash-dominant, so no band makes a slash."]
        if n_heads(numbers, "dominant").value:
            total = numbers.number(
                mean_over_group(numbers, numbers.array("contribution").sum("plane", min_count=1), "dominant")
            )
            bands = {band: group_mean(numbers, "bands", "dominant", band=band) for band in _ALL_BANDS}
            # what a model rotates all, or nothing, of is not worth a word
            by_band = ", ".join(f"{band} {lift.plain:.2f}" for band, lift in bands.items() if lift.value)
            lines = [
                f"On their best diagonal slash-dominant heads stand above the mean logit by {total.plain:.2f} logits, "
                f"of which by thirds of the planes {by_band}."
            ]
            largest = numbers.number(abs(numbers.array("bands").mean(HEAD)).max("band"))
            if most := ", ".join(f"{kind} {format_bound(values)}" for kind, values in largest.by_null.items()):
                lines[0] += f" The most that any band lifts it in null models, mean over heads: {most} logits."
        if not np.isfinite(numbers.data["wavelength"]).any():
            return [*lines, "No plane of this model turns, so queries and keys of rank one would make no slash."]
        r = numbers("correlation")
        chance = numbers("chance_correlation")
        dominant = group_mean(numbers, "correlation", "dominant")
        return [
            *lines,
            "The slash scores predicted from rank one, less those of uniform attention, correlate with the measured "
            f"ones at {r:.3f}{f', in slash-dominant heads {dominant.plain:.3f}' if dominant else ''} (with the other "
            f"heads measured: {chance.plain:.3f}).",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        bands = numbers.dataset["bands"].sel(at="best")
        return group_table(numbers, {band: bands.sel(band=band) for band in _ALL_BANDS})
