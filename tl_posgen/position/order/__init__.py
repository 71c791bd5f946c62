"""Disturbed order of tokens, of positions and of features."""

from tl_posgen.position.order.hooks import jitter_distances, permute_position_part, permute_positions
from tl_posgen.position.order.numbers import jittered_distances, swap_tokens, swap_words
from tl_posgen.position.order.perturbation import Perturbation

__all__ = [
    "Perturbation",
    "jitter_distances",
    "jittered_distances",
    "permute_position_part",
    "permute_positions",
    "swap_tokens",
    "swap_words",
]
