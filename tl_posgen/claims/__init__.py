"""The claims of papers on one model: the table of claims, their judgement, and a run that measures all of it."""

from tl_posgen.claims.judging import Claim, Claims, Criterion, claims_result, judge
from tl_posgen.claims.running import judge_claims
from tl_posgen.claims.table import PAPERS

__all__ = ["PAPERS", "Claim", "Claims", "Criterion", "claims_result", "judge", "judge_claims"]
