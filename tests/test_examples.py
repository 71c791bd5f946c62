"""Every example runs from top to bottom on the mini model, and its notebook is the one generated from its source.

The cells run in this process, on shorter prompts, and what a cell shows last is rendered as a notebook would render it.
One example runs in a kernel, as users run it.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "source"))
import notebooks  # noqa: E402  # pyright: ignore[reportMissingImports]

EXAMPLES = notebooks.SOURCES
IN_A_KERNEL = "07_coupling"
SMALLER = {
    r'(length"?[=:] ?)128': r"\g<1>32",
    r'(n_prompts"?[=:] ?)[24]': r"\g<1>2",
    r"inside = 512": "inside = 32",
    r"steps=400": "steps=20",
}


def short(code: str) -> str:
    """The cell with two short prompts instead of several, and less training."""
    for long, small in SMALLER.items():
        code = re.sub(long, small, code)
    return code


def cells(source: Path) -> list[str]:
    """The code of every cell, on short prompts; the package under test is installed already."""
    return [short(cell.source) for cell in jupytext.read(source).cells if cell.cell_type == "code"]


def written(source: Path):
    return jupytext.read(source.with_suffix(".ipynb"))


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_is_generated_from_the_source(source):
    both = [[(c.cell_type, c.source) for c in one.cells] for one in (written(source), notebooks.notebook_of(source))]
    assert both[0] == both[1], "run make notebooks"


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_carries_what_its_cells_show(source):
    code = [cell for cell in written(source).cells if cell.cell_type == "code" and "%pip" not in cell.source]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.source for cell in code if not cell.outputs] == [], "each cell shows something"
    assert [output for output in outputs if output.output_type == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    texts = str([output.get("text") or {**output.data, "image/png": ""} for output in outputs])
    assert "<script" not in texts, "pictures are seen without scripts"
    assert re.findall(r"/(?:home|root|tmp|work|Users)/", texts) == []


def test_install_line_and_badge_follow_the_address(monkeypatch):
    without = str(notebooks.notebook_of(EXAMPLES[0]).cells[:2])
    assert "colab" not in without
    assert "git+" not in without
    monkeypatch.setattr(notebooks, "address", lambda: "https://github.com/someone/something")
    title, install = notebooks.notebook_of(EXAMPLES[0]).cells[:2]
    assert install.source == '# %pip install --quiet "tl-posgen @ git+https://github.com/someone/something"'
    assert "colab.research.google.com/github/someone/something/blob/main/examples/01_first_look.ipynb" in title.source


def test_no_notebook_is_left_over():
    found = {path.stem for path in EXAMPLES[0].parent.glob("*.ipynb")}
    assert found == {path.stem for path in EXAMPLES}


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
def test_an_example_runs_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(notebooks.ROOT))  # this checkout
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.read(next(path for path in EXAMPLES if path.stem == IN_A_KERNEL))
    for cell in notebook.cells:
        cell.source = short(cell.source)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("name" in output and output["name"] == "stdout" for output in outputs)
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "report" / "index.html").exists()
