"""Beyond the training length: do outputs stay in their distribution, and at what loss?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.memory import fits_pass
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import session_of
from tl_posgen.position.distance.hooks import require_distances
from tl_posgen.position.length.condition_runs import BINS_INSIDE, ConditionRun, plane_noise
from tl_posgen.position.length.hooks import interpolate_positions, lm_infinite, retrieve_blocks
from tl_posgen.position.length.length_figures import FIGURES, WORDS, in_training_lengths

SHORT = 256  # tokens
N_PROMPTS = 4  # of one text, where n_prompts is left out: few have more prompts of several training lengths
LEAST = 2 * BINS_INSIDE
TOLERATED = 0.05  # of the variance inside; a tolerance, as without drift half of the heads are above their noise level
SEGMENT, BIN = ("condition", *HEAD, "segment"), ("condition", *HEAD, "bin")
POINT = ("condition", "shown_layer", "prompt", "position", "axis")
DEVIATIONS = "standard deviations inside"
PLANE = (
    "of a layer's heads side by side, on the first two principal components of the unchanged model's in the second "
    "half of the training length; up to 64 positions of each training length"
)
Condition = Literal["vanilla", "lm_infinite", "retrieval", "interpolation"]


@dataclass(frozen=True)
class LengthExtrapolation(Measure):
    """Frechet distance of outputs o = pattern v beyond the training length to those inside, over the variance inside;
    and entropy, normaliser ln sum exp and loss by position, on prompts of `times` the training length.

    Prompts of several training lengths: unchanged, with LM-Infinite's windows, with retrieved blocks besides, and with
    interpolated positions. Outputs o of every head are compared with those inside the training length; the noise level
    is the distance between the outputs of two halves of the prompts there. A head is within it where it is at most .05
    of the variance inside further: without drift the two are equal in expectation, at any number of prompts. The first,
    the middle and the last layer are drawn in the plane of their two principal components inside.

    Conditions: "vanilla"; "lm_infinite" (global and local windows, distances frozen at the training length);
    "retrieval" (the same and the best hidden blocks, in InfLLM's manner); "interpolation" (positions times 1 / times).
    Segments are the multiples of the training length. Outputs are compared with those of the unchanged model in the
    second half of the training length (early queries see few keys and are another distribution anyway), always one half
    of the prompts with the other, and as many positions with as many.

    A text is cut into prompts of times x inside tokens, 4 of them if `n_prompts` is left out; `length` is left out, or
    equal to `inside`. `layers` and `heads` choose what is edited and measured. With another `inside` than the training
    length, `inside` stands for it everywhere.

    Args:
        inside: the training length; if left out cfg.n_ctx, or 256 where `times` that do not fit into memory.
        times: length of the prompts, in training lengths.
        conditions: any of the four; "vanilla" is always among them.
        n_global: first tokens that every query sees under "lm_infinite" and "retrieval".
        block: tokens of a block, under "retrieval".
        n_blocks: blocks that are retrieved.

    Raises:
        InputError: unusable prompts, a text too short, a model that cannot run prompts of this length (another backend
            may), another `length`, fewer than two prompts.
        UnsupportedModelError: learned absolute positions.

    Source: the claim is of Han & Ji 2025 (arXiv 2503.13305); the measures are ours.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.models.tokens import bundled_text
        >>> model, measure = load_model("mini", backend="bridge"), LengthExtrapolation(inside=16, times=2)
        >>> result = measure(model, bundled_text(), n_prompts=2, null_seeds=(), progress=False)
        >>> result.sel()["frechet"].dims
        ('condition', 'layer', 'head', 'segment')
    """

    inside: Annotated[int, Within(LEAST, words=f"a whole number, {LEAST} or more")] | None = None
    times: Count = 4
    conditions: Sequence[Condition] = ("vanilla", "lm_infinite", "retrieval", "interpolation")
    n_global: Whole = 10
    block: Count = 16
    n_blocks: Count = 4

    question = "Beyond the training length, do the outputs stay where they were?"
    matrices = 11
    rows = ("condition", "segment")
    variables = {
        "loss": Variable(
            "loss", "nats", "by position; a bin is named by its first query", ("condition", "prompt", "bin")
        ),
        "segment_loss": Variable(
            "loss by segment", "nats", "mean over each training length", ("condition", "prompt", "segment"), "loss"
        ),
        "entropy": Variable("entropy of attention", "nats", "- sum_j p_ij ln p_ij, mean over the bin", BIN),
        "normaliser": Variable("normaliser", "logits", "ln sum_j exp(score_ij), mean over the bin", BIN),
        "frechet": Variable("Frechet distance", "", "to the outputs inside, over the variance inside", SEGMENT),
        "mahalanobis": Variable(
            "Mahalanobis distance", "", "root mean square, over that inside: 1 is no drift", SEGMENT
        ),
        "norm_ratio": Variable("norm ratio", "", "mean |o| over mean |o| inside", SEGMENT),
        "off_axes": Variable("share off the axes", "", "of the outputs' mean square, outside the axes inside", SEGMENT),
        "plane_coordinates": Variable("outputs in their principal plane", DEVIATIONS, PLANE, POINT),
        "plane_offset": Variable(
            "offset of the centroid in the plane", DEVIATIONS, "", ("condition", "shown_layer", "segment")
        ),
        "plane_noise": Variable("offset between two halves of the prompts", DEVIATIONS, "", ("shown_layer",)),
        "plane_share": Variable("share of the plane", "", "of the variance of the outputs inside", ("shown_layer",)),
        "noise_level": Variable("noise level", "", "Frechet distance between two halves of the outputs inside"),
    }
    legend = (
        "times: the how-many-th training length; frechet: distance of attention outputs to those inside, over their "
        "variance; noise level: that of a split of the inside; within noise: heads at most .05 above theirs; norm "
        "ratio: mean |o| over that inside; offset: of the mean output in the plane of the first two principal "
        "components, in standard deviations inside; entropy in nats."
    )
    words = WORDS
    figures = FIGURES

    def prompt_tokens(
        self, model: Any, prompts: Any, length: int | None, n_prompts: int | None, consecutive: bool = False
    ) -> Sequence[Tensor]:
        inside = self.inside_for(model)
        if length not in (None, inside):
            raise InputError(
                f"length {length}: length_extrapolation cuts prompts of times x inside = {self.times} x {inside} "
                f"tokens; leave length out, or set LengthExtrapolation(inside={length})"
            )
        n = inside * self.times
        session_of(model).require_length(n)
        wanted = N_PROMPTS if n_prompts is None and isinstance(prompts, str) else n_prompts
        rows = list(prompts_of_one_length(model, prompts, n, wanted, consecutive=consecutive, beyond=True))
        if len(rows) < 2:
            raise InputError(f"{self.name}: the noise level needs two prompts at least, not n_prompts={len(rows)}")
        return rows

    def requires(self, model: Any) -> None:
        require_distances(self.name, model)

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "LengthExtrapolation":
        return replace(self, inside=self.inside_for(model))

    def inside_for(self, model: Any) -> int:
        """Return `inside`; where it is left out the training length, or SHORT where prompts do not fit into memory."""
        trained = int(model.cfg.n_ctx)
        fits = fits_pass(model, self.times * trained, is_streamed=False, matrices=self.matrices)
        return self.inside or (trained if fits else min(trained, SHORT))

    def passes(self, run: Run) -> int:
        return len(run.rows) * len({"vanilla", *self.conditions})

    def of_model(self, run: Run) -> xr.Dataset:
        inside = len(run.rows[0]) // self.times
        conditions = list(dict.fromkeys(("vanilla", *self.conditions)))
        hooks = {condition: self.hooks(run, condition) for condition in conditions}  # refusals, before work starts
        layers = list(select_heads(run.model, **run.where))
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        vanilla, planes = ConditionRun(run, inside, shown), {}

        def cell(condition: str) -> Mapping[str, xr.DataArray]:
            one = vanilla if condition == "vanilla" else ConditionRun(run, inside, shown)
            one.add_prompts(hooks[condition])
            if one is vanilla:
                planes.update(vanilla.planes())
            one.project(planes)
            return one.variables(vanilla)

        data = run.grid(cell, condition=conditions)
        data = data.assign_attrs(training_length=int(run.model.cfg.n_ctx))
        return data.assign(
            plane_coordinates=data["plane_coordinates"].astype(np.float32),
            plane_noise=plane_noise(vanilla.points(), inside),
            plane_share=("shown_layer", [plane.share for plane in planes.values()]),
            noise_level=vanilla.drift(vanilla)["noise_level"].isel(segment=0, drop=True),
        )

    def hooks(self, run: Run, condition: str) -> HookList:
        """Return the intervention of a condition."""
        windows = (run.model, len(run.rows[0]) // self.times, self.n_global)
        if condition == "lm_infinite":
            return lm_infinite(*windows, **run.where)
        if condition == "retrieval":
            return retrieve_blocks(*windows, block=self.block, n_blocks=self.n_blocks, **run.where)
        if condition == "interpolation":
            return interpolate_positions(run.model, 1 / self.times, **run.where)
        return []

    def beyond(self, own: Numbers, condition: str) -> dict[str, Number]:
        """Return the numbers of one condition, means of the segments beyond the training length: loss, its rise over
        the unchanged model's inside, and the share of heads within the noise level."""
        names = ("segment_loss", "frechet")
        at = {one: own.array(one, condition=condition).isel(segment=slice(1, None)).mean("segment") for one in names}
        inside = own.array("segment_loss", condition="vanilla").sel(segment=0)
        return {
            "loss": own.number(at["segment_loss"]),
            "rise": own.number(at["segment_loss"] - inside),
            "within_noise": own.number(within_noise(at["frechet"], own.array("noise_level"))),
        }

    def findings(self, own: Numbers) -> list[str]:
        assert self.inside is not None
        length = in_training_lengths(self.inside, own.attrs)
        if self.times < 2:
            return [f"Nothing was run beyond {length}."]
        conditions = own.data["condition"].values.tolist()
        numbers = {condition: self.beyond(own, condition) for condition in conditions}
        inside = own("segment_loss", condition="vanilla", segment=0)
        noise = own.number(own.array("noise_level").median(HEAD))
        return [
            *(f"Beyond {length}, {WORDS[one]}: {sentence_beyond(numbers[one])}." for one in conditions),
            "Outputs of a head stay in their distribution where their Frechet distance to the unchanged model's inside "
            f"is at most {TOLERATED} above that between two halves of the prompts there, {noise:.2f} in the median "
            f"head. The unchanged model's loss inside is {inside.plain:.2f}.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a condition and multiple of the training length: medians over heads, loss, mean entropy."""
        assert self.inside is not None
        segment = (own.data["bin"] // self.inside).rename("segment")
        frechet, noise = own.array("frechet"), own.array("noise_level")
        columns = {
            "loss": own.array("segment_loss"),
            "frechet": frechet.median(HEAD),
            "noise_level": noise.median(HEAD),
            "within_noise": within_noise(frechet, noise),
            "norm_ratio": own.array("norm_ratio").median(HEAD),
            "offset": own.array("plane_offset").median("shown_layer"),
            "entropy": own.array("entropy").mean(HEAD).groupby(segment).mean(),
        }
        frame = own.frame(columns, "condition", "segment")
        frame["segment"] += 1
        return frame.rename(columns={"segment": "times"})


def within_noise(frechet: xr.DataArray, noise_level: xr.DataArray) -> xr.DataArray:
    """Return the share of heads whose outputs are, up to what is tolerated, as close to those inside as two halves of
    the prompts there are to each other."""
    return (frechet - noise_level <= TOLERATED).where(frechet.notnull()).mean(HEAD)


def sentence_beyond(numbers: Mapping[str, Number]) -> str:
    """Return loss and drift of one condition."""
    return (
        f"the loss is {numbers['loss'].plain:.2f}, {numbers['rise']:+.2f} against the unchanged model's inside it; the "
        f"outputs of {numbers['within_noise']:.0%} of heads stay in their distribution"
    )
