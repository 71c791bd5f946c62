"""RoPE's planes: which of them a model uses, what each costs, and how far the model reads."""

from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.plane_cost import PlaneCost
from tl_posgen.frequencies.plane_roles import PlaneRoles
from tl_posgen.frequencies.plane_use import PlaneUse
from tl_posgen.frequencies.recall import Recall

__all__ = ["Gap", "PlaneCost", "PlaneRoles", "PlaneUse", "Recall"]
