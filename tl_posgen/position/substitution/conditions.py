"""The conditions of the substitution experiment: what stands in for the scores."""

from functools import partial
from typing import Any

from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import ScoresOf
from tl_posgen.position.decomposition.pair_weights_fit import LONGEST
from tl_posgen.position.substitution.hooks import (
    all_positions,
    by_constant,
    by_split,
    by_three_axis,
    near,
    own_profile,
    query_profile,
)
from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.position.substitution.splits import point_mass, triangle, uniform


def conditions_of(options: Any, length: int) -> dict[str, ScoresOf | None]:
    """What stands in for the scores of prompts of `length` tokens, by name; None for the unchanged model.

    Args:
        options: a `Substitution`.
    """
    if not len(options.widths):
        raise InputError("widths: give at least one triangle width")
    splits = {f"mean_key_{d0:g}": by_split(point_mass(d0)) for d0 in options.dummy_distances}
    splits |= {f"triangle_{width:g}": by_split(triangle(width)) for width in options.widths}
    constant = partial(by_constant, gamma=options.gamma)
    splits |= {f"mean_query_{n}": by_split(uniform(n), query="mean") for n in options.mean_query_distances}
    splits |= {"k_q_simplify": by_split(all_positions, query="mean")}
    splits |= {"own_profile": by_split(own_profile), "query_profile": by_split(query_profile)}
    splits |= {part: by_split(triangle(options.widths[0]), part) for part in CONTROLS}
    fits: dict[str, ScoresOf] = {"three_axis": by_three_axis}
    fits |= {f"three_axis_near_{width:g}": partial(by_three_axis, weights=near(width)) for width in options.near_widths}
    if length <= LONGEST:
        fits["three_axis_attention"] = partial(by_three_axis, weights="attention")
    return {"unchanged": None, "uniform_attention": constant, **fits, **splits}
