"""Errors by who can mend them. A message names the thing, the place and the remedy."""


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


class OutputError(PosgenError, OSError):
    """A result cannot be written where the user asked."""
