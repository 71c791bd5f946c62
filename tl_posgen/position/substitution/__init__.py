"""Scores of a model replaced by position + content."""

from tl_posgen.position.substitution.split_examples import SplitExamples
from tl_posgen.position.substitution.substitution import Substitution

__all__ = ["SplitExamples", "Substitution"]
