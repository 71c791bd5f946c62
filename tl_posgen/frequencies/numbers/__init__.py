"""Numbers of RoPE's planes: tensors in, tensors out; no model, no labels."""
