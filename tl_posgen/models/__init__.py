"""Models: what their layers do with positions (the probe), loading, random inits, and capture.

Nothing here imports TransformerLens or transformers before it is used.
"""

from tl_posgen.models.capture.cache import captures_from_cache, needed_names
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.layer_table import check, geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import ContextLimit, LayerGeometry
from tl_posgen.models.layers.projections import Projections
from tl_posgen.models.loading.load import load_model, open_session
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.model import Model
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import Origin, Session, session_of
from tl_posgen.models.tokens import bundled_text, read_text, to_prompts, token_strings

__all__ = [
    "ContextLimit",
    "LayerCapture",
    "LayerGeometry",
    "Model",
    "Origin",
    "Projections",
    "Session",
    "bundled_text",
    "captures_from_cache",
    "capturing",
    "check",
    "geometry_of",
    "load_model",
    "needed_names",
    "open_session",
    "random_like",
    "read_text",
    "run_capture",
    "select_heads",
    "session_of",
    "to_prompts",
    "token_strings",
]
