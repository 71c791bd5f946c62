"""Slash-dominant heads (Cheng et al. 2026, arXiv 2601.08297)."""

from tl_posgen.slash.band_ablation import BandAblation
from tl_posgen.slash.cone import Cone
from tl_posgen.slash.slash import Slash
from tl_posgen.slash.slash_ablation import SlashAblation
from tl_posgen.slash.slash_biases import SlashBiases
from tl_posgen.slash.slash_heads import find_slash_heads, slash_heads
from tl_posgen.slash.slash_planes import SlashPlanes
from tl_posgen.slash.slash_toy import SlashToy, slash_toy
from tl_posgen.slash.slash_transfer import SlashTransfer

__all__ = [
    "BandAblation",
    "Cone",
    "Slash",
    "SlashAblation",
    "SlashBiases",
    "SlashPlanes",
    "SlashToy",
    "SlashTransfer",
    "find_slash_heads",
    "slash_heads",
    "slash_toy",
]
