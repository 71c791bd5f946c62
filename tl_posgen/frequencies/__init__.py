"""Other frequencies of RoPE: what a rule of context extension does to every head, forecast from a short prompt."""

from tl_posgen.frequencies.hooks import with_frequencies
from tl_posgen.frequencies.rules import FrequencyRule
from tl_posgen.frequencies.what_if_rope import WhatIfRope

__all__ = ["FrequencyRule", "WhatIfRope", "with_frequencies"]
