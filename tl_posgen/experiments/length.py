"""Beyond the training length: do outputs stay in their distribution, and at what loss?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.loss import losses_of, prompts_of_one_length, require_length
from tl_posgen.interventions.interpolation import interpolate_positions
from tl_posgen.interventions.lm_infinite import lm_infinite
from tl_posgen.interventions.retrieval import retrieve_blocks
from tl_posgen.interventions.scores import HookList
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.output_drift import OutputMoments, entropy_and_normaliser, output_drift
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import capture_hooks
from tl_posgen.models.probe import unpadded
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result

ARMS = ("vanilla", "lm_infinite", "retrieval", "interpolation")
DRIFT = ("frechet", "floor", "mahalanobis", "norm_ratio", "off_axes")
BINS_INSIDE = 4


def length(
    model: Model,
    prompts: Any,
    *,
    inside: int | None = None,
    times: int = 4,
    n_prompts: int | None = 4,
    arms: Sequence[str] = ARMS,
    n_global: int = 10,
    block: int = 16,
    n_blocks: int = 4,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    """Prompts of `times` the training length, under every arm: outputs o = pattern v, entropy, normaliser, loss.

    Arms: "vanilla"; "lm_infinite" (global and local windows, distances frozen at the training length); "retrieval"
    (the same and the best hidden blocks, in InfLLM's manner); "interpolation" (positions times 1 / times).

    Args:
        inside: the training length; cfg.n_ctx if left out.
        n_global, block, n_blocks: of `lm_infinite` and `retrieve_blocks`.
        null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "length". Over (arm, layer, head, segment), segments being the multiples of the training length:
        `frechet`, `floor`, `mahalanobis`, `norm_ratio`, `off_axes` of the segment's outputs against those of the
        untouched model in the second half of the training length (see `maths.output_drift`; early queries see few keys
        and are another distribution anyway), the floor from two halves of the prompts. Over (arm, layer, head, bin):
        `entropy` in nats and `normaliser`, ln sum exp. Over (arm, bin): `loss` by position, with the 95 % bootstrap
        interval over prompts `loss_low`, `loss_high`. `bin` is the first query of a bin. Over (arm, segment):
        `loss_segment`.

    Raises:
        InputError: unusable prompts, a text too short, a model that cannot run prompts of this length, unknown arms.

    Source: the claim is of Han & Ji 2025 (arXiv 2503.13305); the measures are ours.
    """
    inside = int(model.cfg.n_ctx) if inside is None else inside
    if inside < 2 * BINS_INSIDE or times < 1:
        raise InputError(f"inside {inside}: at least {2 * BINS_INSIDE} tokens; times {times}: at least 1")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise InputError(f"arm {unknown[0]!r}: choose from {', '.join(ARMS)}")
    require_length(model, inside * times)
    tokens = prompts_of_one_length(model, prompts, inside * times, n_prompts, beyond=True)
    if len(tokens) < 2:
        raise InputError("length: the noise floor needs two prompts at least")
    options = {"inside": inside, "times": times, "arms": ["vanilla", *(arm for arm in arms if arm != "vanilla")]}
    windows = {"n_global": n_global, "block": block, "n_blocks": n_blocks}
    dataset = measured(model, tokens, **options, windows=windows, progress=progress, label=model_label(model))
    null = None
    if null_seed is not None:
        twin, label = random_like(model, null_seed), null_label(null_seed)
        null = measured(twin, tokens, **options, windows=windows, progress=progress, label=label)
    return Result("length", dataset, null, provenance_of(model, list(tokens), null_seed) | windows | {"inside": inside})


def hooks_of(model: Model, arm: str, inside: int, times: int, windows: dict[str, int]) -> HookList:
    if arm == "lm_infinite":
        return lm_infinite(model, inside, windows["n_global"])
    if arm == "retrieval":
        block, n_blocks = windows["block"], windows["n_blocks"]
        return retrieve_blocks(model, inside, windows["n_global"], block=block, n_blocks=n_blocks)
    return interpolate_positions(model, 1 / times) if arm == "interpolation" else []


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    *,
    inside: int,
    times: int,
    arms: list[str],
    windows: dict[str, int],
    progress: bool,
    label: str,
) -> xr.Dataset:
    runs = [
        [Run(model, prompt, hooks_of(model, arm, inside, times, windows), inside) for prompt in tokens]
        for arm in tqdm(arms, desc=f"length, {label}", unit="arm", disable=not progress)
    ]
    losses = np.array([[run.loss_by_bin for run in of_arm] for of_arm in runs])
    low, high = bootstrap_interval(np.moveaxis(losses, 1, 0))
    by_bin = ("arm", "bin")
    per_head = ("arm", "layer", "head")
    segment = np.array([[run.loss_by_segment for run in of_arm] for of_arm in runs]).mean(1)
    data = {
        "loss": (by_bin, losses.mean(1)),
        "loss_low": (by_bin, low),
        "loss_high": (by_bin, high),
        "loss_segment": (("arm", "segment"), segment),
    }
    for name in ("entropy", "normaliser"):
        values = np.array([np.mean([getattr(run, name) for run in of_arm], axis=0) for of_arm in runs])
        data[name] = ((*per_head, "bin"), values)
    for name, values in drifts(runs, times).items():
        data[name] = ((*per_head, "segment"), values)
    coords = {
        "arm": arms,
        "layer": range(model.cfg.n_layers),
        "head": range(model.cfg.n_heads),
        "segment": range(times),
        "bin": [start for start, _ in bins(tokens.shape[1], inside)],
    }
    return xr.Dataset(data, coords, {"rows": ("arm", "segment"), "model": label, "inside": inside})


class Run:
    """One prompt under one arm: what is kept of its forward pass.

    Attributes:
        reference: by layer, moments of the outputs in the second half of the training length.
        segments: by layer, moments of the outputs of each multiple of the training length.
        entropy, normaliser: [layer, head, bin]. loss_by_bin, loss_by_segment: nats per token.
    """

    def __init__(self, model: Model, prompt: Int[Tensor, " pos"], hooks: HookList, inside: int):
        self.inside = inside
        self.reference: list[OutputMoments] = []
        self.segments: list[list[OutputMoments]] = []
        self._rows: dict[str, list[np.ndarray]] = {"entropy": [], "normaliser": []}
        needs = frozenset({"v", "attn_scores", "pattern"})
        tokens = prompt[None].to(next(model.parameters()).device)
        both = hooks + capture_hooks(model, self._take, needs)
        with torch.no_grad(), model.hooks(fwd_hooks=both):
            logits = model(tokens, return_type="logits", **unpadded(model, tokens))
        loss = losses_of(logits, tokens)[0].cpu()
        n = len(prompt)
        # target t is predicted by query t, so the last query predicts nothing
        self.loss_by_bin = [float(loss[start:stop].mean()) for start, stop in bins(n, inside)]
        self.loss_by_segment = [float(loss[start : start + inside].mean()) for start in range(0, n, inside)]
        self.entropy, self.normaliser = (np.stack(self._rows[name]) for name in ("entropy", "normaliser"))

    def _take(self, capture: LayerCapture) -> None:
        assert capture.v is not None
        assert capture.pattern is not None
        assert capture.attn_scores is not None
        o = capture.pattern @ capture.v
        n, inside = o.shape[1], self.inside
        self.reference.append(OutputMoments.of(o[:, inside // 2 : inside]))
        self.segments.append([OutputMoments.of(o[:, start : start + inside]) for start in range(0, n, inside)])
        # the second half only: the first segment is compared like with like
        self.segments[-1][0] = self.reference[-1]
        measures = [
            entropy_and_normaliser(capture.attn_scores[:, start:stop, :stop], capture.pattern[:, start:stop, :stop])
            for start, stop in bins(n, inside)  # keys behind the last query of a bin are invisible to all of it
        ]
        for name, by_bin in zip(("entropy", "normaliser"), zip(*measures, strict=True), strict=True):
            self._rows[name].append(torch.stack([values.mean(-1) for values in by_bin], -1).cpu().numpy())


def bins(n: int, inside: int) -> list[tuple[int, int]]:
    """Query ranges: four equal ones per training length."""
    step = inside // BINS_INSIDE
    return [(start, min(start + step, n)) for start in range(0, n - 1, step)]


def drifts(runs: list[list[Run]], times: int) -> dict[str, Float[np.ndarray, "arm layer head segment"]]:
    """Every arm's segments against the untouched model inside, whose halves are the even and the odd prompts."""
    vanilla = runs[0]
    n_layers = len(vanilla[0].reference)
    found = {name: [] for name in DRIFT}
    for of_arm in runs:
        rows = {name: [] for name in DRIFT}
        for layer in range(n_layers):
            halves = [added([run.reference[layer] for run in vanilla[parity::2]]) for parity in (0, 1)]
            drift = [
                output_drift((halves[0], halves[1]), added([run.segments[layer][segment] for run in of_arm]))
                for segment in range(times)
            ]
            for name in DRIFT:
                rows[name].append(torch.stack([getattr(one, name) for one in drift], -1).cpu().numpy())
        for name in DRIFT:
            found[name].append(np.stack(rows[name]))
    return {name: np.stack(values) for name, values in found.items()}


def added(moments: Sequence[OutputMoments]) -> OutputMoments:
    total = moments[0]
    for one in moments[1:]:
        total = total + one
    return total
