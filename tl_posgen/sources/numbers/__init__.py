"""Numbers of sources: tensors in, tensors out."""
