"""One prompt: why does this head attend from here to there?"""

from tl_posgen.prompt.reference import Reference, reference_of
from tl_posgen.prompt.score_split import position_part, split

__all__ = ["Reference", "position_part", "reference_of", "split"]
