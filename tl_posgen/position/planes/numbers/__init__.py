"""Numbers of position, planes: tensors in, tensors or frozen dataclasses out; no model, no labels."""
