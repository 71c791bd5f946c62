"""Scores as position + query + key: exact fits, variance shares, residuals (Han & Ji 2025, arXiv 2503.13305)."""

from tl_posgen.position.decomposition.across_prompts import MEASURE as across_prompts
from tl_posgen.position.decomposition.across_prompts import AcrossPrompts
from tl_posgen.position.decomposition.attention_examples import MEASURE as attention_examples
from tl_posgen.position.decomposition.attention_examples import AttentionExamples
from tl_posgen.position.decomposition.mean_key import MEASURE as mean_key
from tl_posgen.position.decomposition.mean_key import MeanKey
from tl_posgen.position.decomposition.residual import MEASURE as residual
from tl_posgen.position.decomposition.residual import Residual
from tl_posgen.position.decomposition.three_axis import MEASURE as three_axis
from tl_posgen.position.decomposition.three_axis import ThreeAxis
from tl_posgen.position.decomposition.variance import MEASURE as variance
from tl_posgen.position.decomposition.variance import Variance

__all__ = [
    "AcrossPrompts",
    "AttentionExamples",
    "MeanKey",
    "Residual",
    "ThreeAxis",
    "Variance",
    "across_prompts",
    "attention_examples",
    "mean_key",
    "residual",
    "three_axis",
    "variance",
]
