"""Measure how a language model's attention uses position: a plugin for TransformerLens.

Names are imported when first used: `import tl_posgen` loads neither torch nor TransformerLens.
"""

from importlib.metadata import version as _version

import lazy_loader as _lazy

__version__ = _version("tl-posgen")
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
