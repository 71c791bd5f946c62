"""Controlled distance: every pair scored at a chosen distance."""

from tl_posgen.position.distance.dummy_distance import DummyDistance

__all__ = ["DummyDistance"]
