"""Many models, texts and checkpoints: `tl_posgen.sweep(study, out=...)`, and measures over training."""

import sys
from types import ModuleType
from typing import Any

from tl_posgen.sweep.collect import open_study, report_study
from tl_posgen.sweep.emergence import emergence
from tl_posgen.sweep.run import Swept, sweep
from tl_posgen.sweep.study import Study

__all__ = ["Study", "Swept", "emergence", "open_study", "report_study", "sweep"]


class Sweep(ModuleType):
    """`tl_posgen.sweep` is this package once any part of it is imported; called, it is its main function."""

    def __call__(self, *args: Any, **options: Any) -> Swept:
        return sweep(*args, **options)


sys.modules[__name__].__class__ = Sweep
