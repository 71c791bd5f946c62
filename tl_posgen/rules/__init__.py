"""Cheap rules that a head's attention obeys: how much of it they recall, what they cost, and hooks that impose them."""

from tl_posgen.rules.rules import Rules

__all__ = ["Rules"]
