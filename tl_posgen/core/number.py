"""A number: its value, its 95 % interval and its null models; it formats itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from tl_posgen.core.files import jsonable
from tl_posgen.core.formatting import Formatted, format_number, in_brackets
from tl_posgen.models.loading.null_kinds import NULL_KINDS, RANDOM_INIT
from tl_posgen.models.selection import head_name


@dataclass(frozen=True)
class Number:
    """A value, the ends of its 95 % interval (NaN for none), and the values of the null models.

    Formatted as "0.917 [0.905, 0.929] (random init 0.350 ± 0.071, shuffled 0.410)": the interval is over prompts; the
    random inits, and the models of shuffled weights, are given by their mean and, from two seeds on, their standard
    deviation.

    Attributes:
        value, low, high: of the model.
        by_null: the values of the null models by kind, such as "random init", of the kinds that there are.
        spread: of a mean over null models, their standard deviation; None elsewhere.
        judged: whether brackets say where the number is not above its nulls: where its interval (over prompts; the
            nulls are taken as they are) reaches the highest of them.

    Example:
        >>> r = Number(0.917, 0.905, 0.929, {"random init": (0.3, 0.4)})
        >>> f"{r:.3f}", f"{r.with_interval:.3f}", f"{r.null:.2f}", f"{r.plain:.0%}"
        ('0.917 [0.905, 0.929] (random init 0.350 ± 0.071)', '0.917 [0.905, 0.929]', 'random init 0.35 ± 0.07', '92%')
        >>> f"{r.of_inits.with_interval:.2f}", float(r), f"{Number(float('nan')).plain:.2f}"
        ('0.35 ± 0.07', 0.917, 'not defined')
    """

    value: float
    low: float = np.nan
    high: float = np.nan
    by_null: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spread: float | None = None
    judged: bool = False

    def __format__(self, form: str) -> str:
        return f"{self.with_interval:{form}}{self.null_in_brackets:{form}}"

    def __str__(self) -> str:
        return format(self, "")

    def __repr__(self) -> str:
        return f"Number({self})"

    def _repr_html_(self) -> str:
        return str(self)

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        """True unless the value is NaN."""
        return self.value == self.value

    @property
    def plain(self) -> Formatted:
        """The value alone."""
        return Formatted(lambda form: format_number(self.value, form))

    @property
    def with_interval(self) -> Formatted:
        """The value with its interval; a mean over random inits with its standard deviation."""

        def text(form: str) -> str:
            value = format_number(self.value, form)
            if self.spread is not None:
                return f"{value} ± {format_number(self.spread, form.lstrip('+'))}"
            if np.isnan(self.low):
                return value
            return f"{value} [{format_number(self.low, form)}, {format_number(self.high, form)}]"

        return Formatted(text)

    @property
    def inits(self) -> tuple[float, ...]:
        """The values of the random inits."""
        return self.by_null.get(RANDOM_INIT, ())

    @property
    def nulls(self) -> tuple[float, ...]:
        """The values of all null models."""
        return tuple(chain.from_iterable(self.by_null.values()))

    @property
    def null(self) -> Formatted:
        """The null models: "random init 0.35 ± 0.07, shuffled 0.41"; "" without one, which a result says once."""

        def text(form: str) -> str:
            return ", ".join(
                f"{kind} {mean_of_nulls(nulls).with_interval:{form}}" for kind, nulls in self.by_null.items()
            )

        return Formatted(text)

    @property
    def null_in_brackets(self) -> Formatted:
        """The null models in brackets, as they follow the model's number: " (random init 0.35, shuffled 0.41)"."""
        return Formatted(lambda form: in_brackets(f"{self.null:{form}}", self.not_above if self.judged else ""))

    @property
    def null_range(self) -> str:
        """The null models of a count: "random init 0 to 2, shuffled 0"; "" without one."""
        ends = {
            kind: dict.fromkeys(format_number(end(nulls), "g") for end in (min, max))
            for kind, nulls in self.by_null.items()
        }
        return ", ".join(f"{kind} {' to '.join(texts)}" for kind, texts in ends.items())

    @property
    def not_above(self) -> str:
        """The kinds of null models that do as well: "not above random init"; "" where none does."""
        low_end = self.value if self.low != self.low else self.low
        names = [kind for kind, nulls in self.by_null.items() if low_end <= np.nanmax([-np.inf, *nulls])]
        return f"not above {' or '.join(names)}" if names else ""

    @property
    def of_inits(self) -> "Number":
        """The mean over the random inits for which it is defined, and their standard deviation."""
        return mean_of_nulls(self.inits)

    def as_dict(self) -> dict[str, Any]:
        """Return value, low, high, and the values of null models by kind, JSON-ready: None where not defined."""
        ends = {"value": self.value, "low": self.low, "high": self.high}
        kinds = [kind for kind in NULL_KINDS.values() if kind.usual != "none" or kind.name in self.by_null]
        return jsonable(ends | {kind.field: self.by_null.get(kind.name, ()) for kind in kinds})


def mean_of_nulls(values: Sequence[float]) -> Number:
    """Return the mean of the values that are defined, with their standard deviation where there are several."""
    defined = [value for value in values if value == value]
    spread = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
    return Number(float(np.mean(defined)) if defined else np.nan, spread=spread)


@dataclass(frozen=True)
class HeadNumber:
    """A head and its number: "L3H6 (0.642)"."""

    layer: int
    head: int
    number: Number

    def __format__(self, form: str) -> str:
        return f"{head_name(self.layer, self.head)} ({self.number.plain:{form}})" if self.number else "none"

    def __str__(self) -> str:
        return format(self, "")
