"""The residual stream as a sum of what embeddings, heads and MLPs wrote, and queries and keys as linear maps of it."""
