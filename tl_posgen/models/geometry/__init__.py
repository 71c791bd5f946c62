"""Finding a layer's geometry by one short forward pass, and proving it against what the model computes."""
