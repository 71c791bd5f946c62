"""Prompts beyond the training length: drift of the outputs, and interventions against it."""

from tl_posgen.position.length.hooks import interpolate_positions, lm_infinite, retrieve_blocks, self_extend
from tl_posgen.position.length.length_extrapolation import LengthExtrapolation

__all__ = ["LengthExtrapolation", "interpolate_positions", "lm_infinite", "retrieve_blocks", "self_extend"]
