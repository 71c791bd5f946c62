"""Options of measures that are not yet dataclasses themselves: frozen dataclasses checked against their annotations."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from tl_posgen.core.options import NAMES as NAMES
from tl_posgen.core.options import fits as fits
from tl_posgen.core.options import in_words as in_words
from tl_posgen.core.options import require as require
from tl_posgen.core.options import require_name as require_name

if TYPE_CHECKING:
    from tl_posgen.measure import Measure


@dataclass(frozen=True)
class Options:
    """Base of a measure's options: a frozen dataclass, whose docstring is the measure's reference.

    Values of another type than annotated are refused here; `check` refuses others that cannot be used.
    """

    measure: ClassVar["Measure"]  # set where the measure is declared

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), localns={"Measure": Any})  # also of modules that postpone annotations
        for one in fields(self):
            require(one.name, getattr(self, one.name), kinds[one.name])
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be used, before anything runs; InputError names the option and the remedy."""
