"""Beyond the training length: do outputs stay in their distribution, and at what loss?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.capturing import run_capture
from tl_posgen.models.loss import losses_of, prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.wrapped import wrap
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_whole
from tl_posgen.position.decomposition.pair_moments import row_blocks
from tl_posgen.position.distance.hooks import require_distances
from tl_posgen.position.length.hooks import interpolate_positions, lm_infinite, retrieve_blocks
from tl_posgen.position.length.length_figures import ATTENTION, FIGURES
from tl_posgen.position.length.output_drift import OutputMoments, entropy_and_normaliser, output_drift
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import mean_and_ends, with_ends
from tl_posgen.report.sentences import null_of, said
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

NAME = "length_extrapolation"
CONDITIONS = {
    "vanilla": "Untouched",
    "lm_infinite": "LM-Infinite",
    "retrieval": "Block retrieval",
    "interpolation": "Position interpolation",
}
DRIFT = ("frechet", "mahalanobis", "norm_ratio", "off_axes")
BINS_INSIDE = 4
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

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        runs = {}
        for condition in tqdm(hooks_of, desc=f"length, {label}", unit="condition", disable=not job.progress):
            runs[condition], hooks = Run(inside), hooks_of[condition](other)
            for prompt in tokens:
                runs[condition].add(other, prompt, hooks, where)
        return dataset_of(runs, inside).assign_attrs(model=label)

    return job.result(request, model, list(tokens), of_model)


HOOKS: dict[str, Callable[..., HookList]] = {
    "vanilla": lambda options, inside, where, model: [],
    "lm_infinite": lambda options, inside, where, model: lm_infinite(model, inside, options.n_global, **where),
    "retrieval": lambda options, inside, where, model: retrieve_blocks(
        model, inside, options.n_global, block=options.block, n_blocks=options.n_blocks, **where
    ),
    "interpolation": lambda options, inside, where, model: interpolate_positions(model, 1 / options.times, **where),
}


class Run:
    """Every prompt under one condition: what is kept of the forward passes.

    Attributes:
        losses: of each prompt, nats per target.
        rows: entropy and normaliser, [head, bin] of each prompt and layer.
        heads: by layer, those that were captured.
        halves: by (layer, parity of the prompt), moments of the outputs in the second half of the training length.
        segments: by (layer, segment), moments of the outputs of each multiple of the training length; of the first, of
            its second half only, so that it is compared like with like.
    """

    def __init__(self, inside: int):
        self.inside = inside
        self.losses: list[np.ndarray] = []
        self.rows = HeadRows()
        self.heads: dict[int, list[int]] = {}
        self.halves: dict[tuple[int, int], OutputMoments] = {}
        self.segments: dict[tuple[int, int], OutputMoments] = {}

    def add(self, model: Model, prompt: Int[Tensor, " pos"], hooks: HookList, where: Mapping[str, Any]) -> None:
        """Run one prompt and keep what is measured of it."""
        needs = frozenset({"v", "attn_scores", "pattern", "logits"})
        tokens, every_layer = prompt[None].to(next(model.parameters()).device), partial(self.take, len(self.losses))
        with model.hooks(fwd_hooks=hooks):
            logits = run_capture(model, tokens, every_layer, needs, **where)
        assert logits is not None
        self.losses.append(losses_of(logits, tokens)[0].cpu().numpy())

    def take(self, number: int, capture: LayerCapture) -> None:
        """One layer of prompt `number`, a block of its rows at a time."""
        assert capture.v is not None
        layer, inside, n, capture.prompt = capture.layer, self.inside, capture.length, number
        self.heads[layer] = list(capture.heads)
        blocks = []
        for start, stop in row_blocks(len(capture.heads), n):
            pattern = capture.pattern_rows(start, stop)
            attention = entropy_and_normaliser(capture.attn_score_rows(start, stop), pattern)
            blocks.append((pattern @ capture.v[:, :stop], *attention))
        o, *by_query = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
        reference = OutputMoments.of(o[:, inside // 2 : inside])
        add_to(self.halves, (layer, number % 2), reference)
        add_to(self.segments, (layer, 0), reference)
        for start in range(inside, n, inside):
            add_to(self.segments, (layer, start // inside), OutputMoments.of(o[:, start : start + inside]))
        ranges = bins(n, inside)
        by_bin = (torch.stack([one[:, start:stop].mean(-1) for start, stop in ranges], -1) for one in by_query)
        self.rows.add(capture, **dict(zip(ATTENTION, by_bin, strict=True)))


def add_to(sums: dict[tuple[int, int], OutputMoments], key: tuple[int, int], moments: OutputMoments) -> None:
    sums[key] = sums[key] + moments if key in sums else moments


def bins(n: int, inside: int) -> list[tuple[int, int]]:
    """Query ranges: four equal ones per training length."""
    step = inside // BINS_INSIDE
    return [(start, min(start + step, n)) for start in range(0, n - 1, step)]


def dataset_of(runs: Mapping[str, Run], inside: int) -> xr.Dataset:
    """Loss by bin and segment; of every head, what its attention and its outputs do there."""
    losses = np.array([run.losses for run in runs.values()])  # target t is predicted by query t, so the last has none
    n = losses.shape[-1] + 1
    ranges = bins(n, inside)
    by_bin = np.stack([losses[..., start:stop].mean(-1) for start, stop in ranges], -1)
    by_segment = [losses[..., start : start + inside].mean((1, 2)) for start in range(0, n, inside)]
    data = xr.Dataset(
        mean_and_ends("loss", np.moveaxis(by_bin, 1, 0), ("condition", "bin"))
        | {"loss_segment": (("condition", "segment"), np.stack(by_segment, -1))},
        {"condition": list(runs), "bin": [start for start, _ in ranges], "segment": range(n // inside)},
        {"rows": ["condition", "segment"], "inside": inside},
    )
    for name in ATTENTION:
        of_runs = [run.rows.array(name, "bin").mean("prompt").assign_coords(bin=data["bin"]) for run in runs.values()]
        data[name] = xr.concat(of_runs, data["condition"])
    drifts = [drift_of(run, runs["vanilla"], n // inside) for run in runs.values()]
    return data.merge(xr.concat([drift[list(DRIFT)] for drift in drifts], data["condition"])).assign(
        noise_level=drifts[0]["noise_level"].isel(segment=0)
    )


def drift_of(run: Run, vanilla: Run, times: int) -> xr.Dataset:
    """A condition's segments against the untouched model inside, whose halves are the even and the odd prompts."""
    layers = []
    for layer, heads in run.heads.items():
        halves = (vanilla.halves[layer, 0], vanilla.halves[layer, 1])
        drifts = [output_drift(halves, run.segments[layer, segment]) for segment in range(times)]
        columns = {name: torch.stack([one[name] for one in drifts], -1) for name in drifts[0]}
        data = {name: (("head", "segment"), column.cpu().numpy()) for name, column in columns.items()}
        layers.append(xr.Dataset(data, {"layer": layer, "head": heads, "segment": range(times)}))
    found = xr.concat(layers, "layer", join="outer")
    assert isinstance(found, xr.Dataset)
    return found


# What is shown


def within_noise(frechet: xr.DataArray, noise_level: xr.DataArray) -> xr.DataArray:
    """Share of heads whose outputs are no further off than those of two halves of the prompts are from each other."""
    return (frechet <= noise_level).where(frechet.notnull()).mean(("layer", "head"))


def summarise(data: xr.Dataset) -> Summary:
    """`<name>_<condition>`: of the mean over the segments beyond the training length, the share of heads within the
    noise level, the medians over heads, and the loss; `loss_last_<condition>` in the last segment. None where nothing
    lies beyond."""
    beyond = data[["loss_segment", "frechet", "norm_ratio"]].isel(segment=slice(1, None)).mean("segment")
    columns = {
        "loss_beyond": beyond["loss_segment"],
        "loss_last": data["loss_segment"].isel(segment=-1),
        "within_noise": within_noise(beyond["frechet"], data["noise_level"]),
        "frechet": beyond["frechet"].median(("layer", "head")),
        "norm_ratio": beyond["norm_ratio"].median(("layer", "head")),
    }
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
    }


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    if own["times"] < 2:
        return ["Nothing was run beyond the training length."]
    forms = {"loss_beyond": ".2f", "within_noise": ".0%", "frechet": ".2f", "norm_ratio": ".2f"}

    def told(condition: str) -> str:
        keys = {name: f"{name}_{condition}" for name in forms}
        loss, share, frechet, ratio = (said(own[key], forms[name]) for name, key in keys.items())
        beside = [null_of(null, key, forms[name]).removeprefix("random init ") for name, key in keys.items()]
        random = "no null measured" if null is None else "random init " + ", ".join(beside)
        return (
            f"loss {loss}, outputs within the noise level in {share} of heads, Frechet {frechet}, norm ratio {ratio} "
            f"({random})"
        )

    noise = f"{said(own['noise_level'], '.2f')} ({null_of(null, 'noise_level', '.2f')})"
    return [
        *(f"{CONDITIONS[one]}, beyond the training length: {told(one)}." for one in own["conditions"]),
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
    "entropy": Variable("entropy of attention", "nats", "- sum_j p_ij ln p_ij, mean over the bin", BIN),
    "normaliser": Variable("normaliser", "logits", "ln sum_j exp(score_ij), mean over the bin", BIN),
    "frechet": Variable("Frechet distance", "", "to the outputs inside, over the variance inside", SEGMENT),
    "mahalanobis": Variable("Mahalanobis distance", "", "root mean square, over that inside: 1 is no drift", SEGMENT),
    "norm_ratio": Variable("norm ratio", "", "mean |o| over mean |o| inside", SEGMENT),
    "off_axes": Variable("share off the axes", "", "of the outputs' mean square, outside the axes inside", SEGMENT),
    "noise_level": Variable("noise level", "", "Frechet distance between two halves of the outputs inside"),
}

MEASURE = Measure(
    name=NAME,
    question="Beyond the training length, do the outputs stay where they were?",
    explanation=(
        "Prompts of several training lengths: untouched, with LM-Infinite's windows, with retrieved blocks besides, "
        "and with interpolated positions. Outputs o of every head are compared with those inside the training length; "
        "the noise level is the distance between the outputs of two halves of the prompts there."
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
)
