"""Replacement of attention scores, which every intervention is built on."""
