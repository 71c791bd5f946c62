"""Numbers of slash: tensors in, tensors or frozen dataclasses out; no model, no labels."""
