"""RoPE's planes: their frequencies changed, held beyond a distance, and what a model uses each for."""

from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.hooks import hold_planes

__all__ = ["Gap", "hold_planes"]
