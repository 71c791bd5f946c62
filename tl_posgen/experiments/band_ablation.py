"""Which frequencies does the running model need? Bands of RoPE dropped, frozen or kept alone in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.slash import best, check_dominance, statistics_dataset
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.loss import prompts_of_one_length, require_length, token_losses
from tl_posgen.experiments.slash import ablated_statistics
from tl_posgen.interventions.bands import ablate_bands
from tl_posgen.maths.bands import BANDS, bands_by_thirds, bands_by_wavelength
from tl_posgen.maths.rope import Rope
from tl_posgen.maths.slash import SHORT_DISTANCES, SHORT_KAPPA, SlashMean, slash_statistics
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import capturing
from tl_posgen.models.probe import probe, supported
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result

Split = Literal["thirds", "wavelength"]
BAND_KINDS = ("drop", "freeze", "keep")
WHOLE_KINDS = ("rank_one", "no_rope", "means", "means_no_rope")


@dataclass(frozen=True)
class Arm:
    """One ablation: a kind, and for the first three kinds a band of planes.

    Attributes:
        n: tokens of a prompt, which limits the medium band where bands are made by wavelength.
    """

    kind: str
    split: str = ""
    band: str = ""
    n: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.band}, {self.split}" if self.band else self.kind

    def planes(self, rope: Rope) -> Bool[Tensor, " plane"]:
        bands = bands_by_thirds(len(rope.inv_freq)) if self.split == "thirds" else bands_by_wavelength(rope, self.n)
        return bands[BANDS.index(self.band)]


def band_ablation(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 4,
    splits: Sequence[Split | str] = ("thirds", "wavelength"),
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = SHORT_DISTANCES,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""Loss, and SlashScore(D) at each head's own D, with scores = scale <R' q', R' k'> in all layers at once.

    Arms: "none"; "drop" (planes set to zero), "freeze" (theta = 0) and "keep" (only these planes) for the high, medium
    and low band; "rank_one" (Q and K truncated), "no_rope" (nothing turns), "means" (Q and K replaced by their means
    over positions) and "means_no_rope". Bands are thirds of the planes, or go by wavelength: high < 32 tokens, medium
    up to the prompt's length, low above; a layer with frequencies of its own has bands of its own.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        splits: how to make bands, any of "thirds" and "wavelength".
        kappa, distances: what makes a head slash-dominant.
        null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "band_ablation", a row per arm: `loss_mean` (nats per token), `slash_heads` (how many heads are
        dominant at one of `distances`), `slash_heads_kept` (how many of those that were so before, at one of the
        distances where they were), `slash_score` and `slash_score_offline` (means of the two below over the heads that
        were dominant, over all heads where none was), and coords `kind`, `split`, `band`. Over (arm, prompt) `loss`;
        over (arm, layer) `n_planes` of the band; over (layer, head) `best_distance` (over D < N/2, untouched) and
        `baseline_score`, of uniform attention there; over (arm, layer, head) `score` at that distance in the running
        model and `score_offline`, with that layer alone changed on the untouched q and k.

    Raises:
        InputError: unusable prompts, an unknown split, kappa outside (0, 1], a distance that no prompt reaches.
        UnsupportedModelError: a model without rotary planes, or whose scores cannot be replaced.

    Source: that medium and high frequencies carry the slash is claimed by Cheng et al. 2026 (arXiv 2601.08297); bands
    and ablations are ours.

    Example:
        >>> import tl_posgen
        >>> model = tl_posgen.load_model("mini")
        >>> options = {"length": 12, "n_prompts": 1, "splits": ["thirds"], "null_seed": None, "progress": False}
        >>> result = band_ablation(model, "Down, down, down. Would the fall never end?", **options)
        >>> result.frame()["arm"].tolist()[:3]
        ['none', 'drop high, thirds', 'drop medium, thirds']
    """
    tokens = prompts_of_one_length(model, prompts, length, n_prompts)
    n = tokens.shape[1]
    require_length(model, n)
    check_dominance(kappa, distances)
    if max(distances) >= n:
        raise InputError(f"distance {max(distances)}: the prompts have {n} tokens; give longer prompts")
    if unknown := set(splits) - set(get_args(Split)):
        raise InputError(f"split {sorted(unknown)[0]!r}: choose from {', '.join(get_args(Split))}")
    require_planes(model)
    banded = [Arm(kind, split, band, n) for split in splits for kind in BAND_KINDS for band in BANDS]
    arms = [Arm("none"), *banded, *(Arm(kind) for kind in WHOLE_KINDS)]
    settings: dict[str, Any] = {"kappa": kappa, "distances": sorted(set(distances)), "progress": progress}
    dataset = measured(model, tokens, arms, **settings, label=model_label(model))
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, arms, **settings, label=null_label(null_seed))
    return Result("band_ablation", dataset, null, provenance_of(model, list(tokens), null_seed))


def require_planes(model: Model) -> None:
    """Refuse a model that turns nothing: there is no band to ablate."""
    if not any(supported(layer).geometry.rope.rotary_dim for layer in probe(model)):
        raise UnsupportedModelError(
            "band_ablation: no layer of this model has rotary planes, so there is no band to drop; "
            "slash_transfer measures its slash scores with Q and K ablated"
        )


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    arms: Sequence[Arm],
    *,
    kappa: float,
    distances: Sequence[int],
    progress: bool,
    label: str,
) -> xr.Dataset:
    """Everything `band_ablation` measures of one model."""
    offline: list[dict[int, SlashMean]] = [{} for _ in arms]
    running, losses = [], []
    for arm in tqdm(arms, desc=f"band ablation, {label}", unit="arm", disable=not progress):
        means: dict[int, SlashMean] = {}

        def take(capture: LayerCapture, arm: Arm = arm, means: dict[int, SlashMean] = means) -> None:
            assert capture.pattern is not None
            found = slash_statistics(capture.pattern, window=capture.geometry.window, entropy=False)
            means.setdefault(capture.layer, SlashMean()).add(found)
            if arm.kind == "none":
                for other, kept in zip(arms, offline, strict=True):
                    planes = other.planes(capture.geometry.rope) if other.band else None
                    found = ablated_statistics(capture, other.kind, planes)
                    kept.setdefault(capture.layer, SlashMean()).add(found)

        hooks = [] if arm.kind == "none" else ablate_bands(model, arm.kind, arm.planes if arm.band else None)
        with capturing(model, take, needs=frozenset({"pattern"})):
            losses.append(token_losses(model, tokens, hooks).mean(-1).numpy())
        running.append(scores_of(means, model))
    dataset = scores_by_arm(running, [scores_of(means, model) for means in offline], [arm.label for arm in arms])
    dataset["loss"] = ("arm", "prompt"), np.stack(losses)
    dataset["n_planes"] = ("arm", "layer"), planes_by_layer(model, arms)
    labels = {name: ("arm", [getattr(arm, name) for arm in arms]) for name in ("kind", "split", "band")}
    dataset = per_arm(dataset.assign_coords(labels), kappa, distances)
    return dataset.assign_attrs(rows=["arm"], model=label, kappa=kappa, distances=list(distances))


def scores_of(means: dict[int, SlashMean], model: Model) -> xr.Dataset:
    statistics = {layer: mean.result() for layer, mean in means.items()}
    return statistics_dataset(statistics, range(model.cfg.n_heads))[["score", "baseline"]]


def scores_by_arm(running: Sequence[xr.Dataset], offline: Sequence[xr.Dataset], labels: Sequence[str]) -> xr.Dataset:
    """score and score_offline at each head's best distance, and the running scores at all distances."""
    place = best(running[0])["best_distance"]
    profiles = xr.concat([one["score"] for one in running], "arm").assign_coords(arm=list(labels))
    alone = xr.concat([one["score"] for one in offline], "arm").assign_coords(arm=list(labels))
    return xr.Dataset(
        {
            "profile": profiles,
            "score": profiles.sel(distance=place, drop=True),
            "score_offline": alone.sel(distance=place, drop=True),
            "baseline_score": running[0]["baseline"].sel(distance=place, drop=True),
            "best_distance": place,
        }
    )


def planes_by_layer(model: Model, arms: Sequence[Arm]) -> np.ndarray:
    """[arm, layer] how many planes the band has; all of them for the arms without a band."""
    ropes = [supported(layer).geometry.rope for layer in probe(model)]
    return np.array(
        [[int(arm.planes(rope).sum()) if arm.band else len(rope.inv_freq) for rope in ropes] for arm in arms]
    )


def per_arm(dataset: xr.Dataset, kappa: float, distances: Sequence[int]) -> xr.Dataset:
    """One number per arm; the profiles, which are many, are left behind."""
    dominant = dataset["profile"].sel(distance=list(distances)) >= kappa
    before = dominant.isel(arm=0, drop=True)
    chosen = before.any("distance")
    chosen = chosen if chosen.any() else xr.ones_like(chosen)
    return dataset.drop_vars(["profile", "distance"]).assign(
        loss_mean=dataset["loss"].mean("prompt"),
        slash_heads=dominant.any("distance").sum(("layer", "head")),
        slash_heads_kept=(dominant & before).any("distance").sum(("layer", "head")),
        slash_score=dataset["score"].where(chosen).mean(("layer", "head")),
        slash_score_offline=dataset["score_offline"].where(chosen).mean(("layer", "head")),
    )
