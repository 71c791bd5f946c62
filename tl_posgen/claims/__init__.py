"""What three papers claim, judged on one model: held or not, by how much, against which null."""

from tl_posgen.claims.base import Claim, Finding, judged
from tl_posgen.claims.run import judge_claims

__all__ = ["Claim", "Finding", "judge_claims", "judged"]
