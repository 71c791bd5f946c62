"""Every intervention as hooks for `model.run_with_hooks(tokens, fwd_hooks=...)` or `model.hooks(fwd_hooks=...)`.

Each function takes the model first and returns a list of hooks, which prints what it does and can be joined to others
by `+`; the functions behind it say what to put in the place of scores.
"""

from tl_posgen.editing.ablate_heads import ablate_heads
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.editing.without_biases import without_biases
from tl_posgen.extension.frequency_rules import FrequencyRule, with_frequencies
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.extension.windows import interpolate_positions, lm_infinite, retrieve_blocks, self_extend
from tl_posgen.frequencies.plane_cost import edit_planes
from tl_posgen.frequencies.recall import move_coordinate
from tl_posgen.position.distance.hooks import at_dummy_distance
from tl_posgen.position.order.hooks import jitter_distances, permute_position_part, permute_positions
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.position.substitution.hooks import (
    all_positions,
    attention_sinks,
    authors_split,
    by_constant,
    by_split,
    by_three_axis,
    near,
    no_values_at,
    own_profile,
    query_profile,
    substitute,
    true_at,
)
from tl_posgen.prompt.score_split import patch_parts
from tl_posgen.rope.splits import DistanceDistribution, attention_profile, point_mass, triangle, uniform
from tl_posgen.rules.rules import apply_rules
from tl_posgen.slash.band_ablation import ablate_bands
from tl_posgen.sources.hooks import remove_source

__all__ = [
    "DistanceDistribution",
    "FrequencyRule",
    "RowByRow",
    "ablate_bands",
    "ablate_heads",
    "all_positions",
    "apply_rules",
    "at_dummy_distance",
    "attention_profile",
    "attention_sinks",
    "authors_split",
    "by_constant",
    "by_split",
    "by_three_axis",
    "edit_planes",
    "hold_planes",
    "interpolate_positions",
    "jitter_distances",
    "lm_infinite",
    "move_coordinate",
    "near",
    "no_values_at",
    "own_profile",
    "patch_parts",
    "permute_position_part",
    "permute_positions",
    "perturb_planes",
    "point_mass",
    "query_profile",
    "remove_source",
    "replace_scores",
    "retrieve_blocks",
    "self_extend",
    "substitute",
    "tokens_at",
    "triangle",
    "true_at",
    "uniform",
    "with_frequencies",
    "without_biases",
]
