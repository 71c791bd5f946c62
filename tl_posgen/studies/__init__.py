"""Many models, texts and checkpoints: `tl_posgen.sweep(study, out=...)`, and measures over training."""
