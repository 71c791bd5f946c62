"""Measures in a file that a test writes, imports, and changes."""

import os
import sys
import time
from pathlib import Path
from types import ModuleType

SOURCE = """
from dataclasses import dataclass
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.options import Whole

@dataclass(frozen=True)
class KeySize(Measure):
    "|k|^2 of a head, times a factor."
    power: "Whole" = 1
    variables = {"size": Variable("size of keys")}
    figures = {}

    def of_layer(self, layer):
        return {"size": FACTOR * layer.k.square().mean((1, 2)) ** self.power}

    def findings(self, numbers):
        return []
"""


def write_measure(directory: Path, factor: int, *, age: float = 3600.0, registered: bool = True) -> ModuleType:
    """Write a measure `KeySize`, a factor times the size of keys, into a file changed `age` seconds ago; import it."""
    path = directory / "a_written_measure.py"
    path.write_text(SOURCE.replace("FACTOR", str(factor)))
    os.utime(path, (time.time() - age,) * 2)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    try:
        exec(compile(path.read_text(), path, "exec"), vars(module))  # as bytecode of the same second would be taken up
    finally:
        if not registered:
            del sys.modules[path.stem]
    return module
