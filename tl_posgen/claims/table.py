"""Every claim, by paper."""

from collections.abc import Mapping, Sequence

from tl_posgen.claims.coupling import COUPLING
from tl_posgen.claims.frequency import FREQUENCY
from tl_posgen.claims.judging import Claim
from tl_posgen.claims.position import POSITION
from tl_posgen.claims.slash import SLASH

PAPERS: Mapping[str, Sequence[Claim]] = {
    "position": POSITION,
    "slash": SLASH,
    "coupling": COUPLING,
    "frequency": FREQUENCY,  # of many papers
}
