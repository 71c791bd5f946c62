"""Many models, texts and checkpoints: measures over training."""

from tl_posgen.sweep.emergence import emergence

__all__ = ["emergence"]
