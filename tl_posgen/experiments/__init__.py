"""Procedures that run a model many times, or train one: each returns one `Result`."""

from tl_posgen.experiments.any_distance import any_distance
from tl_posgen.experiments.band_ablation import band_ablation
from tl_posgen.experiments.cone import cone
from tl_posgen.experiments.coupling import coupling
from tl_posgen.experiments.coupling_emergence import coupling_emergence
from tl_posgen.experiments.coupling_scores import coupling_scores
from tl_posgen.experiments.downstream import downstream
from tl_posgen.experiments.dummy_distance import dummy_distance
from tl_posgen.experiments.emergence import emergence
from tl_posgen.experiments.length import length
from tl_posgen.experiments.perturbation import perturbation
from tl_posgen.experiments.plane_sufficiency import plane_sufficiency
from tl_posgen.experiments.slash import find_slash_heads, slash_transfer
from tl_posgen.experiments.slash_toy import slash_toy
from tl_posgen.experiments.substitution import substitution

__all__ = [
    "any_distance",
    "band_ablation",
    "cone",
    "coupling",
    "coupling_emergence",
    "coupling_scores",
    "downstream",
    "dummy_distance",
    "emergence",
    "find_slash_heads",
    "length",
    "perturbation",
    "plane_sufficiency",
    "slash_toy",
    "slash_transfer",
    "substitution",
]
