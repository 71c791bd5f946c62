"""Numbers of frozen norms and of the maps made of them: tensors in, tensors out."""
