"""Making a model object from a directory: config, weights, Hugging Face model, TransformerLens model."""
