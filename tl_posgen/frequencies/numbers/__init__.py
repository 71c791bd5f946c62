"""Numbers of changed frequencies: tensors in, tensors out."""
