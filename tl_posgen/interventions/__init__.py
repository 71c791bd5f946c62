"""Builders of TransformerLens hooks that change what attention sees of positions: `[(hook_name, fn), ...]`.

They compose like any other hooks: `model.run_with_hooks(tokens, fwd_hooks=a + b)`.
"""

from tl_posgen.interventions.bands import ablate_bands
from tl_posgen.interventions.dummy_distance import dummy_distance
from tl_posgen.interventions.interpolation import interpolate_positions
from tl_posgen.interventions.lm_infinite import lm_infinite
from tl_posgen.interventions.positions import (
    distances_jittered,
    keys_turned,
    position_part_permuted,
    positions_permuted,
)
from tl_posgen.interventions.retrieval import retrieve_blocks
from tl_posgen.interventions.scores import replace_scores
from tl_posgen.interventions.substitution import (
    FreeSplit,
    by_constant,
    by_free_split,
    by_split,
    by_three_axis,
    own_profile,
    query_profile,
    substitute,
)

__all__ = [
    "FreeSplit",
    "ablate_bands",
    "by_constant",
    "by_free_split",
    "by_split",
    "by_three_axis",
    "distances_jittered",
    "dummy_distance",
    "interpolate_positions",
    "keys_turned",
    "lm_infinite",
    "own_profile",
    "position_part_permuted",
    "positions_permuted",
    "query_profile",
    "replace_scores",
    "retrieve_blocks",
    "substitute",
]
