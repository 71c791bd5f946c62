"""Who imports whom: files of numbers import tensors and each other, and importing the package loads no engine.

The layers between packages are import-linter's (pyproject.toml); this is what it cannot say. Every file of rope/ and
stats/ is a file of numbers. In a subject every file is one, unless what it defines says otherwise: it declares a
measure or a part of one, it is the subject's claims.py or __init__.py, or a function in it takes a model, a layer's
capture or labelled results. A new file is a file of numbers until it does one of these.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tl_posgen"
MATHS = ("rope", "stats")
BASE = (*MATHS, "models", "hooks", "report", "studies", "cli")  # every other folder of the package is a subject
ALLOWED = {"torch", "einops", "jaxtyping", *sys.stdlib_module_names}
PARTS_OF_A_MEASURE = {"Measure", "Variable", "Collector", "Options", "TokenView", "Request"}
NOT_OF_NUMBERS = {"Model", "Summary", "LayerCapture", "Dataset", "DataArray", "DataFrame", "Result", "Report"}


def is_subject(path: str) -> bool:
    """Whether a module, as a path such as "slash/numbers/cone_fit.py", belongs to a subject."""
    return "/" in path and path.split("/")[0] not in BASE


def is_file_of_numbers(path: str, source: str) -> bool:
    if path.split("/")[0] in MATHS:
        return True
    if not is_subject(path) or path.split("/")[-1] in ("claims.py", "__init__.py"):
        return False
    nodes = list(ast.walk(ast.parse(source)))
    declares = {name for node in nodes for name in _names(_declared(node))}
    arguments = [argument for node in nodes if isinstance(node, ast.arguments) for argument in _arguments(node)]
    takes = {name for argument in arguments for name in _names([argument.annotation])}
    named_model = any(argument.arg == "model" for argument in arguments)
    return not (declares & PARTS_OF_A_MEASURE or takes & NOT_OF_NUMBERS or named_model)


def _declared(node: ast.AST) -> list[ast.expr]:
    """What is called, and what a class derives from."""
    if isinstance(node, ast.Call):
        return [node.func]
    return node.bases if isinstance(node, ast.ClassDef) else []


def _arguments(node: ast.arguments) -> list[ast.arg]:
    return [*node.posonlyargs, *node.args, *node.kwonlyargs]


def _names(expressions: list[ast.expr | None]) -> Iterator[str]:
    """The names in expressions, such as Dataset in `xr.Dataset | None`, also inside of strings."""
    for expression in filter(None, expressions):
        for node in ast.walk(expression):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                yield node.value


def imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions too; names of a package one by one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["tl_posgen", *path.split("/")[:-1]]
            above = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@cache
def module_path(module: str) -> str | None:
    """The file that a dotted name of the package is in: "slash/numbers/cone_fit.py" for `tl_posgen.slash.numbers.cone_fit.fit_cone`."""
    parts = module.split(".")[1:]
    for n in range(len(parts), 0, -1):
        for path in ("/".join(parts[:n]) + ".py", "/".join([*parts[:n], "__init__.py"])):
            if (PACKAGE / path).is_file():
                return path
    return None


def foreign_imports(path: str, source: str) -> list[str]:
    """What a file of numbers imports that it must not."""
    found = []
    for line, module in imported(path, source):
        top = module.split(".")[0]
        if top == "tl_posgen":
            target = module_path(module)
            allowed = target == "errors.py" or (
                target is not None and is_file_of_numbers(target, (PACKAGE / target).read_text(encoding="utf-8"))
            )
        else:
            allowed = top in ALLOWED or (top == "numpy" and path.startswith("stats/"))  # of what was measured
        if not allowed:
            found.append(f"tl_posgen/{path}:{line} imports {module}")
    return found


MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
NUMBERS = sorted(path for path, source in MODULES.items() if is_file_of_numbers(path, source))


@pytest.mark.parametrize("path", NUMBERS)
def test_a_file_of_numbers_imports_tensors_and_other_numbers_only(path):
    found = foreign_imports(path, MODULES[path])
    assert not found, (
        f"{'; '.join(found)}. A file that declares no measure and takes no model, capture or dataset holds numbers: it "
        "may import torch, einops, jaxtyping, the standard library, tl_posgen.rope, .stats, .errors and other numbers"
    )


def test_every_subject_has_files_of_numbers_and_of_measures():
    subjects = {path.split("/")[0] for path in MODULES if is_subject(path)}
    assert subjects >= {"position", "slash", "coupling"}
    for subject in subjects:
        of_subject = {path for path in MODULES if path.startswith(f"{subject}/")}
        assert of_subject & set(NUMBERS)
        assert of_subject - set(NUMBERS)


NUMBER = "import torch\n\ndef mean(x: torch.Tensor):\n    {}\n    return x.mean()\n"


@pytest.mark.parametrize(
    "line",
    [
        "import plotly.graph_objects as go",
        "from xarray import Dataset",
        "import numpy as np",
        "from tl_posgen.models.loading.load import load_model",
        "from tl_posgen import load_model",
        "from tl_posgen.report.figures import head_map",
        "from ..models import load_model",
    ],
)
def test_a_new_file_of_numbers_with_a_foreign_import_is_caught(line):
    source = NUMBER.format(line)
    for path in ("slash/new.py", "new_subject/new.py", "rope/new.py"):
        assert is_file_of_numbers(path, source)
        assert len(foreign_imports(path, source)) == 1
    assert len(foreign_imports("stats/new.py", source)) == ("numpy" not in line)


@pytest.mark.parametrize(
    "line",
    [
        "import math",
        "from einops import rearrange",
        "from tl_posgen.rope.rotation import Rope",
        "from tl_posgen.stats import agreement",
        "from tl_posgen.errors import InputError",
        "from ..errors import InputError",
    ],
)
def test_tensors_numbers_and_errors_may_be_imported(line):
    assert foreign_imports("slash/new.py", NUMBER.format(line)) == []


@pytest.mark.parametrize(
    "source",
    [
        "MEASURE = Measure(name='new')",
        "class New(Collector): ...",
        "class New(measure.Options): ...",
        "def run(model, prompts): ...",
        "def hooks(tokens, *, model: 'Model'): ...",
        "def update(layer: LayerCapture): ...",
        "def draw(data: xr.Dataset | None = None): ...",
    ],
)
def test_a_measure_a_procedure_a_hook_or_a_figure_is_no_file_of_numbers(source):
    assert not is_file_of_numbers("slash/new.py", source)
    assert is_file_of_numbers("stats/new.py", source)


HEAVY = "torch transformer_lens transformers plotly xarray pandas circuitsvis lm_eval"


@pytest.mark.parametrize(
    "code",
    [
        "import tl_posgen; dir(tl_posgen)",
        "import sys; sys.argv = ['tl-posgen', '--help']; from tl_posgen.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
    ],
    ids=["import tl_posgen", "tl-posgen --help"],
)
def test_neither_the_package_nor_the_help_loads_an_engine(code):
    code = f"{code}\nimport sys; print('loaded:', *[name for name in {HEAVY!r}.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
