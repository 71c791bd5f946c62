"""RoPE's planes: their frequencies changed, held beyond a distance, and what a model uses each for."""

from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.plane_cost import PlaneCost
from tl_posgen.frequencies.plane_roles import PlaneRoles
from tl_posgen.frequencies.plane_use import PlaneUse
from tl_posgen.frequencies.recall import Recall

__all__ = ["Gap", "PlaneCost", "PlaneRoles", "PlaneUse", "Recall"]
