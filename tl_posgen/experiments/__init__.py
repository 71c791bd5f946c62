"""Procedures that run a model many times, or train one."""

from tl_posgen.experiments.slash_toy import slash_toy

__all__ = ["slash_toy"]
