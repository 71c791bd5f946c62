"""Scores of a model replaced by position + content."""

from tl_posgen.position.substitution.hooks import (
    all_positions,
    authors_split,
    by_constant,
    by_split,
    by_three_axis,
    near,
    own_profile,
    query_profile,
    substitute,
)
from tl_posgen.position.substitution.split_examples import SplitExamples
from tl_posgen.position.substitution.substitution import Substitution
from tl_posgen.rope.splits import DistanceDistribution, attention_profile, point_mass, triangle, uniform

__all__ = [
    "DistanceDistribution",
    "SplitExamples",
    "Substitution",
    "all_positions",
    "attention_profile",
    "authors_split",
    "by_constant",
    "by_split",
    "by_three_axis",
    "near",
    "own_profile",
    "point_mass",
    "query_profile",
    "substitute",
    "triangle",
    "uniform",
]
