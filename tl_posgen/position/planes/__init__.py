"""Magnitude and phase of queries and keys in RoPE's planes: what each carries, and what the planes could do."""

from tl_posgen.position.planes.any_distance import MEASURE as any_distance
from tl_posgen.position.planes.any_distance import AnyDistance
from tl_posgen.position.planes.plane_sufficiency import MEASURE as plane_sufficiency
from tl_posgen.position.planes.plane_sufficiency import PlaneSufficiency
from tl_posgen.position.planes.planes import MEASURE as planes
from tl_posgen.position.planes.planes import Planes

__all__ = ["AnyDistance", "PlaneSufficiency", "Planes", "any_distance", "plane_sufficiency", "planes"]
