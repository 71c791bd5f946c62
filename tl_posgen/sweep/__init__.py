"""Many models, texts and checkpoints: `tl_posgen.sweep(study, out=...)`, and measures over training.

Names are imported when first used, so that an executor's processes start before torch is needed.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tl_posgen.sweep.collect import open_study, report_study
    from tl_posgen.sweep.emergence import emergence
    from tl_posgen.sweep.run import Swept, sweep
    from tl_posgen.sweep.study import Study

__all__ = ["Study", "Swept", "emergence", "open_study", "report_study", "sweep"]
MODULES = {"Study": "study", "Swept": "run", "emergence": "emergence", "sweep": "run"}
MODULES |= {"open_study": "collect", "report_study": "collect"}


class Sweep(ModuleType):
    """`tl_posgen.sweep` is this package once any part of it is imported; called, it is its main function."""

    def __call__(self, *args: Any, **options: Any) -> "Swept":
        return self.sweep(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module {self.__name__} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{MODULES[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """`emergence` stays the function when its module of the same name is imported."""
        is_module = isinstance(value, ModuleType) and name in MODULES
        super().__setattr__(name, getattr(value, name) if is_module else value)


sys.modules[__name__].__class__ = Sweep
