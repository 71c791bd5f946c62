"""Pure functions on tensors: one question, one file. No model, no TransformerLens."""
