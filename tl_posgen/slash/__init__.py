"""Slash-dominant heads (Cheng et al. 2026, arXiv 2601.08297)."""

from tl_posgen.slash.ablation_hooks import ablate_bands
from tl_posgen.slash.band_ablation import MEASURE as band_ablation
from tl_posgen.slash.band_ablation import BandAblation
from tl_posgen.slash.cone import MEASURE as cone
from tl_posgen.slash.cone import Cone
from tl_posgen.slash.slash import MEASURE as slash
from tl_posgen.slash.slash import Slash, find_slash_heads
from tl_posgen.slash.slash_ablation import MEASURE as slash_ablation
from tl_posgen.slash.slash_ablation import SlashAblation
from tl_posgen.slash.slash_heads import slash_heads
from tl_posgen.slash.slash_planes import MEASURE as slash_planes
from tl_posgen.slash.slash_planes import SlashPlanes
from tl_posgen.slash.slash_toy import slash_toy
from tl_posgen.slash.slash_transfer import MEASURE as slash_transfer
from tl_posgen.slash.slash_transfer import SlashTransfer

__all__ = [
    "BandAblation",
    "Cone",
    "Slash",
    "SlashAblation",
    "SlashPlanes",
    "SlashTransfer",
    "ablate_bands",
    "band_ablation",
    "cone",
    "find_slash_heads",
    "slash",
    "slash_ablation",
    "slash_heads",
    "slash_planes",
    "slash_toy",
    "slash_transfer",
]
