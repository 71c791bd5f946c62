"""The loss of the running model under named interventions: base of measures whose conditions are hooks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import Measure, TokenView, Variable, in_words
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, is_above, leave_one_out
from tl_posgen.core.run import Run
from tl_posgen.editing.given import check_hooks
from tl_posgen.errors import InputError
from tl_posgen.models.loss import divergence, losses_of_logits, normalisers_of
from tl_posgen.report.circuits import CROP, token_colours
from tl_posgen.report.kinds import bars
from tl_posgen.stats.intervals import FEWEST

UNTOUCHED = "unchanged"  # the condition without hooks
_MOST_NAMED = 6  # conditions in a sentence
LEAST_COST = 0.01  # nats: of what a control costs no more than this, by its interval, there are no shares
PREDICTIONS = {  # variables of a measure that says how far predictions move, and on which tokens
    "kl": Variable(
        "KL of the predictions", "nats", "KL(unchanged || changed) of the next token", ("condition", "prompt")
    ),
    "token_change": Variable(
        "change of the loss", "nats", "first prompt, over unchanged", ("condition", "shown_target")
    ),
    "token_text": Variable("token", "", "first prompt", ("shown_target",)),
}


def tokens_by_condition(words: Mapping[str, str]) -> TokenView:
    """Return the view of a prompt's tokens, coloured by the change of their loss under each condition.

    Its dataset has `token_change` and `token_text`, one for all conditions or one each, and in its attribute `shown`
    what else the labels say.
    """

    def changed(data: xr.Dataset) -> list[str]:
        return [str(condition) for condition in data["condition"].values if condition != UNTOUCHED]

    def labels(data: xr.Dataset) -> list[str]:
        suffix = f"{data.attrs.get('shown', '')}: change of each token's loss, first prompt; red: worse"
        return [f"{in_words(condition, words)}{suffix}" for condition in changed(data)]

    def page(data: xr.Dataset, example: int) -> Any:
        tokens = data[["token_change", "token_text"]].sel(condition=changed(data)[example])
        return token_colours([str(token) for token in tokens["token_text"].values], tokens["token_change"].values)

    return TokenView(labels, page)


@dataclass(frozen=True)
class Interventions(Measure):
    r"""rise = L(condition) - L(unchanged): the loss of the running model under every one of its `conditions`.

    A subclass gives `conditions`, name -> hooks; losses by prompt, rises with intervals and null models, sentence,
    table and bars follow; with the variables of `PREDICTIONS` also the KL of what the model predicts, and the change
    of each token's loss. With `keep=`, a condition (with `PREDICTIONS` a prompt) of a measure in a file is not
    measured again after a stop.

    Attributes:
        control: the condition that takes away all that is asked about: with one, `recovered` and the table have the
            share of its rise that another condition avoids, (L(control) - L) / (L(control) - L(unchanged)).
        edits_all_layers: whether conditions may edit layers that were not chosen; elsewhere such hooks are refused.

    Source: ours

    Example:
        >>> @dataclass(frozen=True)
        ... class WithoutLayers(Interventions):
        ...     "rise = L(without the attention of a layer) - L. The cost of each layer's attention."
        ...     def conditions(self, run):
        ...         off = lambda z, hook: z * 0
        ...         return {f"layer {n}": [(f"blocks.{n}.attn.hook_z", off)] for n in range(run.model.cfg.n_layers)}
        >>> found = WithoutLayers()("mini", "Down, down, down. Would it end?", nulls=0, progress=False)
        >>> found.frame()["condition"].tolist()
        ['unchanged', 'layer 0', 'layer 1', 'layer 2', 'layer 3']
    """

    question = "What does each intervention cost?"
    one_length = True
    rows = ("condition",)
    control = ""
    edits_all_layers = False
    variables = {"loss": Variable("loss", "nats", "per token", ("condition", "prompt"), headline="loss")}
    whole_model = frozenset({"rise"})
    figures = {
        "rise": bars(
            {"rise of the loss, nats": [("rise", lambda numbers: numbers.measure.rise_of(numbers))]},
            "condition",
            title="Loss under interventions",
            subtitle="nats per token, over the unchanged model",
            form="+.3f",
        )
    }

    def conditions(self, run: Run) -> Mapping[str, Any]:
        """Return the interventions: name -> hooks; none for the unchanged model, which is added.

        With `PREDICTIONS`, None in the place of hooks: the condition is not run in this model, and its numbers are NaN;
        and a function: of a prompt's number in `run.rows`, it gives the hooks for that prompt.
        """
        raise NotImplementedError

    @property
    def has_predictions(self) -> bool:
        """Tell whether it has the variables of `PREDICTIONS`, each prompt's beside one pass of the unchanged model."""
        return PREDICTIONS.keys() <= self.variables.keys()

    def usual(self) -> Mapping[str, Any]:
        return {"condition": UNTOUCHED}

    def refuse(self, run: Run) -> None:
        if not (self.after or self.is_fed):  # else conditions may read what is not measured yet
            self.named_conditions(run)

    def of_model(self, run: Run) -> xr.Dataset:
        conditions = self.named_conditions(run)
        if run.trained is not None and list(run.trained["condition"].values[1:]) != list(conditions):
            raise InputError(f"{self.name}: conditions gives other names for a null model than for the model itself")
        if run.init is None:  # a null model has the same hook points, and may lack what a condition takes away
            self._check_hooks_of(run, conditions)
        by_name = {UNTOUCHED: [], **conditions}
        if not self.has_predictions:
            return run.grid(lambda condition: self.under(run, by_name[condition]), pure=True, condition=[*by_name])
        prompts = range(len(run.rows))
        data = run.grid(lambda prompt: self._beside_unchanged(run, prompt, by_name), pure=True, prompt=prompts)
        texts = run.texts(run.rows[0][1 : CROP + 1])
        first = data["token_change"].isel(prompt=0, drop=True)
        return data.assign(token_change=first, token_text=("shown_target", texts)).transpose("condition", ...)

    def hooks_of(self, run: Run, condition: Any, prompt: int = 0) -> Any:
        """Return the hooks of a condition for a prompt, None where it is not run in this model. A measure whose
        conditions are something else overrides it, and `under`."""
        return condition(prompt) if self.has_predictions and callable(condition) else condition

    def _check_hooks_of(self, run: Run, conditions: Mapping[str, Any]) -> None:
        """Refuse conditions that are no hooks of this model, or in layers that were not chosen."""
        of_conditions = {name: self.hooks_of(run, condition) for name, condition in conditions.items()}
        may_be_none = self.has_predictions
        to_check = {name: hooks for name, hooks in of_conditions.items() if hooks is not None or not may_be_none}
        try:
            check_hooks(run.session, [hook for hooks in to_check.values() for hook in hooks or ()])  # in one pass
        except (InputError, TypeError):
            is_fine = False
        else:
            is_fine = all(to_check.values())
        is_chosen = any(choice is not None for choice in run.where.values()) and not self.edits_all_layers
        for name, hooks in to_check.items():
            try:
                if not is_fine and not check_hooks(run.session, hooks or ()):
                    raise InputError("it has no hooks")
            except InputError as error:
                remedy = "" if isinstance(hooks, list | tuple) else "; a measure that makes hooks of it has `hooks_of`"
                raise InputError(f"{self.name}, condition {name!r}: {error}{remedy}") from error
            places = [re.match(r"blocks\.(\d+)\.", place) for place, _ in hooks or () if isinstance(place, str)]
            beyond = [layer for layer in (int(place[1]) for place in places if place) if layer not in run.heads]
            if is_chosen and beyond:
                raise InputError(
                    f"{self.name}, condition {name!r}: a hook in layer {beyond[0]}, which was not chosen; give "
                    "`**run.where` to what makes its hooks, or leave layers and heads out"
                )

    def _beside_unchanged(self, run: Run, prompt: int, conditions: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the variables of one prompt under every condition, beside one pass of the unchanged model."""

        def of_logits(logits: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            normalisers = normalisers_of(logits)
            return logits, normalisers, losses_of_logits(run.session, logits, row, normalisers)[0].cpu()

        row, losses, kl = run.tokens[[prompt]], [], []
        [of_unchanged] = run.passes(row, of_logits)
        unchanged, normalisers, unchanged_loss = of_unchanged
        for condition in conditions.values():
            hooks = self.hooks_of(run, condition, prompt)
            if hooks is None:
                losses.append(torch.full_like(unchanged_loss, torch.nan))
                kl.append(torch.nan)
                continue
            [of_condition] = run.passes(row, of_logits, hooks) if hooks else [of_unchanged]
            logits, condition_normalisers, loss = of_condition
            losses.append(loss)
            kl.append(divergence(unchanged, logits, normalisers, condition_normalisers).mean().item())
        of_all, labels = torch.stack(losses), {"condition": [*conditions]}
        values = {"loss": of_all.mean(-1), "kl": kl, "token_change": (of_all - unchanged_loss)[:, :CROP]}
        dims = ("condition", "shown_target")
        return {name: xr.DataArray(np.asarray(value), labels, dims[: np.ndim(value)]) for name, value in values.items()}

    def named_conditions(self, run: Run) -> Mapping[str, Any]:
        """Return the `conditions`; refuse what is no mapping of names, and a control that is none of them."""
        conditions: Any = self.conditions(run)
        if not isinstance(conditions, Mapping) or not all(isinstance(name, str) and name for name in conditions):
            raise InputError(f"{self.name}: conditions gives {conditions!r}: give a mapping of names to hooks")
        if not conditions or UNTOUCHED in conditions:
            names = ", ".join(conditions) or "nothing"
            raise InputError(f"{self.name}: conditions gives {names}: give one or more, none of them {UNTOUCHED!r}")
        if self.control and self.control not in conditions:
            raise InputError(f"{self.name}: control {self.control!r} is none of the conditions {', '.join(conditions)}")
        return conditions

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the variables of one condition: its loss by prompt, unless overridden."""
        return {"loss": run.losses_under(hooks).mean(-1).numpy()}

    def rise_of(self, numbers: Numbers) -> xr.DataArray:
        """Return the rise of the loss [.., condition, prompt], zero of the unchanged model."""
        loss = numbers.array("loss", condition=None)
        return loss - loss.sel(condition=UNTOUCHED, drop=True)

    def rises(self, numbers: Numbers) -> dict[str, Number]:
        """Return the rise of the loss by condition, all but the unchanged."""
        rise = self.rise_of(numbers).drop_sel(condition=UNTOUCHED)
        return numbers.along(rise, "condition")

    def recovered_of(self, numbers: Numbers, name: str = "loss") -> xr.DataArray:
        """Return (x(control) - x) / (x(control) - x(unchanged)) of a variable's means over the prompts and over all but
        one of them [.., condition]; NaN where what the control costs is not above LEAST_COST by its interval."""
        values = numbers.array(name, condition=None)
        means = leave_one_out(values) if values.sizes["prompt"] >= FEWEST else values.mean("prompt")
        control, unchanged = (means.sel(condition=condition, drop=True) for condition in (self.control, UNTOUCHED))
        worth = control - unchanged
        recovered = (control - means) / worth.where(is_above(worth, LEAST_COST))
        return recovered.assign_attrs(range=(-np.inf, 1.0))

    def recovered(self, numbers: Numbers, name: str = "loss") -> dict[str, Number]:
        """Return `recovered_of` by condition, as numbers with their intervals over prompts."""
        return numbers.along(self.recovered_of(numbers, name), "condition", (-np.inf, 1))

    def findings(self, numbers: Numbers) -> list[str]:
        rises = self.rises(numbers)
        most = sorted(rises, key=lambda name: -np.nan_to_num(rises[name].value))[:_MOST_NAMED]
        costs = "; ".join(f"{self.in_words(name)} {rises[name]:+.3f}" for name in most)
        scope = f", the {len(most)} dearest of {len(rises)}" if len(most) < len(rises) else ""
        loss = numbers("loss")
        return [f"Rise of the loss of {loss.plain:.3f} nats{in_brackets(f'{loss.null:.3f}')}{scope}: {costs}."]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a condition: loss, rise with the ends of its interval, and with a control the share of the
        control's rise that is avoided, with its ends."""
        losses = numbers.along(numbers.array("loss", condition=None), "condition")
        rises, shares = self.rises(numbers), self.recovered(numbers) if self.control else {}
        rows = []
        for name, loss in losses.items():
            row = {"condition": name, "loss": loss.value}
            if name in rises:
                row |= {"rise": rises[name].value, "low": rises[name].low, "high": rises[name].high}
            if name in shares:
                share = shares[name]
                row |= {"recovered": share.value, "recovered_low": share.low, "recovered_high": share.high}
            rows.append(row)
        return pd.DataFrame(rows)
