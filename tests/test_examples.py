"""Every example runs from top to bottom on the mini model, and its notebook is the one generated from its source.

The cells run in this process, and what a cell shows last is rendered as a notebook would render it. One example also
runs in a kernel, as users run it.
"""

import ast
import contextlib
import io
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
jupytext = pytest.importorskip("jupytext")


def cells(source: Path) -> list[str]:
    """The code of every cell; the package under test is installed already."""
    return [
        cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code" and "%pip" not in cell.source
    ]


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


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
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


def test_an_example_runs_in_a_kernel(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.read(next(path for path in EXAMPLES if "coupling" in path.stem))
    notebook.cells = [cell for cell in notebook.cells if "%pip" not in cell.source]
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "report" / "index.html").exists()
