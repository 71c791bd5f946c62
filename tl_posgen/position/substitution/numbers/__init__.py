"""Numbers of position, substitution: tensors in, tensors or frozen dataclasses out; no model, no labels."""
