"""Alignment of residual Jacobians (Aubry et al. 2024, arXiv 2407.07810)."""

from tl_posgen.coupling.coupling import Coupling
from tl_posgen.coupling.coupling_scores import coupling_scores
from tl_posgen.coupling.token_coupling import TokenCoupling

__all__ = ["Coupling", "TokenCoupling", "coupling_scores"]
