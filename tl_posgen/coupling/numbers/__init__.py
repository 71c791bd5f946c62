"""Numbers of coupling: tensors in, tensors or frozen dataclasses out; no model, no labels."""
