"""Capturing queries, keys, scores and attention inputs of a forward pass or of a cache, without its padding."""
