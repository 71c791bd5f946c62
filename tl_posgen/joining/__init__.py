"""Join the three papers: one table of every head's numbers, and keys cut towards rank one."""

from tl_posgen.joining.key_cut import KeyCut, cut_keys
from tl_posgen.joining.profiles import Profiles, scatter

__all__ = ["KeyCut", "Profiles", "cut_keys", "scatter"]
