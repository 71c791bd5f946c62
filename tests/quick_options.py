"""The measures, those of a model and prompts, and options that take less time than the usual ones, of 18 tokens."""

from tl_posgen.core import registry

KINDS = {name: kind for name in registry.BUILT_IN if (kind := registry.find(name)) is not None}
NAMES = [name for name, kind in KINDS.items() if kind.is_fed or kind.runs_model]
OPTIONS = {
    "substitution": {"widths": (4,), "dummy_distances": ()},
    "slash_ablation": {"schemes": ("thirds",)},
    "band_ablation": {"schemes": ("thirds",)},
    "perturbation": {"ratios": (0, 0.2), "reaches": ("uniform",), "n_draws": 1, "n_cloze": 2},
    "plane_perturbation": {"edits": ("shuffle_phases",), "strengths": (1.0,), "map_edits": ("shuffle_phases",)},
    "dummy_distance": {"distances": (0, 4), "limits": (8,)},
    "length_extrapolation": {"inside": 18, "times": 2},
    "profiles": {"n_repeated": 2, "period": 4, "metrics": "literature"},
    "sources": {"terms": ("position", "content"), "check": True},
    "plane_cost": {"edits": ("drop",), "groups": ("planes", "quarters")},
    "recall": {"half": 4, "n_copies": 2, "hits": 0.01, "n_draws": 1},
    "gap": {"gaps": (0, 40), "at": 8, "skip": 2, "needle": 4},
    "rules": {"rules": ("window", "position_and_content"), "budget": 4},
    "coupling": {"k": 2, "tokens": (0, -1), "chance_samples": 1},
    "token_coupling": {"k": 2, "tokens": (0, -1), "chance_samples": 1},
}
