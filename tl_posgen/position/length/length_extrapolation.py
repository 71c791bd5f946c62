"""Beyond the training length: do outputs stay in their distribution, and at what loss?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.selection import select_heads
from tl_posgen.models.wrapped import wrap
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.distance.hooks import require_distances
from tl_posgen.position.length.condition_runs import BINS_INSIDE, Run, dataset_of
from tl_posgen.position.length.hooks import interpolate_positions, lm_infinite, retrieve_blocks
from tl_posgen.position.length.length_figures import CONDITIONS, FIGURES
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, with_ends
from tl_posgen.report.sentences import NO_NULL, beside, null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

NAME = "length_extrapolation"
N_PROMPTS = 4  # of one text, where n_prompts is left out: few have more prompts of several training lengths


@dataclass(frozen=True)
class LengthExtrapolation(Options):
    """Frechet distance of outputs o = pattern v beyond the training length to those inside, over the variance inside;
    and entropy, normaliser ln sum exp and loss by position, on prompts of `times` the training length.

    Everything is measured under each condition: "vanilla"; "lm_infinite" (global and local windows, distances frozen at
    the training length); "retrieval" (the same and the best hidden blocks, in InfLLM's manner); "interpolation"
    (positions times 1 / times). Segments are the multiples of the training length. Outputs are compared with those of
    the untouched model in the second half of the training length (early queries see few keys and are another
    distribution anyway); the noise level is the distance between two halves of the prompts there.

    A text is cut into prompts of times x inside tokens, 4 of them unless `n_prompts` says otherwise; so `length` is
    left out, or says again what `inside` is. `layers` and `heads` choose what is edited and measured.

    Args:
        inside: the training length; cfg.n_ctx if left out.
        times: length of the prompts, in training lengths.
        conditions: any of the four; "vanilla" is always among them.
        n_global, block, n_blocks: of `lm_infinite` and `retrieve_blocks`.

    Raises:
        InputError: unusable prompts, a text too short, a model that cannot run prompts of this length (another backend
            may), unknown conditions, another `length`, fewer than two prompts.
        UnsupportedModelError: learned absolute positions.

    Source: the claim is of Han & Ji 2025 (arXiv 2503.13305); the measures are ours.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.models.tokens import bundled_text
        >>> from tl_posgen.position.length import length_extrapolation
        >>> options = {"inside": 16, "length": 16, "times": 2, "n_prompts": 2, "null_seeds": (), "progress": False}
        >>> found = length_extrapolation(load_model("mini", backend="bridge"), bundled_text(), **options)
        >>> found.dataset["frechet"].dims
        ('condition', 'layer', 'head', 'segment')
    """

    inside: int | None = None
    times: int = 4
    conditions: Sequence[str] = tuple(CONDITIONS)
    n_global: int = 10
    block: int = 16
    n_blocks: int = 4

    def check(self) -> None:
        if self.inside is not None:
            check_whole(NAME, 2 * BINS_INSIDE, inside=self.inside)
        check_whole(NAME, 1, times=self.times, block=self.block, n_blocks=self.n_blocks)
        check_whole(NAME, 0, n_global=self.n_global)
        if unknown := [one for one in self.conditions if one not in CONDITIONS]:
            raise InputError(f"{NAME}: conditions: {unknown[0]!r} is none; choose from {', '.join(CONDITIONS)}")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, LengthExtrapolation)
    inside = int(model.cfg.n_ctx) if options.inside is None else options.inside
    check_whole(NAME, 2 * BINS_INSIDE, inside=inside)
    if job.length not in (None, inside):
        raise InputError(
            f"length {job.length}: length_extrapolation cuts prompts of times x inside = {options.times} x {inside} "
            f"tokens; leave length out, or set LengthExtrapolation(inside={job.length})"
        )
    n = inside * options.times
    wrap(model).require_length(n)
    n_prompts = N_PROMPTS if job.n_prompts is None and isinstance(prompts, str) else job.n_prompts
    tokens = prompts_of_one_length(model, prompts, n, n_prompts, beyond=True)
    if len(tokens) < 2:
        raise InputError(
            f"length_extrapolation: the noise level needs two prompts at least, not n_prompts={len(tokens)}"
        )
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    hooks_of = {name: partial(HOOKS[name], options, inside, where) for name in ("vanilla", *options.conditions)}
    for build in hooks_of.values():
        build(model)  # a model that cannot be edited is refused here, before work starts

    shown = some_of(list(select_heads(model, **where)))
    job.plan(len(tokens) * len(hooks_of))

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        runs, planes = {}, {}
        for condition in hooks_of:
            runs[condition], hooks = Run(inside, shown), hooks_of[condition](other)
            for prompt in tokens:
                runs[condition].add(other, prompt, hooks, where)
            planes = planes or runs[condition].planes()  # the first is the untouched model
            runs[condition].project(planes)
        return dataset_of(runs, inside, planes).assign_attrs(model=label)

    return job.result(request, model, list(tokens), of_model)


def some_of(layers: Sequence[int]) -> list[int]:
    """The first, the middle and the last.

    Example:
        >>> some_of([0, 1, 2, 3]), some_of([5])
        ([0, 2, 3], [5])
    """
    return sorted({layers[0], layers[len(layers) // 2], layers[-1]})


HOOKS: dict[str, Callable[..., HookList]] = {
    "vanilla": lambda options, inside, where, model: [],
    "lm_infinite": lambda options, inside, where, model: lm_infinite(model, inside, options.n_global, **where),
    "retrieval": lambda options, inside, where, model: retrieve_blocks(
        model, inside, options.n_global, block=options.block, n_blocks=options.n_blocks, **where
    ),
    "interpolation": lambda options, inside, where, model: interpolate_positions(model, 1 / options.times, **where),
}


# What is shown


def within_noise(frechet: xr.DataArray, noise_level: xr.DataArray) -> xr.DataArray:
    """Share of heads whose outputs are no further off than those of two halves of the prompts are from each other."""
    return (frechet <= noise_level).where(frechet.notnull()).mean(("layer", "head"))


def summarise(data: xr.Dataset) -> Summary:
    """`<name>_<condition>`: of the mean over the segments beyond the training length, the share of heads within the
    noise level, the medians over heads, and the loss; `loss_last_<condition>` in the last segment. Of the planes of the
    layers that are shown: `plane_share`, `plane_noise` and `plane_offset_<condition>`, median over these layers, and
    each layer's in the lists `plane_shares` and `plane_offsets_<condition>`. None where nothing lies beyond."""
    named = ["loss_segment", "frechet", "norm_ratio", "plane_offset"]
    beyond = data[named].isel(segment=slice(1, None)).mean("segment")
    columns = {
        "loss_beyond": beyond["loss_segment"],
        "loss_last": data["loss_segment"].isel(segment=-1),
        "within_noise": within_noise(beyond["frechet"], data["noise_level"]),
        "frechet": beyond["frechet"].median(("layer", "head")),
        "norm_ratio": beyond["norm_ratio"].median(("layer", "head")),
        "plane_offset": beyond["plane_offset"].median("shown_layer"),
    }
    offsets = beyond["plane_offset"].transpose("condition", "shown_layer")
    conditions, times = [str(condition) for condition in data["condition"].values], data.sizes["segment"]
    return {
        "conditions": conditions,
        "inside": int(data.attrs["inside"]),
        "times": times,
        "loss_inside": float(data["loss_segment"].sel(condition="vanilla", segment=0)),
        "noise_level": float(data["noise_level"].median()),
        **{
            f"{name}_{condition}": float(values.sel(condition=condition)) if times > 1 else None
            for name, values in columns.items()
            for condition in conditions
        },
        **{
            f"rise_{condition}{end}": float(data[f"rise{end}"].sel(condition=condition)) if times > 1 else None
            for condition in conditions
            for end in ENDS
        },
        "shown_layers": data["shown_layer"].values.tolist(),
        "plane_noise": float(data["plane_noise"].median()),
        "plane_share": float(data["plane_share"].median()),
        "plane_shares": data["plane_share"].values.tolist(),
        **{
            f"plane_offsets_{condition}": offsets.sel(condition=condition).values.tolist() if times > 1 else None
            for condition in conditions
        },
    }


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    if own["times"] < 2:
        return ["Nothing was run beyond the training length."]
    forms = {"loss_beyond": ".2f", "within_noise": ".0%", "frechet": ".2f", "norm_ratio": ".2f"}

    def told(condition: str) -> str:
        keys = {name: f"{name}_{condition}" for name in forms}
        loss, share, frechet, ratio = (said(own[key], forms[name]) for name, key in keys.items())
        rise = with_interval(own, f"rise_{condition}", "+.2f")
        nulls = [null_of(null, key, forms[name]).removeprefix("random init ") for name, key in keys.items()]
        random = NO_NULL if null is None else "random init " + ", ".join(nulls)
        return (
            f"loss {loss}, {rise} against the untouched one inside, outputs within the noise level in {share} of "
            f"heads, Frechet {frechet}, norm ratio {ratio} ({random})"
        )

    offsets = ", ".join(f"{CONDITIONS[c]} {beside(own, null, f'plane_offset_{c}', '.2f')}" for c in own["conditions"])
    share, halves = beside(own, null, "plane_share", ".0%"), beside(own, null, "plane_noise", ".2f")
    noise = f"{said(own['noise_level'], '.2f')} ({null_of(null, 'noise_level', '.2f')})"
    return [
        *(f"{CONDITIONS[one]}, beyond the training length: {told(one)}." for one in own["conditions"]),
        f"On the first two principal components of the untouched outputs inside, {share} of their variance, centroids "
        f"beyond are off, in standard deviations, by {offsets}; two halves of the prompts inside by {halves}.",
        f"Inside it the untouched loss is {said(own['loss_inside'], '.2f')} and the noise level {noise}.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row per condition and multiple of the training length: medians over heads, loss, mean entropy."""
    segment_of_bin, heads = data["bin"] // int(data.attrs["inside"]), ("layer", "head")
    columns = {
        "loss": data["loss_segment"],
        "frechet": data["frechet"].median(heads),
        "noise_level": data["noise_level"].median(heads),
        "within_noise": within_noise(data["frechet"], data["noise_level"]),
        "norm_ratio": data["norm_ratio"].median(heads),
        "entropy": data["entropy"].mean(heads).groupby(segment_of_bin.rename("segment")).mean(),
    }
    frame = xr.Dataset(columns).to_dataframe(dim_order=["condition", "segment"]).reset_index()
    frame["segment"] += 1
    return pd.DataFrame(frame.rename(columns={"segment": "times"})[["condition", "times", *columns]])


SEGMENT, BIN = ("condition", "layer", "head", "segment"), ("condition", "layer", "head", "bin")
VARIABLES = {
    **with_ends("loss", "loss", "nats", "by position; a bin is named by its first query", ("condition", "bin")),
    "loss_segment": Variable("loss by segment", "nats", "mean over each training length", ("condition", "segment")),
    **with_ends(
        "rise", "rise of the loss", "nats", "mean of the segments beyond, less the untouched one inside", ("condition",)
    ),
    "entropy": Variable("entropy of attention", "nats", "- sum_j p_ij ln p_ij, mean over the bin", BIN),
    "normaliser": Variable("normaliser", "logits", "ln sum_j exp(score_ij), mean over the bin", BIN),
    "frechet": Variable("Frechet distance", "", "to the outputs inside, over the variance inside", SEGMENT),
    "mahalanobis": Variable("Mahalanobis distance", "", "root mean square, over that inside: 1 is no drift", SEGMENT),
    "norm_ratio": Variable("norm ratio", "", "mean |o| over mean |o| inside", SEGMENT),
    "off_axes": Variable("share off the axes", "", "of the outputs' mean square, outside the axes inside", SEGMENT),
    "plane_coordinates": Variable(
        "outputs in their principal plane",
        "standard deviations inside",
        "of a layer's heads side by side, on the first two principal components of the untouched model's in the second "
        "half of the training length; up to 64 positions of each training length",
        ("condition", "shown_layer", "prompt", "position", "axis"),
    ),
    "plane_offset": Variable(
        "offset of the centroid in the plane", "standard deviations inside", "", ("condition", "shown_layer", "segment")
    ),
    "plane_noise": Variable(
        "offset between two halves of the prompts", "standard deviations inside", "", ("shown_layer",)
    ),
    "plane_share": Variable("share of the plane", "", "of the variance of the outputs inside", ("shown_layer",)),
    "noise_level": Variable("noise level", "", "Frechet distance between two halves of the outputs inside"),
}

MEASURE = Measure(
    name=NAME,
    question="Beyond the training length, do the outputs stay where they were?",
    explanation=(
        "Prompts of several training lengths: untouched, with LM-Infinite's windows, with retrieved blocks besides, "
        "and with interpolated positions. Outputs o of every head are compared with those inside the training length; "
        "the noise level is the distance between the outputs of two halves of the prompts there. The first, the middle "
        "and the last layer are drawn in the plane of their two principal components inside."
    ),
    source="the claim: Han & Ji 2025 (arXiv 2503.13305); the measures: ours",
    options=LengthExtrapolation,
    procedure=run,
    requires=partial(require_distances, "length_extrapolation"),
    matrices=11,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    table=table,
    legend=(
        "times: the how-many-th training length; frechet: distance of attention outputs to those inside, over their "
        "variance; noise level: that of a split of the inside; norm ratio: mean |o| over that inside; entropy in nats."
    ),
)
