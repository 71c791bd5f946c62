"""Numbers of one prompt: tensors in, tensors out."""
