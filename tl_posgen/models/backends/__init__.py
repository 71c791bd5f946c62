"""The two kinds of model, HookedTransformer and TransformerBridge: one class each, their hooks, their attention."""
