"""Scores of a model replaced by position + content."""

from tl_posgen.position.substitution.hooks import (
    all_positions,
    attention_sinks,
    authors_split,
    by_constant,
    by_split,
    by_three_axis,
    near,
    no_values_at,
    own_profile,
    query_profile,
    substitute,
    true_at,
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
    "attention_sinks",
    "authors_split",
    "by_constant",
    "by_split",
    "by_three_axis",
    "near",
    "no_values_at",
    "own_profile",
    "point_mass",
    "query_profile",
    "substitute",
    "triangle",
    "true_at",
    "uniform",
]
