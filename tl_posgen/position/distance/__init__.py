"""Controlled distance: every pair scored at a chosen distance."""

from tl_posgen.position.distance.dummy_distance import DummyDistance
from tl_posgen.position.distance.hooks import at_dummy_distance

__all__ = ["DummyDistance", "at_dummy_distance"]
