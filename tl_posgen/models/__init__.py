"""Models: what their layers do with positions (the probe), loading, the random twin, and capture.

Nothing here imports TransformerLens or transformers before it is used.
"""

from tl_posgen.models.cache import captures_from_cache, needed_names
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.hooks import capture_hooks, capturing, run_capture
from tl_posgen.models.load import load_model
from tl_posgen.models.origin import Origin, origin_of
from tl_posgen.models.probe import check, geometry_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import bundled_text, read_text, to_prompts, token_strings

__all__ = [
    "LayerCapture",
    "LayerGeometry",
    "Origin",
    "bundled_text",
    "capture_hooks",
    "captures_from_cache",
    "capturing",
    "check",
    "geometry_of",
    "load_model",
    "needed_names",
    "origin_of",
    "random_like",
    "read_text",
    "run_capture",
    "to_prompts",
    "token_strings",
]
