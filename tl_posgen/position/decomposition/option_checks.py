"""What several measures and hooks ask of their numbers: refused before anything runs, with the place and the remedy."""

from numbers import Integral, Real
from typing import Any

from tl_posgen.errors import InputError


def check_whole(measure: str, least: int, **options: Any) -> None:
    """Refuse options that are no whole numbers of `least` or more.

    Example:
        >>> check_whole("residual", 1, n_pairs=0)
        Traceback (most recent call last):
        tl_posgen.errors.InputError: residual: n_pairs=0: give a whole number, 1 or more
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InputError(f"{measure}: {name}={value!r}: give a whole number, {least} or more")


def is_number(value: Any) -> bool:
    """Whether a value is a number that counts or measures: finite, not negative, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < float("inf")
