"""Options of measures: frozen dataclasses whose values are checked against their annotations."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd

from tl_posgen.errors import InputError

if TYPE_CHECKING:
    from tl_posgen.measure import Measure

NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "None"}
NAMES |= {os.PathLike: "a path", pd.DataFrame: "a DataFrame"}


@dataclass(frozen=True)
class Options:
    """Base of a measure's options: a frozen dataclass, whose docstring is the measure's reference.

    Values of another type than annotated are refused here; `check` refuses others that cannot be used.
    """

    measure: ClassVar["Measure"]  # set where the measure is declared

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), localns={"Measure": Any})  # also of modules that postpone annotations
        for one in fields(self):
            require(one.name, getattr(self, one.name), kinds[one.name])
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be used, before anything runs; InputError names the option and the remedy."""


def require(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type than `fits` takes."""
    if not fits(value, kind):
        raise InputError(f"{name} = {value!r}: give {in_words(kind)}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an option's type: numbers, words, Literals, sequences of them, and unions of these.

    Example:
        >>> fits(1, float), fits(True, int), fits(10**30, int), fits([0, 2], Sequence[int]), fits("02", Sequence[int])
        (True, False, False, True, False)
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Literal:
        return isinstance(value, str | int) and value in inside
    if origin is not None and issubclass(origin, Sequence):
        listed = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        return listed and all(fits(one, inside[0]) for one in value)
    if kind in (int, float):
        numbers = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        fitting = isinstance(value, numbers) and not isinstance(value, bool)
        return fitting and (isinstance(value, float | np.floating) or abs(int(value)) < 2**63)  # files hold no larger
    return isinstance(value, kind) if isinstance(kind, type) else True


def in_words(kind: Any) -> str:
    """An option's type as an error says it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(one) for one in inside)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inside))}"
    if origin is not None and issubclass(origin, Sequence):
        return f"a list, each {in_words(inside[0])}"
    return NAMES.get(kind, str(getattr(kind, "__name__", kind)))


def require_name(name: Any, what: str) -> None:
    """Refuse a name that files and pages cannot use, as that of a group or an anchor."""
    if not isinstance(name, str) or not name.isidentifier() or name == "null":
        raise InputError(f"{what} {name!r}: its name must be letters, digits and underscores, and not null")
