"""The claims of Aubry et al. 2024 (arXiv 2407.07810), coupling of residual Jacobians: numbers, thresholds, and what
would speak against each."""

from collections.abc import Mapping
from typing import Any

from tl_posgen.claims.judging import Claim, Criterion, Group, ends_of_nulls
from tl_posgen.claims.over_training import over_training
from tl_posgen.core.result import Result

_COUPLED = {"held": 0.2, "partly": 0.1}
OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}


def _coupling(result: Result, at: Mapping[str, float], quantity: str = "coupling", **labels: str) -> Criterion:
    """Return the criterion of a coupling, whose low end has to be above random bases and the intervals of all null
    models."""
    numbers, of_chance = result.numbers, {dim: label for dim, label in labels.items() if dim != "bases"}
    beyond = {
        "random bases": [numbers("chance", **of_chance).value],
        **ends_of_nulls(numbers, "coupling", "high", **labels),
    }
    fields: dict[str, Any] = {"beyond": beyond, "otherwise": "detectable", "digits": 3}
    return Criterion.of_end(quantity, numbers("coupling", **labels), **at, **fields)


def _beyond_ends(result: Result, quantity: str, name: str, held: float, sign: int = 1, **fields: Any) -> Criterion:
    """Return the criterion of a number whose interval has to be beyond the intervals of all null models."""
    beyond = ends_of_nulls(result.numbers, name, "high" if sign > 0 else "low")
    return Criterion.of(quantity, result.numbers(name), held, beyond=beyond, sign=sign, **fields)


def _growth(coupling: Result, least: float) -> list[Group]:
    r2 = _beyond_ends(coupling, "R² of ln |x| against depth", "growth_r2", least, otherwise="detectable")
    nulls = coupling.numbers("growth_r2").nulls
    return [Group("partly" if r2.holds and max(nulls) >= least else r2.verdict, [r2])]


COUPLING = [
    Claim(
        "coupling 1",
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% intervals of coupling, and of left with right vectors, above random bases and above those of all null "
        "models, of one or both: detectable; of both, and each lower end at least {held}: held, {partly}: partly",
        ("coupling",),
        lambda coupling, **at: [_coupling(coupling, at), _coupling(coupling, at, "left with right", bases="swapped")],
        thresholds=_COUPLED,
    ),
    Claim(
        "coupling 2",
        "Token trajectories are close to straight lines; not at random init.",
        "95% interval below those of all null models: partly; and line-shape score at most {held}: held",
        ("coupling",),
        lambda coupling, held: [
            _beyond_ends(coupling, "line-shape score", "line_shape_score", held, otherwise="partly", sign=-1)
        ],
        thresholds={"held": 1.25},
    ),
    Claim(
        "coupling 3",
        "Norms grow exponentially with depth; not at random init.",
        "95% interval of the exponential's R² above those of all null models: detectable; and R² at least {least}: "
        "partly; and all of theirs below {least}: held; open with one layer",
        ("coupling",),
        _growth,
        lambda coupling: "one layer: a line through two states is exact" if coupling.trained.sizes["state"] < 3 else "",
        thresholds={"least": 0.9},
    ),
    Claim(
        "coupling 4",
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first, which is the null: partly; and no checkpoint "
        "higher: held",
        ("emergence",),
        **over_training("coupling_coupling", "coupling"),
    ),
    Claim(
        "coupling 4b",
        "Token trajectories become straighter during training.",
        "95% interval of the last checkpoint's line-shape score below that of the first, which is the null: partly; "
        "and no checkpoint lower: held",
        ("emergence",),
        **over_training("coupling_line_shape_score", "line-shape score", sign=-1),
    ),
    Claim(
        "coupling 4c",
        "The growth of norms with depth becomes exponential during training.",
        "95% interval of the last checkpoint's R² above that of the first, which is the null: detectable; and R² at "
        "least {least}: partly; and no checkpoint higher: held",
        ("emergence",),
        **over_training("coupling_growth_r2", "R² of ln |x| against depth"),
        thresholds={"least": 0.9},
    ),
    Claim(
        "coupling 5",
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above those of all null models, of one kind or more: detectable; of all "
        "three, and every lower end at least {held}: held, {partly}: partly",
        ("token_coupling",),
        lambda token_coupling, **at: [
            _coupling(token_coupling, at, f"coupling {label}", kind=kind) for kind, label in OF_TOKENS.items()
        ],
        thresholds=_COUPLED,
    ),
    Claim(
        "coupling 6",
        "Over many models coupling goes with benchmark score.",
        "not judged of one model",
        ("coupling_scores",),
    ),
]
