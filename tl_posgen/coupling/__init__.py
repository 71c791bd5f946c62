"""Alignment of residual Jacobians (Aubry et al. 2024, arXiv 2407.07810)."""

from tl_posgen.coupling.coupling import MEASURE as coupling
from tl_posgen.coupling.coupling import Coupling
from tl_posgen.coupling.coupling_scores import coupling_scores

__all__ = ["Coupling", "coupling", "coupling_scores"]
