"""Numbers of position, length: tensors in, tensors or frozen dataclasses out; no model, no labels."""
