"""Other frequencies of RoPE: what a rule of context extension does to every head, forecast from a short prompt."""

from tl_posgen.frequencies.hooks import with_frequencies
from tl_posgen.frequencies.rules import Rule

__all__ = ["Rule", "with_frequencies"]
