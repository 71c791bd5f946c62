"""Numbers of the rules of attention: tensors in, tensors out."""
