"""Beyond the training length: do outputs stay in their distribution, and at what loss?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.extension.table import WORDS, ContextRuleName, ExtensionSettings, hooks_of
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import losses_of_logits
from tl_posgen.models.memory import fits_pass
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.length.length_extrapolation_figure import draw_outputs
from tl_posgen.position.length.numbers import (
    OutputMoments,
    OutputPlane,
    entropy_and_normaliser,
    output_drift,
    output_plane,
)
from tl_posgen.report.kinds import lines

SHORT = 256  # tokens
N_PROMPTS = 4  # of one text, where n_prompts is left out: few have more prompts of several training lengths
_BINS_INSIDE = 4
LEAST = 2 * _BINS_INSIDE
_KEPT_INSIDE = 64  # positions per training length whose outputs are kept in the shown layers
_DRIFT = ("frechet", "mahalanobis", "norm_ratio")
_ATTENTION = ("entropy", "normaliser")
TOLERATED = 0.05  # of the variance inside; a tolerance, as without drift half of the heads are above their noise level
SEGMENT, BIN = ("condition", *HEAD, "segment"), ("condition", *HEAD, "bin")
_POINT = ("condition", "shown_layer", "prompt", "position", "axis")
_PLANE = (
    "of a layer's heads side by side, on the first two principal components of the unchanged model's in the second "
    "half of the training length; up to 64 positions of each training length"
)
Condition = Literal["unchanged", ContextRuleName]


def _in_training_lengths(inside: int, attrs: Mapping[str, Any]) -> str:
    """Return a length beside the training length, where it is another.

    Example:
        >>> _in_training_lengths(256, {"training_length": 8192})
        '256 tokens (trained on 8,192)'
    """
    trained = attrs.get("training_length", inside)
    return "the training length" if inside == trained else f"{inside:,} tokens (trained on {trained:,})"


def within_noise(frechet: xr.DataArray, noise_level: xr.DataArray) -> xr.DataArray:
    """Return the share of heads whose outputs are, up to what is tolerated, as close to those inside as two halves of
    the prompts there are to each other."""
    return (frechet - noise_level <= TOLERATED).where(frechet.notnull()).mean(HEAD)


def _by_condition(**titles: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function of a result to panels with a curve a condition, from the names of variables to titles; of the
    drift of outputs the median over heads, of their distance as a multiple of the noise level."""

    def drawn(numbers: Numbers, name: str, condition: str) -> xr.DataArray:
        array = numbers.array(name, condition=condition)
        if name == "frechet":
            array = array / numbers.array("noise_level")
        return array.median(HEAD) if name in _DRIFT else array

    def of_result(result: Any) -> dict[str, Any]:
        conditions = result.trained["condition"].values.tolist()
        curves = {
            name: [
                (result.measure.in_words(condition), partial(drawn, name=name, condition=condition))
                for condition in conditions
            ]
            for name in titles
        }
        return {title: curves[name] for name, title in titles.items()}

    return of_result


def _length(result: Any) -> str:
    return f"inside: {_in_training_lengths(result.measure.inside, result.trained.attrs)}"


@dataclass(frozen=True)
class LengthExtrapolation(Measure):
    """Frechet distance of outputs o = pattern v beyond the training length to those inside, over the variance inside;
    and entropy, normaliser ln sum exp and loss by position, on prompts of `times` the training length.

    Prompts are several training lengths long. The model runs unchanged, with LM-Infinite's windows, with retrieved
    blocks besides, or with interpolated positions, and the outputs o of every head are compared with those inside the
    training length. The noise level is the distance between the outputs of two halves of the prompts inside. A head is
    within it if it is further by at most 0.05 of the variance inside; without drift the two distances are equal in
    expectation, at any number of prompts. The first, the middle and the last layer are drawn in the plane of their two
    principal components inside.

    Conditions: "unchanged"; "lm_infinite" (global and local windows, distances frozen at the training length);
    "retrieval" (the same and the best hidden blocks, in InfLLM's manner); "interpolation" (positions times 1 / times);
    and the others of `tl_posgen.extension.table.CONTEXT_RULES`, such as "hold_planes" and "yarn".
    Segments are the multiples of the training length. Outputs are compared with those of the unchanged model in the
    second half of the training length (early queries see few keys and are another distribution anyway), always one half
    of the prompts with the other, and as many positions with as many.

    A text is cut into prompts of times x inside tokens, 4 of them if `n_prompts` is left out; `length` is left out, or
    equal to `inside`. `layers` and `heads` choose what is edited and measured. With another `inside` than the training
    length, `inside` stands for it everywhere.

    Args:
        inside: the training length; if left out cfg.n_ctx, or 256 where `times` that do not fit into memory.
        times: length of the prompts, in training lengths.
        conditions: rules of context extension; "unchanged" is always among them.
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
        >>> result = measure(model, bundled_text(), n_prompts=2, nulls=0, progress=False)
        >>> result.sel()["frechet"].dims
        ('condition', 'layer', 'head', 'segment')
    """

    inside: Annotated[int, Within(LEAST, words=f"a whole number, {LEAST} or more")] | None = None
    times: Count = 3
    conditions: Sequence[Condition] = ("unchanged", "lm_infinite", "retrieval", "interpolation")
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
        "plane_coordinates": Variable("outputs in their principal plane", "standard deviations inside", _PLANE, _POINT),
        "plane_share": Variable("share of the plane", "", "of the variance of the outputs inside", ("shown_layer",)),
        "noise_level": Variable("noise level", "", "Frechet distance between two halves of the outputs inside"),
    }
    legend = (
        "times: the how-many-th training length; frechet: distance of attention outputs to those inside, over their "
        "variance; noise level: that of a split of the inside; within noise: heads at most 0.05 above theirs; norm "
        "ratio: mean |o| over that inside; entropy in nats."
    )
    words = WORDS
    whole_model = frozenset({"loss", "outputs"})
    figures = {
        "loss": lines(
            _by_condition(loss="loss, nats per token"),
            "bin",
            title="Loss beyond the training length",
            subtitle=_length,
            x_title="position",
        ),
        "drift": lines(
            _by_condition(
                frechet="Frechet distance / noise level",
                mahalanobis="Mahalanobis, of the inside's",
                norm_ratio="norm, of the inside's",
            ),
            "segment",
            title="Drift of the outputs",
            subtitle="outputs o of each head against the unchanged model's inside; median over heads; 1: no drift",
            x_title="training lengths before",
        ),
        "outputs": draw_outputs,
        "attention": lines(
            _by_condition(entropy="entropy, nats", normaliser="normaliser, ln sum exp"),
            "bin",
            title="Attention beyond the training length",
            subtitle=_length,
            x_title="position",
        ),
    }

    def prompt_tokens(
        self, session: Session, prompts: Any, length: int | None, n_prompts: int | None, consecutive: bool = False
    ) -> Sequence[Tensor]:
        inside = self.inside_for(session)
        if length not in (None, inside):
            raise InputError(
                f"length {length}: length_extrapolation cuts prompts of times x inside = {self.times} x {inside} "
                f"tokens; leave length out, or set LengthExtrapolation(inside={length})"
            )
        n = inside * self.times
        session.require_length(n)
        wanted = N_PROMPTS if n_prompts is None and isinstance(prompts, str) else n_prompts
        rows = to_prompts(session, prompts, n, wanted, consecutive=consecutive)
        if len(rows) < 2:
            raise InputError(f"{self.name}: the noise level needs two prompts at least, not n_prompts={len(rows)}")
        return rows

    def requires(self, session: Session) -> None:
        session.require_relative_positions(self.name)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "LengthExtrapolation":
        return replace(self, inside=self.inside_for(session))

    def inside_for(self, session: Session) -> int:
        """Return `inside`; where it is left out the training length, or SHORT where prompts do not fit into memory."""
        trained = int(session.model.cfg.n_ctx)
        fits = fits_pass(session, self.times * trained, is_streamed=False, matrices=self.matrices)
        return self.inside or (trained if fits else min(trained, SHORT))

    def refuse(self, run: Run) -> None:
        self.hooks(run)

    def hooks(self, run: Run) -> dict[str, Any]:
        """Return the hooks of every condition."""
        trained = len(run.rows[0]) // self.times
        options: dict[str, Any] = {"n_global": self.n_global, "block": self.block, "n_blocks": self.n_blocks}
        extended = ExtensionSettings(trained, self.times, **options)
        rules: list[Any] = [condition for condition in self.conditions if condition != "unchanged"]
        return {"unchanged": []} | {rule: hooks_of(rule, run.session, extended, run.where) for rule in rules}

    def of_model(self, run: Run) -> xr.Dataset:
        n, session, where = len(run.rows[0]), run.session, run.where
        inside, hooks = n // self.times, self.hooks(run)
        layers = list(run.heads)
        shown_layers = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        step, width = -(-inside // _KEPT_INSIDE), inside // _BINS_INSIDE
        kept_positions, starts = torch.arange(step - 1, n, step), range(0, n - 1, width)
        reference = (kept_positions >= inside // 2) & (kept_positions < inside)
        planes, of_condition = dict[int, OutputPlane](), dict[str, Sums]()
        halves: dict[int, tuple[OutputMoments, OutputMoments]] = {}  # by layer, of the unchanged outputs inside

        def cell(condition: str) -> Mapping[str, xr.DataArray]:
            moments: dict[tuple[int, int, int], OutputMoments] = {}  # by layer, parity of the prompt and segment
            outputs: dict[int, list[Tensor]] = {layer: [] for layer in shown_layers}  # of each prompt [position, d]
            losses, sums = list[np.ndarray](), run.sums()
            of_condition[condition] = sums

            def add_layer(number: int, layer: LayerCapture) -> None:
                assert layer.v is not None
                blocks = []
                for start, stop in layer.query_blocks():
                    pattern = layer.pattern_rows(start, stop)
                    attention = entropy_and_normaliser(layer.attn_score_rows(start, stop), pattern)
                    blocks.append((pattern @ layer.v[:, :stop], *attention))
                o, *by_query = (torch.cat(of_blocks, 1) for of_blocks in zip(*blocks, strict=True))
                if layer.layer in outputs:
                    outputs[layer.layer].append(o[:, kept_positions].transpose(0, 1).flatten(1).cpu())
                for segment in range(self.times):  # the second half of each multiple of the training length
                    second_half = o[:, segment * inside + inside // 2 : (segment + 1) * inside]
                    place, of_segment = (layer.layer, number % 2, segment), OutputMoments.from_outputs(second_half)
                    moments[place] = moments[place] + of_segment if place in moments else of_segment
                bins = [torch.stack([values[:, at : at + width].mean(-1) for at in starts], -1) for values in by_query]
                layer.prompt = number
                sums.add_layer(layer, dict(zip(_ATTENTION, bins, strict=True)))

            for number, row in enumerate(run.rows):
                tokens = row[None].to(session.device)
                with session.under(hooks[condition]):
                    needs = frozenset({"v", "attn_scores", "pattern", "logits"})
                    logits = run_capture(session, tokens, partial(add_layer, number), needs, **where)
                assert logits is not None
                losses.append(losses_of_logits(session, logits, tokens, per_token=True)[0].cpu().numpy())
            if condition == "unchanged":  # which comes first
                halves.update({layer: (moments[layer, 0, 0], moments[layer, 1, 0]) for layer in layers})
                planes.update(
                    {at: output_plane(torch.stack(o)[:, reference].flatten(0, 1)) for at, o in outputs.items()}
                )
            drift = {}
            for layer, unchanged in halves.items():
                halves_by_segment = [(moments[layer, 0, at], moments[layer, 1, at]) for at in range(self.times)]
                drifts = [output_drift(unchanged, beyond_halves) for beyond_halves in halves_by_segment]
                drift[layer] = {name: torch.stack([of_segment[name] for of_segment in drifts], -1) for name in _DRIFT}
            loss = np.array(losses)  # query t predicts target t, so the last has none
            by_bin = np.stack([loss[:, start : min(start + width, n)].mean(-1) for start in starts], -1)
            by_segment = np.stack([loss[:, start : start + inside].mean(-1) for start in range(0, n, inside)], -1)
            points = np.stack([[planes[at].coordinates(o).numpy() for o in prompts] for at, prompts in outputs.items()])
            labels = {"shown_layer": shown_layers, "position": kept_positions.numpy()}
            return {
                "loss": xr.DataArray(by_bin, {"bin": starts}, ("prompt", "bin")),
                "segment_loss": xr.DataArray(by_segment, {"segment": range(self.times)}, ("prompt", "segment")),
                **{name: sums.mean(name, (*HEAD, "bin")).assign_coords(bin=starts) for name in _ATTENTION},
                **{str(name): array for name, array in sums.variables_of(drift, (*HEAD, "segment")).items()},
                "plane_coordinates": xr.DataArray(points, labels, ("shown_layer", "prompt", "position", "axis")),
            }

        data = run.grid(cell, condition=list(hooks))
        noise = {layer: {"noise_level": output_drift(split, split)["noise_level"]} for layer, split in halves.items()}
        return (
            data.merge(of_condition["unchanged"].variables_of(noise))
            .assign_attrs(training_length=int(run.model.cfg.n_ctx))
            .assign(
                plane_coordinates=data["plane_coordinates"].astype(np.float32),
                plane_share=("shown_layer", [plane.share for plane in planes.values()]),
            )
        )

    def beyond(self, numbers: Numbers, condition: str) -> dict[str, Number]:
        """Return the numbers of one condition, means of the segments beyond the training length: loss, its rise over
        the unchanged model's inside, and the share of heads within the noise level."""
        names = ("segment_loss", "frechet")
        at = {
            name: numbers.array(name, condition=condition).isel(segment=slice(1, None)).mean("segment")
            for name in names
        }
        inside = numbers.array("segment_loss", condition="unchanged").sel(segment=0)
        return {
            "loss": numbers.number(at["segment_loss"]),
            "rise": numbers.number(at["segment_loss"] - inside),
            "within_noise": numbers.number(within_noise(at["frechet"], numbers.array("noise_level"))),
        }

    def findings(self, numbers: Numbers) -> list[str]:
        assert self.inside is not None
        length = _in_training_lengths(self.inside, numbers.attrs)
        if self.times < 2:
            return [f"Nothing was run beyond {length}."]
        sentences = []
        for condition in numbers.data["condition"].values.tolist():
            beyond = self.beyond(numbers, condition)
            sentences.append(
                f"Beyond {length}, {self.in_words(condition)}: the loss is {beyond['loss'].plain:.2f}, "
                f"{beyond['rise']:+.2f} against the unchanged model's inside it; the outputs of "
                f"{beyond['within_noise']:.0%} of heads stay in their distribution."
            )
        inside = numbers("segment_loss", condition="unchanged", segment=0)
        noise = numbers.number(numbers.array("noise_level").median(HEAD))
        return [
            *sentences,
            "Outputs of a head stay in their distribution where their Frechet distance to the unchanged model's inside "
            f"is at most {TOLERATED} above that between two halves of the prompts there, {noise:.2f} in the median "
            f"head. The unchanged model's loss inside is {inside:.2f}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition and multiple of the training length: loss, medians over heads, mean entropy."""
        assert self.inside is not None
        segment = (numbers.data["bin"] // self.inside).rename("segment")
        frechet, noise = numbers.array("frechet"), numbers.array("noise_level")
        columns = {
            "loss": numbers.array("segment_loss"),
            "frechet": frechet.median(HEAD),
            "noise_level": noise.median(HEAD),
            "within_noise": within_noise(frechet, noise),
            "norm_ratio": numbers.array("norm_ratio").median(HEAD),
            "entropy": numbers.array("entropy").mean(HEAD).groupby(segment).mean(),
        }
        frame = numbers.frame(columns, "condition", "segment")
        frame["segment"] += 1
        return frame.rename(columns={"segment": "times"})
