"""Measures by name: the built-in ones, and the entry points of other distributions."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from tl_posgen.core.measure import HEAD, Measure
from tl_posgen.core.options import require
from tl_posgen.errors import InputError

GROUP = "tl_posgen.measures"  # entry point group; an entry's name is the measure's
_DEFAULT = ("variance", "three_axis", "mean_key", "attention_examples")
BUILT_IN = {  # name -> module:Class
    "three_axis": "tl_posgen.position.decomposition.three_axis:ThreeAxis",
    "variance": "tl_posgen.position.decomposition.variance:Variance",
    "mean_key": "tl_posgen.position.decomposition.mean_key:MeanKey",
    "attention_examples": "tl_posgen.position.decomposition.attention_examples:AttentionExamples",
    "bias_pairs": "tl_posgen.position.decomposition.bias_pairs:BiasPairs",
    "bias_ablation": "tl_posgen.position.decomposition.bias_ablation:BiasAblation",
    "residual": "tl_posgen.position.decomposition.residual:Residual",
    "planes": "tl_posgen.position.planes.planes:Planes",
    "plane_perturbation": "tl_posgen.position.planes.plane_perturbation:PlanePerturbation",
    "dummy_distance": "tl_posgen.position.distance.dummy_distance:DummyDistance",
    "substitution": "tl_posgen.position.substitution.substitution:Substitution",
    "split_examples": "tl_posgen.position.substitution.split_examples:SplitExamples",
    "perturbation": "tl_posgen.position.order.perturbation:Perturbation",
    "length_extrapolation": "tl_posgen.position.length.length_extrapolation:LengthExtrapolation",
    "loss": "tl_posgen.loss:Loss",
    "slash": "tl_posgen.slash.slash:Slash",
    "slash_planes": "tl_posgen.slash.slash_planes:SlashPlanes",
    "slash_biases": "tl_posgen.slash.slash_biases:SlashBiases",
    "slash_ablation": "tl_posgen.slash.slash_ablation:SlashAblation",
    "slash_transfer": "tl_posgen.slash.slash_transfer:SlashTransfer",
    "cone": "tl_posgen.slash.cone:Cone",
    "band_ablation": "tl_posgen.slash.band_ablation:BandAblation",
    "slash_toy": "tl_posgen.slash.slash_toy:SlashToy",
    "coupling": "tl_posgen.coupling.coupling:Coupling",
    "token_coupling": "tl_posgen.coupling.token_coupling:TokenCoupling",
    "coupling_scores": "tl_posgen.coupling.coupling_scores:CouplingScores",
    "gap": "tl_posgen.frequencies.gap:Gap",
    "sources": "tl_posgen.sources.sources:Sources",
    "rules": "tl_posgen.rules.rules:Rules",
    "plane_use": "tl_posgen.frequencies.plane_use:PlaneUse",
    "plane_roles": "tl_posgen.frequencies.plane_roles:PlaneRoles",
    "plane_cost": "tl_posgen.frequencies.plane_cost:PlaneCost",
    "recall": "tl_posgen.frequencies.recall:Recall",
    "profiles": "tl_posgen.joining.profiles:Profiles",
    "emergence": "tl_posgen.studies.emergence:Emergence",
    "comparison": "tl_posgen.comparison:Comparison",
    "explanation": "tl_posgen.prompt.explanation:ScoreTerms",
    "study": "tl_posgen.studies.overview:Overview",
    "claims": "tl_posgen.claims.judging:Claims",
}


def names() -> list[str]:
    """Return the name of every measure."""
    return sorted({*BUILT_IN, *(point.name for point in plug_ins())})


def measurable() -> list[str]:
    """Return the names of the measures that `analyze` takes: of a model and prompts."""
    registered = names()
    return [
        name for name in registered if (kind := find_or_none(name)) is not None and (kind.is_fed or kind.runs_model)
    ]


def plug_ins() -> list[Any]:
    """Return the entry points of other distributions; a built-in measure's name is never theirs."""
    return [point for point in entry_points(group=GROUP) if point.name not in BUILT_IN]


def find(name: str) -> type[Measure] | None:
    """Return the measure of this name; None where none is registered (a saved result may come from elsewhere).

    Raises:
        InputError: an entry point that cannot be loaded, or gives something else than a measure of its name.
    """
    require("the name of a measure", name, str)
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        return getattr(import_module(module), kind)
    for point in plug_ins():
        if point.name != name:
            continue
        try:
            kind = point.load()
        except Exception as error:  # whatever another package's module raises when it is imported
            raise InputError(f"the entry point {point.name!r} ({point.value}) cannot be loaded: {error!r}") from error
        if not (isinstance(kind, type) and issubclass(kind, Measure) and kind.name == point.name):
            package = point.dist.name if point.dist else "a package"
            raise InputError(
                f"the entry point {point.name!r} of {package} gives {kind!r}, not the Measure named {point.name!r}"
            )
        return kind
    return None


def find_or_none(name: str) -> type[Measure] | None:
    """Return the measure of this name; None where it is not registered or cannot be imported."""
    try:
        return find(name)
    except InputError:
        return None


def requested(measures: Sequence[Any] | Any | None) -> list[Measure]:
    """Return names, classes and instances of measures as instances, each behind the measures that it comes after.

    Raises:
        InputError: an unknown name, something else than a measure, one measure twice, or two that give the table of
            heads one column.
    """
    if measures is None:
        measures = _DEFAULT
    if isinstance(measures, str | Measure | type) or not isinstance(measures, Sequence):
        measures = [measures]
    chosen, ordered = dict[str, Measure](), dict[str, Measure]()
    for measure in map(measure_from, measures):
        if measure.name in chosen:
            raise InputError(f"measures: {measure.name} is given twice")
        chosen[measure.name] = measure
    if not chosen:
        raise InputError("no measures chosen; leave measures out for the usual ones")

    def put_in_order(measure: Measure) -> None:
        for kind in measure.after:
            if kind.name not in ordered:
                put_in_order(chosen.get(kind.name) or kind.with_options({}))
        ordered.setdefault(measure.name, measure)

    for measure in chosen.values():
        put_in_order(measure)
    columns = dict[str, str]()
    for measure in (measure for measure in ordered.values() if measure.rows == HEAD):
        for column in filter(None, (variable.headline for variable in measure.variables.values())):
            if columns.setdefault(column, measure.name) != measure.name:
                raise InputError(
                    f"measures: {columns[column]} and {measure.name} both give the column {column!r} of the table of "
                    "heads; give one of them another headline"
                )
    return list(ordered.values())


def measure_from(item: Any, options: dict[str, Any] | None = None) -> Measure:
    """Return a name, class or instance as an instance.

    Args:
        options: of a name or class.

    Raises:
        InputError: an unknown name, something else than a measure, one that takes no model and prompts, or one that has
            the name of a built-in measure.
    """
    kind = type(item) if isinstance(item, Measure) else item
    if isinstance(item, str):
        kind = find(item)
        if kind is None:
            raise InputError(none_such("measure", item, measurable()))
    if not (isinstance(kind, type) and issubclass(kind, Measure)):
        kinds = "a name, or a Measure such as ThreeAxis(ridge=1), or a list of them"
        raise InputError(f"{item!r} is no measure: give {kinds}")
    if not (kind.is_fed or kind.runs_model):
        raise InputError(f"{kind.name} takes no single model and prompts; call its own function")
    if kind.name in BUILT_IN and find(kind.name) is not kind:
        raise InputError(f"there is a built-in measure {kind.name}; give yours another name")
    return item if isinstance(item, Measure) else kind.with_options(options or {})


def none_such(kind: str, name: str, choices: Sequence[str]) -> str:
    """Return the message that nothing of this kind has the name, with the one that is like it.

    Example:
        >>> none_such("measure", "slah", ["cone", "slash"])
        "no measure 'slah'; did you mean 'slash'? known: cone, slash"
    """
    near = get_close_matches(name, choices, n=1, cutoff=0.7)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"no {kind} {name!r}; {meant}known: {', '.join(choices)}"
