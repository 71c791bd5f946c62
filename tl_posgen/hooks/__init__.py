"""Replacing what attention sees: the base that every intervention is built on."""
