"""The planes behind a slash: what each adds to the logit, and the slash that rank one would give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.formatting import format_bound
from tl_posgen.core.measure import HEAD, TOKENS, Variable, by_tokens
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.figures import COLOURS, Panels, line, model_label, sides
from tl_posgen.report.kinds import bars
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds, bands_by_wavelength
from tl_posgen.rope.rotation import Rope, complex_frequencies
from tl_posgen.slash.head_groups import GROUPS, count, group_mean, group_table, mean_over_group, n_heads
from tl_posgen.slash.layer_means import (
    PER_HEAD,
    SHARE,
    Dominance,
    at_distance,
    best_distance,
    require_two_tokens,
    statistics_of,
    strongest_named,
)
from tl_posgen.slash.numbers.plane_contributions import (
    match_profiles,
    plane_contributions,
    rank_one_logit,
    score_of_profile,
)

NEAR = 8  # tokens: how far from the best distance the others of "edge" are
PLACES = {"best": "lift", "edge": "edge"}
ABOVE = {"best": "the mean logit", "edge": "the diagonals up to 8 tokens away"}
SCHEMES = {"thirds": "by thirds of the planes", "wavelength": "by wavelength"}
ALL_BANDS = (*BANDS, "unrotated")
BY_DISTANCE = (*PER_HEAD, "distance")
N_HEADS = 8  # the strongest, drawn one by one


def _planes(result: Any) -> go.Figure:
    """Draw the lift of the best diagonal by wavelength, a panel for each of the strongest heads, and that of the null's
    head of the same place behind."""
    whole = result.own.sel(tokens="all")
    heads = strongest_named(whole, whole["best_score"], N_HEADS)
    panels = Panels([f"{name}, score {float(one['best_score']):.2f}" for name, one in heads.items()])
    for number, one in enumerate(heads.values()):
        for side, data, colour in reversed(sides(result)):
            head = data.sel({"tokens": "all", **{dim: one[dim].item() for dim in HEAD}})
            wavelength, turns = head["wavelength"].values, np.isfinite(head["wavelength"].values)
            # what is not rotated has no wavelength: a place of its own
            x = np.where(turns, wavelength, 10 * wavelength[turns].max(initial=1.0))
            names = {"best": (side, colour)}
            if data is result.own:
                names = {"best": ("lift", COLOURS[0]), "edge": ("edge", COLOURS[1])}
            for at, (words, shade) in names.items():
                panels.add(number, line(x, head["contribution"].sel(at=at).values, words, shade))
    subtitle = "how far each plane lifts the best diagonal above the mean logit, and (edge) above those near it, logits"
    if np.isinf(result.own["wavelength"]).any():
        subtitle += "; at the far right: not rotated"
    panels.axes("wavelength in tokens", log_x=True)
    return panels.finish(f"Planes of the strongest slash heads · {model_label(result.own)}", subtitle)


def _of_band(group: str, **labels: str) -> Callable[[Numbers], xr.DataArray]:
    """Return the lift by band, mean over a group of heads."""
    return lambda own: mean_over_group(own, own.array("bands", band=None, **labels), group)


@dataclass(frozen=True)
class SlashPlanes(Dominance):
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)], and g(D) = sum_l A_l cos(theta_l D + phi_l).

    How far each RoPE plane lifts the logits of the head's best diagonal: above the mean logit (lift), and above the
    diagonals up to 8 tokens away (edge). Summed into bands by thirds of the planes and by wavelength (high < 32
    tokens, low > the prompt). Beside it the slash profile that rank-one queries and keys would have, against the
    measured one; chance is the profile of another head.

    InnerProd(i, j, l) is the share of RoPE plane l in the logit scale <R_i q_i, R_j k_j>, so the sum of C_l(D) over
    planes is how far diagonal D stands above the mean logit. g is the logit that Q and K cut down to their top singular
    directions give; `predicted` is the slash score that g alone gives, and chance its match with the profiles of the
    other heads measured: of a choice (`heads=`, `layers=`) only those, and of one head none. C is taken at the
    distances given; as "best", at the prompt's own highest score; as "edge", that less its mean over the others up to 8
    tokens away, as a slow plane lifts all short distances alike and makes no line. Means over prompts.

    Args:
        kappa, distances: what makes a head slash-dominant, and where C is taken.

    Raises:
        InputError: no prompt reaches any of the distances.

    Source: that the slash is made by medium and high frequencies of nearly rank-one Q and K is claimed by Cheng et al.
    2026 (arXiv 2601.08297); C, edge, bands, the prediction's score and chance are ours. Soft caps and ALiBi are not in
    C and g.

    Example:
        >>> result = SlashPlanes()("mini", "Down, down, down.", null_seeds=())
        >>> result.sel(tokens="all", at="best")["bands"].dims
        ('layer', 'head', 'scheme', 'band')
    """

    question = "Which frequencies make the slash, and is rank one enough?"
    needs = frozenset({"pattern"})
    rows = PER_HEAD
    variables = {
        "score": Variable("slash score", "", "measured", BY_DISTANCE),
        "predicted": Variable("slash score predicted from rank one", "", "what g(D) alone gives", BY_DISTANCE),
        "uniform": Variable("slash score of uniform attention", dims=("tokens", "layer", "distance")),
        "contribution": Variable("lift by plane", "logits", "C_l", (*PER_HEAD, "at", "plane")),
        "bands": Variable("lift by band", "logits", "C_l summed over a band", (*PER_HEAD, "at", "scheme", "band")),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta; infinite: never turns", ("layer", "plane")),
        "dominant": Variable(
            "slash-dominant", "", "score >= kappa, or twice uniform attention, at one of the distances", PER_HEAD
        ),
        "best_score": Variable("highest slash score", "", "over D < N/2", PER_HEAD, **SHARE),
        "best_distance": Variable("distance of the highest slash score", "tokens", "", PER_HEAD),
        "correlation": Variable(
            *("correlation with its own profile", "", "predicted with measured, less uniform attention", PER_HEAD),
            interval=True,
            bounds=(-1, 1),
        ),
        "chance_correlation": Variable(
            "correlation with other heads' profiles", "", "mean over the other heads measured", PER_HEAD
        ),
    }
    legend = (
        "lift: best diagonal less the mean logit; edge: less the diagonals up to 8 tokens away; both in logits, by the "
        "band of RoPE's planes that it comes from."
    )
    caveats = {
        "absolute": "no plane turns, so every plane counts as unrotated, and queries and keys of rank one would make "
        "no slash; what C adds up is content and position vectors together.",
        "alibi": "no plane turns, and the slopes, which make near slashes by themselves, are neither in the lift nor "
        "in the prediction.",
        "none": "no plane turns, so every plane counts as unrotated; the lift is all content.",
    }
    figures = {
        "planes": _planes,
        "bands": bars(
            {
                f"{kind}, {words}": [(name, _of_band(group, at=at, scheme=scheme)) for group, name in GROUPS.items()]
                for (at, kind), (scheme, words) in product(PLACES.items(), SCHEMES.items())
            },
            "band",
            title="Which frequencies make the slash",
            subtitle="lift of the best diagonal above the mean logit, and (edge) above the diagonals up to 8 tokens "
            "away, logits, summed over planes; by wavelength: high < 32 tokens, low beyond the prompt",
            form=".2f",
        ),
    }
    all_reached = False

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"at": [*map(str, sorted(self.distances)), *PLACES]}

    def usual(self) -> Mapping[str, Any]:
        return {"at": "best", "scheme": "thirds"}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        require_two_tokens(layer)
        found, geometry, both = layer.once(statistics_of), layer.geometry, []
        for first, score in enumerate((found.score[0], found.score[1, :, :-1])):
            q, k = layer.q[:, first:], layer.k[:, first:]
            planes = plane_contributions(q, k, geometry.rope, geometry.scale, geometry.window)
            chosen = _at_places(planes, score, sorted(self.distances), geometry.window)
            predicted = score_of_profile(rank_one_logit(q, k, geometry.rope, geometry.scale), geometry.window)
            both.append({"contribution": chosen, "predicted": predicted})
        return by_tokens(*both) | {"score": found.score, "uniform": found.uniform}

    def finish(self, sums: Sums) -> xr.Dataset:
        data, n = sums.means(), max(sums.lengths.values())
        planes = [_planes_of(geometry.rope, geometry.d_head, n) for _, (geometry, _) in sorted(sums.layers.items())]
        masks = xr.concat([mask for _, mask in planes], data["layer"])
        bands = xr.dot(data["contribution"].fillna(0.0), masks, dim="plane")
        data["bands"] = bands.where(data["contribution"].notnull().any("plane"))
        data["wavelength"] = (("layer", "plane"), np.stack([wavelength for wavelength, _ in planes]))
        data["dominant"] = self.dominant_at(data["score"], data["uniform"]).any("short_distance")
        place = best_distance(data["score"])
        data = data.assign(best_score=at_distance(data["score"], place), best_distance=place)
        matches = [_compared(data.sel(tokens=tokens)) for tokens in TOKENS]
        return data.merge(xr.concat(matches, data["tokens"]))

    def findings(self, own: Numbers) -> list[str]:
        if not n_heads(own, "dominant").value:
            return ["No head is slash-dominant, so no band makes a slash.", *self._of_the_prediction(own)]
        lines = [
            f"On their best diagonal slash-dominant heads stand above {ABOVE[at]} by {self._lift(own, at)}."
            for at in PLACES
        ]
        bands = abs(own.dataset["bands"].sel(at=list(PLACES)).mean(HEAD))
        largest = own.number(bands.max([dim for dim in bands.dims if dim != "init"]))
        if most := ", ".join(f"{kind} {format_bound(values)}" for kind, values in largest.by_null.items()):
            lines[-1] += f" The most that any band lifts it in null models, mean over heads: {most} logits."
        return lines + self._of_the_prediction(own)

    def _lift(self, own: Numbers, at: str) -> str:
        """Return '26.25 logits, of which by thirds of the planes high 8.48, medium 9.49, low 8.29'."""
        whole = own.array("contribution", at=at).sum("plane", min_count=1)
        total = own.number(mean_over_group(own, whole, "dominant"))
        if not total:
            return "an amount that is not defined"
        scheme, words = next(iter(SCHEMES.items()))  # the table has the other
        bands = {band: group_mean(own, "bands", "dominant", at=at, scheme=scheme, band=band) for band in ALL_BANDS}
        # what a model rotates all, or nothing, of is not worth a word
        parts = ", ".join(f"{band} {one.plain:.2f}" for band, one in bands.items() if one.value)
        return f"{total.plain:.2f} logits, of which {words} {parts}"

    def _of_the_prediction(self, own: Numbers) -> list[str]:
        if not np.isfinite(own.data["wavelength"]).any():
            return ["No plane of this model turns, so queries and keys of rank one would make no slash."]
        lines = []
        for group, words in GROUPS.items():
            if n := n_heads(own, group).value:
                r, chance = (group_mean(own, name, group).plain for name in ("correlation", "chance_correlation"))
                lines.append(
                    f"In {count(n, words)} the slash scores predicted from rank one, less those of uniform attention, "
                    f"correlate with the measured ones at {r:.3f} (with the other heads measured: {chance:.3f})."
                )
        for kind, null in own.by_null.items():
            r, chance = (null(name).plain for name in ("correlation", "chance_correlation"))
            lines[-1] += f" {kind.capitalize()}: {r:.3f} and {chance:.3f}."
        return lines

    def table(self, own: Numbers) -> pd.DataFrame:
        parts = []
        for at, measure in PLACES.items():
            for scheme in SCHEMES:
                bands = own.dataset["bands"].sel(at=at, scheme=scheme)
                frame = group_table(own, {band: bands.sel(band=band) for band in ALL_BANDS})
                parts.append(frame.assign(measure=measure, **{"bands by": scheme}))
        return pd.DataFrame(pd.concat(parts, ignore_index=True)[["measure", "bands by", "tokens", "heads", *ALL_BANDS]])

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return those that can be drawn: where nothing turns there are no wavelengths to draw over."""
        turns = bool(np.isfinite(data["wavelength"]).any())
        return [kind for kind in self.figures if turns or kind != "planes"]


def _at_places(
    planes: Float[Tensor, "head plane distance"],
    score: Float[Tensor, "head distance"],
    distances: Sequence[int],
    window: int | None,
) -> Float[Tensor, "head at plane"]:
    """Return C at the distances (NaN where prompt or window is too short), at the highest score over D < N/2, and its
    edge over the distances that are seen (NaN where there is one alone)."""
    n = score.shape[-1]
    seen = min(n, window or n)
    fixed = planes.new_full((*planes.shape[:2], len(distances)), torch.nan)
    reached = [distance for distance in distances if distance < seen]
    fixed[..., : len(reached)] = planes[..., reached]
    best = score[:, : max(1, n // 2)].argmax(-1)
    away = (torch.arange(n, device=best.device) - best[:, None]).abs()
    others = (away > 0) & (away <= NEAR) & (torch.arange(n, device=best.device) < seen)
    own, near = (away == 0).to(planes), others.to(planes)
    at_best, beside = ((planes @ mask[..., None]) / mask.sum(-1)[:, None, None] for mask in (own, near))
    return torch.cat([fixed, at_best, at_best - beside], dim=-1).mT


def _planes_of(rope: Rope, d_head: int, n: int) -> tuple[Float[np.ndarray, " plane"], xr.DataArray]:
    """Return 2 pi / theta of each plane of a layer, infinite where nothing turns, and which plane is in which band.

    By scheme, bands by wavelength in a prompt of n tokens; the unrotated remainder is a band of its own.
    """
    wavelength = 2 * np.pi / double(complex_frequencies(rope, d_head)).cpu()
    turning = len(rope.inv_freq)
    masks = torch.zeros(len(SCHEMES), len(ALL_BANDS), len(wavelength), dtype=DOUBLE)
    masks[:, :-1, :turning] = double(torch.stack([bands_by_thirds(turning), bands_by_wavelength(rope, n).cpu()]))
    masks[:, -1, turning:] = 1
    coords = {"scheme": list(SCHEMES), "band": list(ALL_BANDS)}
    return wavelength.numpy(), xr.DataArray(masks.numpy(), coords, ("scheme", "band", "plane"))


def _compared(data: xr.Dataset) -> xr.Dataset:
    """Return how each head's predicted profile matches its own measured one, and those of all other heads."""
    heads = data[["score", "predicted"]].stack(place=HEAD).dropna("place", how="all").dropna("distance", how="all")
    uniform = data["uniform"].sel(distance=heads["distance"], layer=heads["layer"])
    profiles = (heads["score"], heads["predicted"], uniform)
    values = (torch.from_numpy(one.transpose("place", "distance").values) for one in profiles)
    names = ("correlation", "chance_correlation")
    found = {name: ("place", x.numpy()) for name, x in zip(names, match_profiles(*values), strict=True)}
    return xr.Dataset(found, {"place": heads["place"]}).unstack("place").reindex_like(data[list(HEAD)])
