"""Analyzers by name: the built-in ones, and those of other packages."""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from tl_posgen.analyzers.base import Analyzer
from tl_posgen.errors import InputError

DEFAULT = ("three_axis", "variance", "mean_key")
BUILT_IN = {
    "three_axis": "tl_posgen.analyzers.three_axis:ThreeAxis",
    "variance": "tl_posgen.analyzers.variance:Variance",
    "mean_key": "tl_posgen.analyzers.mean_key:MeanKey",
    "planes": "tl_posgen.analyzers.planes:Planes",
    "residual": "tl_posgen.analyzers.residual:Residual",
    "across_prompts": "tl_posgen.analyzers.across_prompts:AcrossPrompts",
    "slash": "tl_posgen.analyzers.slash:Slash",
    "slash_planes": "tl_posgen.analyzers.slash_planes:SlashPlanes",
}
GROUP = "tl_posgen.analyzers"  # entry point group that another package registers its analyzers under


def make_analyzers(chosen: Sequence[str | Analyzer] | None) -> list[Analyzer]:
    """Analyzer objects for names and objects, in order; names become objects with their default options.

    Raises:
        InputError: an unknown name, an object that is no analyzer, or the same name twice.
    """
    analyzers = [_by_name(item) if isinstance(item, str) else item for item in chosen or DEFAULT]
    for analyzer in analyzers:
        if not isinstance(analyzer, Analyzer):
            raise InputError(f"{analyzer!r} is no analyzer: it needs name, needs, update(capture) and result()")
    names = [analyzer.name for analyzer in analyzers]
    if len(set(names)) < len(names):
        raise InputError(f"analyzers {', '.join(names)}: each name may stand only once")
    return analyzers


def _by_name(name: str) -> Analyzer:
    others = {point.name: point.value for point in entry_points(group=GROUP)}
    known = {**others, **BUILT_IN}
    if name not in known:
        raise InputError(f"no analyzer {name!r}; known: {', '.join(sorted(known))}")
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)()
