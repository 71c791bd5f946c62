"""The loss of the running model under named interventions: base of measures whose conditions are hooks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import Measure, Variable, in_words
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.registry import BUILT_IN
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.hooks.given import check_hooks
from tl_posgen.report.kinds import bars

UNTOUCHED = "unchanged"  # the condition without hooks
MOST_NAMED = 6  # conditions in a sentence
SOME = 8  # conditions, where they are not known before
WORTHLESS = 0.01  # nats: where a control costs less, shares of it are noise


@dataclass(frozen=True)
class Interventions(Measure):
    r"""rise = L(condition) - L(unchanged): the loss of the running model under every one of its `conditions`.

    A subclass gives `conditions`, name -> hooks; losses by prompt, rises with intervals and null models, sentence,
    table and bars follow. With `keep=`, a condition of a measure of this package is not measured again after a stop.

    Attributes:
        control: the condition that takes away all that is asked about: with one, the table has the share of its rise
            that another condition avoids, (L(control) - L) / (L(control) - L(unchanged)).

    Source: ours

    Example:
        >>> @dataclass(frozen=True)
        ... class WithoutLayers(Interventions):
        ...     "rise = L(without the attention of a layer) - L. The cost of each layer's attention."
        ...     def conditions(self, run):
        ...         off = lambda z, hook: z * 0
        ...         return {f"layer {n}": [(f"blocks.{n}.attn.hook_z", off)] for n in range(run.model.cfg.n_layers)}
        >>> found = WithoutLayers()("mini", "Down, down, down. Would it end?", null_seeds=(), progress=False)
        >>> found.frame()["condition"].tolist()
        ['unchanged', 'layer 0', 'layer 1', 'layer 2', 'layer 3']
    """

    question = "What does each intervention cost?"
    one_length = True
    rows = ("condition",)
    control = ""
    variables = {"loss": Variable("loss", "nats", "per token", ("condition", "prompt"), headline="loss")}
    figures = {
        "rise": bars(
            {"rise of the loss, nats": [("rise", lambda own: own.measure.rise_of(own))]},
            "condition",
            title="Loss under interventions",
            subtitle="nats per token, over the unchanged model",
            form="+.3f",
        )
    }

    def conditions(self, run: Run) -> Mapping[str, Any]:
        """Return the interventions: name -> hooks; none for the unchanged model, which is added."""
        raise NotImplementedError

    def usual(self) -> Mapping[str, Any]:
        return {"condition": UNTOUCHED}

    def passes(self, run: Run) -> int:
        is_known = not self.after or bool(run.before)  # else conditions may read what is not measured yet
        return len(run.rows) * (1 + (len(self.named_conditions(run)) if is_known else SOME))

    def of_model(self, run: Run) -> xr.Dataset:
        conditions = self.named_conditions(run)
        if run.trained is not None and list(run.trained["condition"].values[1:]) != list(conditions):
            raise InputError(f"{self.name}: conditions gives other names for a null model than for the model itself")
        for name, given in conditions.items() if self.name not in BUILT_IN else ():  # ours are tested
            try:
                if not check_hooks(run.session, given):
                    raise InputError("it has no hooks")
            except InputError as error:
                raise InputError(f"{self.name}, condition {name!r}: {error}") from error
        hooks = {UNTOUCHED: [], **conditions}
        return run.grid(lambda condition: self.under(run, hooks[condition]), pure=True, condition=[*hooks])

    def named_conditions(self, run: Run) -> Mapping[str, Any]:
        """Return the `conditions`; refuse what is no mapping of names, and a control that is none of them."""
        conditions: Any = self.conditions(run)
        if not isinstance(conditions, Mapping) or not all(isinstance(name, str) and name for name in conditions):
            raise InputError(f"{self.name}: conditions gives {conditions!r}: give a mapping of names to hooks")
        if not conditions or UNTOUCHED in conditions:
            told = ", ".join(conditions) or "nothing"
            raise InputError(f"{self.name}: conditions gives {told}: give one or more, none of them {UNTOUCHED!r}")
        if self.control and self.control not in conditions:
            raise InputError(f"{self.name}: control {self.control!r} is none of the conditions {', '.join(conditions)}")
        return conditions

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the variables of one condition: its loss by prompt, unless overridden."""
        return {"loss": run.losses_under(hooks).mean(-1).numpy()}

    def rise_of(self, own: Numbers) -> xr.DataArray:
        """Return the rise of the loss [.., condition, prompt], zero of the unchanged model."""
        loss = own.array("loss", condition=None)
        return loss - loss.sel(condition=UNTOUCHED, drop=True)

    def rises(self, own: Numbers) -> dict[str, Number]:
        """Return the rise of the loss by condition, all but the unchanged."""
        rise = self.rise_of(own).drop_sel(condition=UNTOUCHED)
        return dict(zip(map(str, rise["condition"].values), own.along(rise, "condition"), strict=True))

    def recovered(self, own: Numbers) -> dict[str, float]:
        """Return (L(control) - L) / (L(control) - L(unchanged)) by condition; NaN where the control costs less than
        WORTHLESS nats: a share of nothing is noise."""
        rises = {name: rise.value for name, rise in self.rises(own).items()}
        worth = rises[self.control] if rises[self.control] >= WORTHLESS else np.nan
        return {name: 1 - rise / worth for name, rise in rises.items()}

    def findings(self, own: Numbers) -> list[str]:
        rises = self.rises(own)
        most = sorted(rises, key=lambda name: -np.nan_to_num(rises[name].value))[:MOST_NAMED]
        said = "; ".join(f"{in_words(name, self.words)} {rises[name]:+.3f}" for name in most)
        some = f", the {len(most)} dearest of {len(rises)}" if len(most) < len(rises) else ""
        loss = own("loss")
        return [f"Rise of the loss of {loss.plain:.3f} nats{in_brackets(f'{loss.null:.3f}')}{some}: {said}."]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a condition: loss, rise with its interval, share of the control's rise that is avoided."""
        losses = own.along(own.array("loss", condition=None), "condition")
        names = map(str, own.data["condition"].values)
        rises, shares = self.rises(own), self.recovered(own) if self.control else {}
        rows = []
        for name, loss in zip(names, losses, strict=True):
            row = {"condition": name, "loss": loss.value}
            if name in rises:
                row |= {"rise": rises[name].value, "low": rises[name].low, "high": rises[name].high}
            rows.append(row | ({"recovered": shares[name]} if name in shares else {}))
        return pd.DataFrame(rows)
