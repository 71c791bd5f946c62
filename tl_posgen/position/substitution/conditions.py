"""Conditions of the measure `substitution`: their names, which of them stand in for all scores, and their words."""

from tl_posgen.interventions import UNTOUCHED

UNIFORM = "uniform_attention"
AT_SINKS = {name: f"{name}, true at sinks" for name in ("query_profile", "own_profile", UNIFORM)}
AT_RANDOM = "query_profile, true at random keys"
NO_VALUES = {
    "query_profile": "query_profile, sinks without value",
    AT_SINKS["query_profile"]: "query_profile, true at sinks without value",
    UNTOUCHED: f"{UNTOUCHED}, sinks without value",
}
OF_SINKS = (*AT_SINKS.values(), AT_RANDOM, *NO_VALUES.values())
NO_STAND_IN = (UNTOUCHED, UNIFORM)
NOT_OF_ALL = (*NO_STAND_IN, *OF_SINKS)  # conditions that put no stand-in in the place of all scores
WORDS = {
    "uniform_attention": "uniform attention",
    "three_axis": "three-axis fit, all pairs",
    "three_axis_near": "three-axis fit, near pairs, width",
    "three_axis_attention": "three-axis fit, attended pairs",
    "mean_query": "mean query and key, distances below",
    "k_q_simplify": "mean query and key, all distances",
    "mean_key": "mean key at distance",
    "triangle": "triangle of width",
    "own_profile": "own attention profile",
    "query_profile": "profile of each query",
    "position": "position alone",
    "content": "content alone",
}
