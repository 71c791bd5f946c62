"""One pass over a layer's q and k per prompt; any number of analyzers share it."""
