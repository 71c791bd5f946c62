"""Conditions of the measure `substitution`: what stands in for all scores, and what is varied at attention sinks."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from tl_posgen.editing.score_functions import ScoresOf
from tl_posgen.interventions import UNTOUCHED
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST
from tl_posgen.position.substitution.hooks import (
    all_positions,
    by_constant,
    by_split,
    by_three_axis,
    near,
    own_profile,
    query_profile,
)
from tl_posgen.rope.splits import point_mass, triangle, uniform

if TYPE_CHECKING:
    from tl_posgen.position.substitution.substitution import Substitution

UNIFORM = "uniform_attention"


class StandIn(NamedTuple):
    """A condition in which something stands for all scores, or a condition for each value of an option.

    Attributes:
        words: what sentences call it.
        scores_of: from the measure and the value to what stands for the scores.
        option: of the measure, whose values stand behind the name; "" for one condition.
        is_split: whether it is a sum of position and content.
        is_first: whether it stands before others in the table.
        longest: tokens of the longest prompt that it is measured on.
    """

    words: str
    scores_of: Callable[["Substitution", Any], ScoresOf]
    option: str = ""
    is_split: bool = False
    is_first: bool = False
    longest: float = inf

    def values(self, name: str, measure: "Substitution") -> dict[str, Any]:
        """Return the values of the option by the names of their conditions."""
        return {f"{name}_{value:g}": value for value in getattr(measure, self.option)} if self.option else {name: None}


STAND_INS = {
    UNIFORM: StandIn(
        "uniform attention",
        lambda measure, _: partial(by_constant, gamma=measure.gamma, threshold=measure.threshold),
        is_first=True,
    ),
    "three_axis": StandIn("three-axis fit, all pairs", lambda *_: by_three_axis),
    "three_axis_near": StandIn(
        "three-axis fit, near pairs, width", lambda _, width: partial(by_three_axis, weights=near(width)), "near_widths"
    ),
    "three_axis_attention": StandIn(
        "three-axis fit, attended pairs", lambda *_: partial(by_three_axis, weights="attention"), longest=LONGEST
    ),
    "mean_key": StandIn(
        "mean key at distance", lambda _, d0: by_split(point_mass(d0)), "dummy_distances", is_split=True
    ),
    "triangle": StandIn("triangle of width", lambda _, width: by_split(triangle(width)), "widths", is_split=True),
    "mean_query": StandIn(
        "mean query and key, distances below",
        lambda _, n: by_split(uniform(n), query="mean"),
        "mean_query_distances",
        is_split=True,
    ),
    "k_q_simplify": StandIn(
        "mean query and key, all distances", lambda *_: by_split(all_positions, query="mean"), is_split=True
    ),
    "own_profile": StandIn("own attention profile", lambda *_: by_split(own_profile), is_split=True),
    "query_profile": StandIn("profile of each query", lambda *_: by_split(query_profile), is_split=True, is_first=True),
    "position": StandIn(
        "position alone", lambda measure, _: by_split(triangle(measure.widths[0]), "position"), is_first=True
    ),
    "content": StandIn(
        "content alone", lambda measure, _: by_split(triangle(measure.widths[0]), "content"), is_first=True
    ),
}
TRUE_AT = {  # condition: its stand-in, and the keys whose scores are the model's own
    "query_profile, true at sinks": ("query_profile", "sinks"),
    "own_profile, true at sinks": ("own_profile", "sinks"),
    "uniform_attention, true at sinks": (UNIFORM, "sinks"),
    "query_profile, true at random keys": ("query_profile", "random keys"),
}
NO_VALUES = {  # condition: the one that it varies, by values of sinks that are zero
    "query_profile, sinks without value": "query_profile",
    "query_profile, true at sinks without value": "query_profile, true at sinks",
    "unchanged, sinks without value": UNTOUCHED,
}
NOT_OF_ALL = (UNTOUCHED, UNIFORM, *TRUE_AT, *NO_VALUES)  # conditions that put no stand-in in the place of all scores
WORDS = {name: row.words for name, row in STAND_INS.items()}
