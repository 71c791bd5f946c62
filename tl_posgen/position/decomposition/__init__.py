"""Scores as position + query + key: exact fits, variance shares, residuals (Han & Ji 2025, arXiv 2503.13305)."""

from tl_posgen.position.decomposition.attention_examples import AttentionExamples
from tl_posgen.position.decomposition.bias_ablation import BiasAblation
from tl_posgen.position.decomposition.bias_pairs import BiasPairs
from tl_posgen.position.decomposition.mean_key import MeanKey
from tl_posgen.position.decomposition.numbers.variance_shares import interaction_share
from tl_posgen.position.decomposition.residual import Residual
from tl_posgen.position.decomposition.three_axis import ThreeAxis
from tl_posgen.position.decomposition.variance import Variance

__all__ = [
    "AttentionExamples",
    "BiasAblation",
    "BiasPairs",
    "MeanKey",
    "Residual",
    "ThreeAxis",
    "Variance",
    "interaction_share",
]
