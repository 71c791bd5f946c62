"""Every example runs from top to bottom on the mini model, and its notebook is the one generated from its source.

The cells run in this process, on shorter prompts, and what a cell shows last is rendered as a notebook would render it.
One example runs in a kernel, as users run it.
"""

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
jupytext = pytest.importorskip("jupytext")


IN_A_KERNEL = "04_coupling"


def short(code: str) -> str:
    """The cell with one short prompt instead of several."""
    return re.sub(r'(length"?[=:] ?)128', r"\g<1>32", re.sub(r'(n_prompts"?[=:] ?)\d', r"\g<1>1", code))


def cells(source: Path) -> list[str]:
    """The code of every cell, on short prompts; the package under test is installed already."""
    own = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    return [short(code) for code in own if "%pip" not in code]


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_is_generated_from_the_source(source):
    written = jupytext.read(source.with_suffix(".ipynb"))
    generated = jupytext.read(source)
    assert [(c.cell_type, c.source) for c in written.cells] == [(c.cell_type, c.source) for c in generated.cells]


def test_no_notebook_is_left_over():
    notebooks = {path.stem for path in EXAMPLES[0].parent.glob("*.ipynb")}
    assert notebooks == {path.stem for path in EXAMPLES}


def last_value(code: str, names: dict) -> object:
    """Run a cell; the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
@pytest.mark.parametrize("source", [path for path in EXAMPLES if path.stem != IN_A_KERNEL], ids=lambda path: path.stem)
def test_the_example_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, shown = {"__name__": "__main__"}, []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for code in cells(source):
            value = last_value(code, names)
            html = getattr(value, "_repr_html_", None)
            shown += [html()] if html is not None else []
    assert any(shown), "nothing was drawn"
    assert printed.getvalue()
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.slow
def test_an_example_runs_in_a_kernel(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.read(next(path for path in EXAMPLES if path.stem == IN_A_KERNEL))
    notebook.cells = [cell for cell in notebook.cells if "%pip" not in cell.source]
    for cell in notebook.cells:
        cell.source = short(cell.source)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("name" in output and output["name"] == "stdout" for output in outputs)
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "report" / "index.html").exists()
