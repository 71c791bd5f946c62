"""Numbers of position, decomposition: tensors in, tensors or frozen dataclasses out; no model, no labels."""
