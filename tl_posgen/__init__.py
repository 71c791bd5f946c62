"""How does a language model's attention use position? A plugin for TransformerLens.

Names are imported when first used: `import tl_posgen` loads neither torch nor TransformerLens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "analyze": "analysis",
    "attach": "analysis",
    "analyze_cache": "analysis",
    "judge_claims": "claims.run",
    "Report": "report",
    "Result": "results",
    "load": "results",
    "load_model": "models.load",
    "random_like": "models.random_like",
    "check": "models.probe",
    "ThreeAxis": "analyzers.three_axis",
    "Variance": "analyzers.variance",
    "MeanKey": "analyzers.mean_key",
    "Planes": "analyzers.planes",
    "Residual": "analyzers.residual",
    "AcrossPrompts": "analyzers.across_prompts",
    "Slash": "analyzers.slash",
    "SlashPlanes": "analyzers.slash_planes",
    "find_slash_heads": "experiments.slash",
    "PosgenError": "errors",
}
__version__ = "0.1.0"
__all__ = [
    "AcrossPrompts",
    "MeanKey",
    "Planes",
    "PosgenError",
    "Report",
    "Residual",
    "Result",
    "Slash",
    "SlashPlanes",
    "ThreeAxis",
    "Variance",
    "__version__",
    "analyze",
    "analyze_cache",
    "attach",
    "check",
    "find_slash_heads",
    "judge_claims",
    "load",
    "load_model",
    "random_like",
]

if TYPE_CHECKING:
    from tl_posgen.analysis import analyze, analyze_cache, attach
    from tl_posgen.analyzers.across_prompts import AcrossPrompts
    from tl_posgen.analyzers.mean_key import MeanKey
    from tl_posgen.analyzers.planes import Planes
    from tl_posgen.analyzers.residual import Residual
    from tl_posgen.analyzers.slash import Slash
    from tl_posgen.analyzers.slash_planes import SlashPlanes
    from tl_posgen.analyzers.three_axis import ThreeAxis
    from tl_posgen.analyzers.variance import Variance
    from tl_posgen.claims.run import judge_claims
    from tl_posgen.errors import PosgenError
    from tl_posgen.experiments.slash import find_slash_heads
    from tl_posgen.models.load import load_model
    from tl_posgen.models.probe import check
    from tl_posgen.models.random_like import random_like
    from tl_posgen.report import Report
    from tl_posgen.results import Result, load


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tl_posgen' has no attribute {name!r}")
    return getattr(import_module(f"tl_posgen.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
