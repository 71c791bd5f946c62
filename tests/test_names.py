"""Names say what they hold, so that a file can be read without knowing where a value comes from."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tl_posgen

PACKAGE = Path(tl_posgen.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SAY_NOTHING = {"one", "found", "known", "both", "how", "own", "told", "said", "some", "each", "made"}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of all that is assigned, and of the parameters of lambdas."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Lambda):
            yield from ((node.lineno, argument.arg) for argument in node.args.args)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_bound_names_say_what_they_hold(path):
    names = [f"line {line}: {name}" for line, name in bound_names(ast.parse(path.read_text(encoding="utf-8")))]
    assert [name for name in names if name.rpartition(" ")[2] in SAY_NOTHING] == []


def names_in(path: Path) -> set[str]:
    """Return every name that a file imports, reads or writes as a word of a string."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {part for word in node.value.split() for part in word.replace(":", ".").split(".")}
    return names


def test_functions_that_no_other_file_names_have_an_underscore():
    others = [*Path(__file__).parent.rglob("*.py"), *(PACKAGE.parent / "docs" / "source").rglob("*.py")]
    named = {path: names_in(path) for path in (*FILES, *others)}
    alone = {
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in FILES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if not any(node.name in names for other, names in named.items() if other != path)
    }
    assert not alone, "\n".join(sorted(alone))
