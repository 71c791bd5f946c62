"""Numbers of position, distance: tensors in, tensors or frozen dataclasses out; no model, no labels."""
