"""Prompts beyond the training length: drift of the outputs, and interventions against it."""

from tl_posgen.position.length.length_extrapolation import LengthExtrapolation

__all__ = ["LengthExtrapolation"]
