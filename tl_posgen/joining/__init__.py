"""Join the three papers: one table of every head's numbers."""

from tl_posgen.joining.profiles import Profiles, scatter

__all__ = ["Profiles", "scatter"]
