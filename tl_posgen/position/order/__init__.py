"""Disturbed order of tokens, of positions and of features."""

from tl_posgen.position.order.numbers import jittered_distances, swap_tokens, swap_words
from tl_posgen.position.order.perturbation import Perturbation

__all__ = ["Perturbation", "jittered_distances", "swap_tokens", "swap_words"]
