"""Numbers of position, order: tensors in, tensors or frozen dataclasses out; no model, no labels."""
