"""Errors by who can mend them. A message names the thing, the place and the remedy."""

import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


class PosgenError(Exception):
    """Base of every error this package raises on purpose. Its message is one line, whatever it quotes."""

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())


class InputError(PosgenError, ValueError):
    """A text, token, option or file given by the user cannot be used."""


class ModelError(PosgenError):
    """A model cannot be loaded, or is not sound (missing files, NaN weights, no network)."""


class UnsupportedModelError(ModelError):
    """A sound model whose attention this package cannot describe exactly, so it refuses."""


class NothingToMeasureError(UnsupportedModelError):
    """A sound model without what a measure is of, such as biases."""


class OutputError(PosgenError, OSError):
    """A result cannot be written where the user asked."""


def check_whole(place: str, least: int, /, **values: Any) -> None:
    """Refuse values that are not whole numbers from `least` on."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise InputError(f"{place}: {name}={value!r}: give a whole number, {least} or more")


MOST_SEEDS = 2**32  # torch generators read 32 bits of a seed: larger ones would share their draws


def check_seed(seed: Any) -> int:
    """Return a seed of draws; InputError for anything else than a whole number, 0 to 2^32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < MOST_SEEDS:
        raise InputError(f"seed = {seed!r}: give a whole number, 0 or more, below 2^32")
    return int(seed)


def check_share(name: str, value: Any) -> None:
    """Refuse a value that is not a number from 0 to 1."""
    if not is_non_negative(value) or value > 1:
        raise InputError(f"{name} {value!r} is outside [0, 1]; give a number from 0 to 1")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the known words."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} {value!r}: choose from {', '.join(choices)}")


def is_non_negative(value: Any) -> bool:
    """Return whether a value is a finite number, not negative and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(0 <= value <= sys.float_info.max)  # pyright: ignore[reportOperatorIssue]
