"""One prompt: why does this head attend from here to there?"""

from tl_posgen.prompt.explaining import explain
from tl_posgen.prompt.explanation import Explanation
from tl_posgen.prompt.score_split import position_part, split
from tl_posgen.residual.reference import Reference, reference_of
from tl_posgen.residual.residual_sources import ResidualSources, residual_sources

__all__ = [
    "Explanation",
    "Reference",
    "ResidualSources",
    "explain",
    "position_part",
    "reference_of",
    "residual_sources",
    "split",
]
