"""Getting a model by name or directory, its checkpoints, its random inits and its shuffled copies."""
