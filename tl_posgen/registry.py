"""Measures by name: the built-in ones, and those that other distributions register."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from tl_posgen.core.declaration import declaration_of
from tl_posgen.core.measure import Measure as NewMeasure
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.options import Options, require

GROUP = "tl_posgen.measures"  # entry point group; an entry's name is the measure's
DEFAULT = ("three_axis", "variance", "mean_key", "attention_examples")
BUILT_IN = {
    "three_axis": "tl_posgen.position.decomposition.three_axis:ThreeAxis",
    "variance": "tl_posgen.position.decomposition.variance:Variance",
    "mean_key": "tl_posgen.position.decomposition.mean_key:MeanKey",
    "attention_examples": "tl_posgen.position.decomposition.attention_examples:AttentionExamples",
    "residual": "tl_posgen.position.decomposition.residual:Residual",
    "across_prompts": "tl_posgen.position.decomposition.across_prompts:AcrossPrompts",
    "planes": "tl_posgen.position.planes.planes:Planes",
    "plane_sufficiency": "tl_posgen.position.planes.plane_sufficiency:PlaneSufficiency",
    "plane_interaction": "tl_posgen.position.planes.plane_interaction:PlaneInteraction",
    "plane_perturbation": "tl_posgen.position.planes.plane_perturbation:PlanePerturbation",
    "any_distance": "tl_posgen.position.planes.any_distance:AnyDistance",
    "dummy_distance": "tl_posgen.position.distance.dummy_distance:DummyDistance",
    "substitution": "tl_posgen.position.substitution.substitution",
    "split_examples": "tl_posgen.position.substitution.split_examples",
    "perturbation": "tl_posgen.position.order.perturbation",
    "length_extrapolation": "tl_posgen.position.length.length_extrapolation",
    "loss": "tl_posgen.loss:Loss",
    "slash": "tl_posgen.slash.slash:Slash",
    "slash_planes": "tl_posgen.slash.slash_planes:SlashPlanes",
    "slash_ablation": "tl_posgen.slash.slash_ablation:SlashAblation",
    "slash_transfer": "tl_posgen.slash.slash_transfer:SlashTransfer",
    "cone": "tl_posgen.slash.cone:Cone",
    "band_ablation": "tl_posgen.slash.band_ablation:BandAblation",
    "slash_toy": "tl_posgen.slash.slash_toy:SlashToy",
    "coupling": "tl_posgen.coupling.coupling:Coupling",
    "token_coupling": "tl_posgen.coupling.token_coupling:TokenCoupling",
    "coupling_scores": "tl_posgen.coupling.coupling_scores:CouplingScores",
    "profiles": "tl_posgen.joining.profiles:Profiles",
    "key_cut": "tl_posgen.joining.key_cut:KeyCut",
    "emergence": "tl_posgen.studies.emergence",
    "comparison": "tl_posgen.comparison",
    "study": "tl_posgen.studies.overview",
    "claims": "tl_posgen.claim",
}


def names() -> list[str]:
    """Every measure that `analyze` can be asked for by name."""
    return sorted({*BUILT_IN, *(point.name for point in plug_ins())})


def plug_ins() -> list[Any]:
    """Measures of other distributions; a built-in measure's name is never theirs."""
    return [point for point in entry_points(group=GROUP) if point.name not in BUILT_IN]


def find(name: str) -> Measure | None:
    """The measure of this name, or None where nobody registered one (a saved result may come from elsewhere)."""
    require("the name of a measure", name, str)
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        found = vars(import_module(module))[kind or "MEASURE"]
        return declaration_of(found) if kind else found
    for point in plug_ins():
        if point.name == name:
            try:
                measure = point.load()
            except Exception as error:  # whatever somebody else's module raises when it is imported
                raise InputError(f"the entry point {name!r} ({point.value}) cannot be loaded: {error!r}") from error
            if isinstance(measure, type) and issubclass(measure, NewMeasure):
                measure = declaration_of(measure)
            if not isinstance(measure, Measure) or measure.name != name:
                raise InputError(
                    f"the entry point {name!r} of {point.dist.name if point.dist else 'a package'} gives {measure!r}, "
                    f"not the Measure named {name!r}"
                )
            return measure
    return None


def requested(measures: Sequence[Any] | Any | None) -> list[Request]:
    """Names, measures and options objects as requests, in order, the results that they need before them.

    Raises:
        InputError: an unknown name, something else than a measure, or one measure twice.
    """
    if measures is None:
        measures = DEFAULT
    if isinstance(measures, str | Measure | NewMeasure | Options | Request) or not isinstance(measures, Sequence):
        measures = [measures]
    asked = [request_of(item) for item in measures]
    if not asked:
        raise InputError("no measures chosen; leave measures out for the usual ones")
    for number, request in enumerate(asked):
        if request.name in [other.name for other in asked[:number]]:
            raise InputError(f"measures: {request.name} stands there twice")
    ordered: dict[str, Request] = {}
    for request in asked:
        before_it(request, {other.name: other for other in asked}, ordered)
    return list(ordered.values())


def before_it(request: Request, asked: dict[str, Request], ordered: dict[str, Request]) -> None:
    """Put a request in order, behind those whose results it is given."""
    for name in request.measure.after:
        if name not in ordered:
            before_it(asked.get(name) or request_of(name), asked, ordered)
    ordered.setdefault(request.name, request)


def request_of(item: Any) -> Request:
    if isinstance(item, type) and issubclass(item, NewMeasure):
        item = item.with_options({})
    if isinstance(item, NewMeasure):
        return checked(Request(declaration_of(type(item)), item))
    if isinstance(item, type) and issubclass(item, Options):
        item = getattr(item, "measure", item)
    if isinstance(item, Options) and hasattr(item, "measure"):
        item = Request(item.measure, item)
    if isinstance(item, Request):
        return checked(item)
    if isinstance(item, str):
        measure = find(item)
        if measure is None:
            near = get_close_matches(item, names(), n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"no measure {item!r}; {meant}known: {', '.join(names())}")
        item = measure
    if not isinstance(item, Measure):
        kinds = "a name, a Measure or its options, such as ThreeAxis(ridge=1), or a list of them"
        raise InputError(f"{item!r} is no measure: give {kinds}")
    return checked(Request(item, item.make_options()))


def checked(request: Request) -> Request:
    """Refuse a measure that takes no model and prompts, and one under the name of another that is registered."""
    measure = request.measure
    if measure.collector is None and measure.procedure is None:
        raise InputError(f"{measure.name} takes no single model and prompts; call its own function")
    if measure.name in BUILT_IN and find(measure.name) is not measure:
        raise InputError(f"there is a built-in measure {measure.name}; give yours another name")
    return request
