"""Every example runs from top to bottom on the mini model, and its notebook is the one generated from its source."""

from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
jupytext = pytest.importorskip("jupytext")


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_is_generated_from_the_source(source):
    written = jupytext.read(source.with_suffix(".ipynb"))
    generated = jupytext.read(source)
    assert [(c.cell_type, c.source) for c in written.cells] == [(c.cell_type, c.source) for c in generated.cells]


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(source, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.read(source)
    for cell in notebook.cells:
        if "%pip" in cell.source:
            cell.source = ""  # the package under test is installed already
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("text/html" in output.get("data", {}) for output in shown)
    assert (tmp_path / "report" / "index.html").exists()
