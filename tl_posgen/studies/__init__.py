"""Many models, texts and checkpoints: `tl_posgen.sweep(study, out=...)`, and measures over training.

Nothing is imported here, so that an executor's processes start before torch is needed.
"""
