"""Options of measures: dataclass fields whose annotations say which values are allowed, such as Share or Count.

Not by beartype: it looks at one random entry of a list, takes True for a whole number and NumPy's integers for none.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import pandas as pd

from tl_posgen.arithmetic import MOST_DISTANCES
from tl_posgen.errors import InputError

NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "None"}
NAMES |= {os.PathLike: "a path", pd.DataFrame: "a DataFrame"}
_Made = TypeVar("_Made")
_LARGEST = 2**63  # files hold no larger whole number


class Within:
    """A constraint on a number: low <= value <= high, finite.

    Args:
        low, high: the ends of the range.
        words: the range as an error message says it.
        excluded: which ends are not allowed themselves, of "low" and "high".
    """

    def __init__(
        self, low: int | float = -np.inf, high: int | float = np.inf, words: str = "", *, excluded: Sequence[str] = ()
    ):
        self.low, self.high, self.words, self.excluded = low, high, words, excluded

    def __call__(self, value: Any) -> bool:
        above = value > self.low if "low" in self.excluded else value >= self.low
        below = value < self.high if "high" in self.excluded else value <= self.high
        return above and below and abs(value) != np.inf


class Each:
    """A constraint on a list: so many entries at least, and, with `once`, no entry twice."""

    def __init__(self, least: int = 1, *, once: bool = True):
        self.least, self.once = least, once
        self.words = f"a list{' of one at least' if least else ''}{', each once' if once else ''}"

    def __call__(self, value: Sequence[Any]) -> bool:
        return len(value) >= self.least and not (self.once and len(set(value)) < len(value))


Real = int | float
Whole = Annotated[int, Within(0, words="a whole number, 0 or more")]
Count = Annotated[int, Within(1, words="a whole number, 1 or more")]
Share = Annotated[Real, Within(0, 1, "a share, 0 to 1")]
Positive = Annotated[Real, Within(0, words="a number above 0", excluded=("low",))]
NonNegative = Annotated[Real, Within(0, words="a number, 0 or more")]
Distances = Annotated[int, Within(1, MOST_DISTANCES, f"a whole number, 1 to {MOST_DISTANCES}")]
Threshold = Annotated[Real, Within(0, 1, "a number in (0, 1]", excluded=("low",))]


@cache
def annotations_of(owner: type) -> dict[str, Any]:
    """Return the annotation of every field of a dataclass, constraints included."""
    module = sys.modules.get(owner.__module__)  # none for a file that was run without being registered there
    functions = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    names = vars(module) if module else {name: x for function in functions for name, x in function.__globals__.items()}
    written = {field.name: field.type for field in fields(owner)}  # as text in modules that postpone annotations
    return {
        name: eval(annotation, names) if isinstance(annotation, str) else annotation
        for name, annotation in written.items()
    }


def check_options(owner: Any, name: str) -> None:
    """Refuse values of a dataclass's fields that their annotations do not allow.

    Raises:
        InputError: the first such value; the message says what is allowed.
    """
    for field, annotation in annotations_of(type(owner)).items():
        value = getattr(owner, field)
        if wanted := refusal(value, annotation):
            raise InputError(f"{name}: {field} = {value!r}: give {wanted}")


def with_options(kind: type[_Made], options: Mapping[str, Any], name: str) -> _Made:
    """Return a dataclass of these fields.

    Raises:
        InputError: an option that it lacks, one that is needed and not given, or a value that it refuses.
    """
    by_name: Any = {field.name: field for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := [option for option in options if option not in by_name]:
        raise InputError(f"{name} has no option {unknown[0]!r}; it has {', '.join(by_name) or 'none'}")
    needed = [key for key, field in by_name.items() if field.default is field.default_factory is MISSING]
    if missing := [option for option in needed if option not in options]:
        raise InputError(f"{name} needs the option {missing[0]!r}")
    return kind(**options)


def refusal(value: Any, annotation: Any) -> str:
    """Return what is allowed instead of a value, or "" where the value is allowed: numbers, words, Literals, sequences
    of them, unions of these, with the constraints of `Annotated`.

    Example:
        >>> refusal(0.5, Share), refusal([0, 2], Sequence[Share]), refusal(None, Share | None)
        ('', 'a list, each a share, 0 to 1', '')
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *constraints = inside
        if why := refusal(value, base):
            return why if _listed(base) else constraints[0].words
        return next((constraint.words for constraint in constraints if not constraint(value)), "")
    if origin in (Union, UnionType):
        why = {member: refusal(value, member) for member in inside}
        is_allowed = "" in why.values()
        reasons = [reason for member, reason in why.items() if member is not type(None)]
        if not is_allowed and len(reasons) == 1:  # what is wrong with the list, not that None would do
            return reasons[0]
    elif origin is Literal:
        is_allowed = isinstance(value, str | int) and not isinstance(value, bool) and value in inside
    elif _listed(annotation):
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        is_list = is_list or (isinstance(value, np.ndarray) and value.ndim > 0)
        is_allowed = is_list and all(fits(entry, inside[0]) for entry in value)
    elif annotation in (int, float):
        numbers = (int, np.integer) if annotation is int else (int, float, np.integer, np.floating)
        is_allowed = isinstance(value, numbers) and not isinstance(value, bool)
        if is_allowed and not isinstance(value, float | np.floating) and abs(int(value)) >= _LARGEST:
            return "a number below 2^63"
    else:
        kind = origin or annotation
        is_allowed = isinstance(value, kind) if isinstance(kind, type) else True
    return "" if is_allowed else _wanted_in_words(annotation)


def _listed(annotation: Any) -> bool:
    """Return whether an annotation is that of a list."""
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _wanted_in_words(annotation: Any) -> str:
    """Return an annotation as an error message says it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _wanted_in_words(inside[0]) if _listed(inside[0]) else inside[1].words
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_wanted_in_words(member) for member in inside))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inside))}"
    if _listed(annotation):
        return f"a list, each {_wanted_in_words(inside[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))


def require(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value of another type than `fits` allows."""
    if wanted := refusal(value, annotation):
        raise InputError(f"{name} = {value!r}: give {wanted}")


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value is allowed, see `refusal`.

    Example:
        >>> fits(1, float), fits(True, int), fits(10**30, int), fits([0, 2], Sequence[int]), fits("02", Sequence[int])
        (True, False, False, True, False)
        >>> fits(np.array([0, 2]), Sequence[int]), fits(np.array(2), Sequence[int])
        (True, False)
    """
    return not refusal(value, annotation)
