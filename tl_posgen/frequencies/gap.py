"""A gap in the middle of a prompt: does far text do harm, and is it read?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, NonNegative, Real, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.editing.token_positions import MOST, tokens_at
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.extension.held_planes import partial_planes
from tl_posgen.extension.table import WORDS, ContextRuleName, ExtensionSettings, hooks_of
from tl_posgen.frequencies.numbers.gap import (
    apart,
    first_surely_above,
    last_surely_below,
    split_of,
    with_copy,
    with_needle,
)
from tl_posgen.interventions import Interventions
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loss import losses_of_logits, run_prompts
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import lines
from tl_posgen.stats.intervals import FEWEST

_CONTEXTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 1.5)  # gaps, where none are given, over the training context
TASKS = ("text", "copy")
ACROSS = ("condition", "gap", "prompt")


def _panels(result: Any) -> dict[str, Any]:
    """Return a panel each for text, copy and needle, with a curve a condition; beside text that without its first
    half."""
    names = {str(name): result.measure.in_words(name) for name in result.trained["condition"].values}

    def alone(numbers: Numbers) -> xr.DataArray:
        return numbers.array("alone").expand_dims(gap=numbers.data["gap"].values)

    return {
        "text": [
            *((label, "loss", {"condition": name, "task": "text"}) for name, label in names.items()),
            ("nothing before the gap", alone),
        ],
        "copy of the first half": [
            (label, "loss", {"condition": name, "task": "copy"}) for name, label in names.items()
        ],
        "recall of a needle": [(label, "recall", {"condition": name}) for name, label in names.items()],
    }


@dataclass(frozen=True)
class Gap(Interventions):
    r"""L(S) with p_i = i + S for the second half of every prompt: its loss when S positions lie between the halves.

    The second half of a short prompt is put S positions further on, so that what happens at far distances, beyond the
    training context L too, is seen without long prompts. Text goes on, or the second half is a copy of the first, or it
    ends with a needle of the first half. Loss of the text above its loss without the first half is harm done by far
    tokens; loss of the copy, and recall of the needle, say whether they are read. A copy is read where it costs less
    than half of what text costs without the first half. The effective context is the largest S that was tried up to
    which, at every S, a copy is surely read, by its 95% interval over prompts; `lost` is the first at which it surely
    is not, and between the two reading stops for the first time. Losses need not rise with S: beyond a full turn a
    plane comes back to angles that the model knows, so give more gaps where you want to know. With fewer than 4 prompts
    values decide, as there are no intervals.

    The rules of far pairs are those of `tl_posgen.extension.table.CONTEXT_RULES`: planes held at a distance (see
    `hold_planes`), each at its quarter turn, or all (ReRoPE); LM-Infinite, its windows those of the training context,
    and with retrieved blocks; Self-Extend; position interpolation, NTK and YaRN. Learned positions are those of the
    model's table. Keys beyond a layer's window are hidden by the gap, and a layer without positions does not see it.

    Args:
        gaps: S, in tokens; if left out, 0 to 1.5 training contexts, of a model with learned positions as far as its
            table goes.
        rules: what is put in the place of the model's own scores; planes held, if left out and
            the model has such planes.
        planes: which planes are held: indices, or those that make less than one turn within the context, or all.
        at: the distance at which planes are held; half the training context if left out.
        factor: how many times the training context the rules of context extension are meant for.
        skip: tokens of the second half that do not count, as they have hardly any context of their own.
        needle: how many tokens a needle has; the first quarter of them is given when it comes again.

    Raises:
        InputError: prompts too short for `skip` or `needle`; gaps that the model has no positions for.
        UnsupportedModelError: a model none of whose layers knows positions; see `replace_scores`.

    Source: ours; Self-Extend: Jin et al. 2024 (arXiv 2401.01325); the other rules: see their hooks.

    Example:
        >>> short = {"length": 64, "n_prompts": 4, "nulls": 0, "progress": False}
        >>> from tl_posgen.models import bundled_text
        >>> found = Gap(gaps=(0, 256, 1024), at=128)("mini", bundled_text(), **short)
        >>> far = found.trained["loss"].sel(task="text", gap=1024).mean("prompt")
        >>> bool(far.sel(condition="unchanged") > far.sel(condition="hold_planes") + 0.5)
        True
    """

    gaps: Annotated[Sequence[Whole], Each()] | None = None
    rules: Annotated[Sequence[ContextRuleName], Each(0)] | None = None
    planes: Sequence[Whole] | Literal["partial", "all"] = "partial"
    at: NonNegative | None = None
    factor: Annotated[Real, Within(1, words="a number, 1 or more")] = 2
    skip: Whole = 8
    needle: Annotated[int, Within(2, words="a whole number, 2 or more")] = 16

    question = "Do far tokens do harm, and are they read?"
    variables = {
        "loss": Variable(
            "loss", "nats", "per token of the second half", ("condition", "task", "gap", "prompt"), headline="loss"
        ),
        "recall": Variable.share("recall of the needle", "share of its tokens that come first", ACROSS, interval=False),
        "alone": Variable("loss without the first half", "nats", "first token and second half", ("prompt",)),
        "contexts": Variable("gap over the training context", "", "", ("gap",), compared=False),
    }
    words = WORDS
    legend = (
        "near, text: loss of text at the smallest gap (without one, where 0 was tried) and at the largest; alone: "
        "without its first half; change: text - near, prompt by prompt, low and high the ends of its 95% interval; "
        "copy, recall: at the largest gap. reads: the largest gap up to which a copy costs less than half of alone; "
        "lost: the first at which it costs more; harmless, harm: likewise where text costs less and more than alone; "
        "all surely, by 95% intervals (by values below 4 prompts), among the gaps that were tried."
    )

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"task": TASKS, "gap": [] if self.gaps is None else np.asarray(self.gaps).tolist()}

    def usual(self) -> Mapping[str, Any]:
        return {**super().usual(), "task": "text", "gap": min(self.labels()["gap"], default=0)}

    def requires(self, session: Session) -> None:
        if session.encoding == "none":
            raise UnsupportedModelError(
                f"no layer of this model knows positions, so a gap changes nothing; {self.name} needs RoPE, ALiBi or "
                "learned positions"
            )

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Gap":
        n, n_ctx, encoding = len(tokens[0]), int(session.model.cfg.n_ctx), session.encoding
        if n < (shortest := 2 * max(self.needle + 1, self.skip + 2)):
            raise InputError(
                f"{self.name}: prompts of {n} tokens; give length={shortest} at least, or a smaller needle"
            )
        most = n_ctx - n if "absolute" in encoding else None
        candidates = self.labels()["gap"] or [round(share * (n_ctx if most is None else most)) for share in _CONTEXTS]
        gaps = sorted({gap for gap in candidates if self.gaps is not None or most is None or gap <= most})
        if most is not None and gaps[-1] > most:
            raise InputError(
                f"{self.name}: a gap of {gaps[-1]} in prompts of {n} tokens goes beyond this model's table of {n_ctx} "
                f"learned positions; give gaps of {most} at most"
            )
        if gaps[-1] + n - 1 > MOST:
            raise InputError(f"{self.name}: a gap of {gaps[-1]} is too wide for exact angles; give {MOST - n} at most")
        session.require_distance(f"{self.name}: gap + {n} tokens =", gaps[-1] + n - 1)
        rules = self.rules
        if rules is None:
            rotating = [geometry for geometry in geometry_of(session) if geometry.rope.rotary_dim]
            can_hold = any(self.planes != "partial" or len(partial_planes(geometry, n_ctx)) for geometry in rotating)
            rules = ("hold_planes",) if can_hold else ()
        return replace(self, gaps=tuple(gaps), rules=rules, at=n_ctx / 2 if self.at is None else self.at)

    def named_conditions(self, run: Run) -> Mapping[str, Any]:
        return super().named_conditions(run) if self.rules else {}  # the unchanged model alone

    def conditions(self, run: Run) -> Mapping[str, Any]:
        extended = ExtensionSettings(int(run.model.cfg.n_ctx), self.factor, self.planes, self.at)
        return {name: hooks_of(name, run.session, extended, run.where) for name in self.rules or ()}

    def of_model(self, run: Run) -> xr.Dataset:
        n, gaps = run.tokens.shape[1], np.array(self.labels()["gap"])
        second = torch.cat([run.tokens[:, :1], run.tokens[:, split_of(n) :]], 1)
        alone = next_tokens(run.session, second, 1 + self.skip)[0].mean(-1)
        contexts = "gap", gaps / int(run.model.cfg.n_ctx)
        return super().of_model(run).assign(alone=("prompt", alone.numpy()), contexts=contexts)

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        prompts, (n_prompts, n) = self.prompts(run), run.tokens.shape
        losses, recall = [], []
        for gap in self.labels()["gap"]:
            with tokens_at(run.session, apart(n, gap)):
                loss, is_first = next_tokens(run.session, prompts, split_of(n) + self.skip, hooks)
            text, copy, _ = loss.split(n_prompts)
            losses.append(torch.stack([text.mean(-1), copy.mean(-1)]))
            recall.append(is_first[-n_prompts:, max(1, self.needle // 4) - self.needle :].double().mean(-1))
        return {"loss": torch.stack(losses, 1).numpy(), "recall": torch.stack(recall).numpy()}

    def prompts(self, run: Run) -> Int[Tensor, "task_and_prompt pos"]:
        """Return the prompts as they are, those whose second half is a copy, and those with a needle."""
        tokens, bos = run.tokens, getattr(run.model.tokenizer, "bos_token_id", None)
        first = int({*tokens[:, 0].tolist()} <= {bos, run.session.choices.first})  # or a word of the text
        pool = tokens[:, first:].unique()
        drawn = torch.randint(len(pool), (len(tokens), self.needle), generator=torch.Generator().manual_seed(run.seed))
        return torch.cat([tokens, with_copy(tokens, first), with_needle(tokens, pool[drawn])])

    # Its numbers

    def _excess_of_copy(self, numbers: Numbers) -> xr.DataArray:
        """2 copy(S) - text without its first half, by condition and gap: below 0 a copy costs less than half of it."""
        return 2 * numbers.array("loss", condition=None, task="copy", gap=None) - numbers.array("alone")

    def _excess_of_text(self, numbers: Numbers) -> xr.DataArray:
        """Return by how much text costs more than without its first half, by condition and gap."""
        return numbers.array("loss", condition=None, task="text", gap=None) - numbers.array("alone")

    def _bracket(self, numbers: Numbers, excess: xr.DataArray) -> dict[str, tuple[float, float]]:
        """Return by condition the last gap up to which an excess is surely below 0 at every gap that was tried, and the
        first at which it is surely above: by its 95% interval, by its value where prompts are too few for one."""
        ends = {}
        for condition in numbers.data["condition"].values:
            at_gaps = numbers.along(excess.sel(condition=condition), "gap")
            lower = [number.value if math.isnan(number.low) else number.low for number in at_gaps.values()]
            upper = [number.value if math.isnan(number.high) else number.high for number in at_gaps.values()]
            ends[str(condition)] = last_surely_below([*at_gaps], upper), first_surely_above([*at_gaps], lower)
        return ends

    def findings(self, numbers: Numbers) -> list[str]:
        gaps, n_prompts = numbers.data["gap"].values.tolist(), numbers.data.sizes["prompt"]
        last, contexts = gaps[-1], Number(float(numbers.data["contexts"].values[-1])).plain
        is_read = [
            f"{self.in_words(row['condition'])}: {_copy_in_words(row, last)}, and {_harm_in_words(row, last)}"
            for row in ([] if numbers.metric else self.table(numbers).to_dict("records"))
        ]
        names = map(str, numbers.data["condition"].values)
        at_last = [f"{self.in_words(name)} {self._at(numbers, name, last)}" for name in names]
        few = f" By the values of {counted(n_prompts, 'prompt')}, too few for intervals." if n_prompts < FEWEST else ""
        beyond = f", {contexts:.2f} training contexts" if last else ""
        ends = f" {'; '.join(is_read)}.{few}" if is_read else ""
        across = f"across a gap of {gaps[0]:,} tokens" if gaps[0] else "without a gap"
        copy, text = numbers("loss", task="copy", gap=gaps[0]), numbers("loss", task="text", gap=last)
        of_nulls = (
            f"{'Loss of a' if numbers.metric else 'A'} copy {across}{'' if numbers.metric else ' costs'} "
            f"{copy.plain:.3f} ({copy.null:.3f}), text across {last:,} {text.plain:.3f} ({text.null:.3f})."
        )
        return [
            f"Gaps of up to {last:,} tokens{beyond}.{ends}",
            f"Loss of text and copy, and recall of a needle, across {last:,}: {'; '.join(at_last)}.",
            *([of_nulls] if f"{copy.null}" else []),
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition: the loss of text at the smallest gap, at the largest and without its first half,
        and the change from the smallest to the largest with the ends of its interval; at the largest the loss of a
        copy, and the needle's recall; the gaps between which a copy is no longer read, and between which harm
        begins."""
        gaps, rows = numbers.data["gap"].values.tolist(), []
        gap, alone = gaps[-1], numbers("alone").value
        near, far = (numbers.array("loss", condition=None, task="text", gap=at) for at in (gaps[0], gap))
        changes = numbers.along(far - near, "condition")
        of_copy, of_text = (
            self._bracket(numbers, excess) for excess in (self._excess_of_copy(numbers), self._excess_of_text(numbers))
        )
        for name, change in changes.items():
            (reads, lost), (harmless, harm) = of_copy[name], of_text[name]
            text, copy = (numbers("loss", condition=name, task=task, gap=gap).value for task in TASKS)
            row = {"condition": name, "near": numbers("loss", condition=name, task="text", gap=gaps[0]).value}
            row |= {"text": text, "alone": alone, "change": change.value, "low": change.low, "high": change.high}
            row |= {"copy": copy, "recall": numbers("recall", condition=name, gap=gap).value}
            rows.append(row | {"reads": reads, "lost": lost, "harmless": harmless, "harm": harm})
        return pd.DataFrame(rows)

    def _at(self, numbers: Numbers, condition: str, gap: int) -> str:
        text, copy = (numbers("loss", condition=condition, task=task, gap=gap) for task in TASKS)
        return f"{text.plain:.2f}, {copy.plain:.2f}, {numbers('recall', condition=condition, gap=gap).plain:.0%}"

    figures = {
        "curves": lines(
            _panels,
            "gap",
            x="contexts",
            title="Loss across a gap",
            subtitle="second half of a prompt, moved on by so much",
            x_title="gap over the training context",
            y_title="nats per token; share",
        )
    }


def _copy_in_words(row: Mapping[str, Any], last: int) -> str:
    """Return "a copy is read back across 4,096 tokens, and no longer across 8,192"."""
    reads, lost = row["reads"], row["lost"]
    if math.isnan(reads):
        if math.isnan(lost):
            return "that a copy is read back is sure at no gap"
        return f"no copy is read back{'' if lost else ', not even without a gap'}"
    far = f"across {'all ' if reads == last else ''}{reads:,.0f} tokens" if reads else "without a gap"
    end = "beyond that undecided" if math.isnan(lost) else f"and no longer across {lost:,.0f}"
    return f"a copy is read back {far}{'' if reads == last else f', {end}'}"


def _harm_in_words(row: Mapping[str, Any], last: int) -> str:
    """Return "far text first does harm at 8,192 tokens"."""
    harmless, harm = row["harmless"], row["harm"]
    if harmless == last:
        return "far text does harm nowhere"
    if math.isnan(harm):
        return "no harm of far text is sure"
    return f"far text first does harm at {harm:,.0f} tokens"


def next_tokens(
    session: Session, tokens: Int[Tensor, "row pos"], first: int, hooks: Any = ()
) -> tuple[Float[Tensor, "row target"], Bool[Tensor, "row target"]]:
    """Return the loss of the tokens behind position `first`, and whether each of them has the largest logit. A metric
    in the place of the loss is given the whole prompt."""
    start = 0 if session.choices.metric is not None else first  # of the logits that are needed

    def of_logits(logits: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        is_first = logits[:, first - start : -1].argmax(-1).cpu() == batch[:, first + 1 :].cpu()
        losses = losses_of_logits(session, logits, batch[:, start:], per_token=True)
        return losses[:, first - start :].cpu(), is_first

    losses, is_first = zip(*run_prompts(session, tokens, of_logits, hooks, start), strict=True)
    return torch.cat(losses), torch.cat(is_first)
