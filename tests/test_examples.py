"""Every example runs as it is published, and shows what its committed notebook shows; those of SmolLM2 run on the mini
model where its file is not here.

The cells run whole, in this process; one example runs in a kernel, as users run it.
"""

import ast
import contextlib
import io
import re
import sys
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest

jupytext = pytest.importorskip("jupytext")
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "source"))
import notebooks  # noqa: E402  # pyright: ignore[reportMissingImports]

EXAMPLES = notebooks.SOURCES
IN_A_KERNEL = "08_coupling"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d*\.?\d+(?:e[+-]?\d+)?(%?)")  # the digits of L3H1 and step08000 are text


def written(source: Path):
    return jupytext.read(source.with_suffix(".ipynb"))


def code_of(notebook) -> list:
    """The cells that run; the package under test is installed already."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and "%pip" not in cell.source]


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_is_generated_from_the_source(source):
    both = [[(c.cell_type, c.source) for c in one.cells] for one in (written(source), notebooks.notebook_of(source))]
    assert both[0] == both[1], "run make notebooks"


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda path: path.stem)
def test_the_notebook_carries_what_its_cells_show(source):
    code = code_of(written(source))
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


def differences(found: str, committed: str) -> list[str]:
    """Where two texts differ: in a word, in a count, or in another number by more than one in the last digit shown.
    Numbers printed as below 1e-4 are rounding errors, which machines have each their own of."""
    found, committed = (re.sub(r"\d\.\d+e-(0[5-9]|[1-9]\d)", "0.0", text) for text in (found, committed))
    words = [NUMBER.sub(r"#\1", text).split() for text in (found, committed)]
    if words[0] != words[1]:
        return [f"{found}\nis not\n{committed}"]
    pairs = [(one.group(), other.group()) for one, other in zip(*map(NUMBER.finditer, (found, committed)), strict=True)]
    return [f"{one} is not {other} in {committed}" for one, other in pairs if not agree(one, other)]


def agree(one: str, other: str) -> bool:
    """Whether two numbers as printed differ by at most one in the last digit; counts are equal."""
    values = [Decimal(number.rstrip("%")) for number in (one, other)]
    exponent = max(int(value.as_tuple().exponent) for value in values)
    step = Decimal(1).scaleb(exponent) if exponent < 0 or one.endswith("%") else 0
    return abs(values[0] - values[1]) <= step


@pytest.mark.parametrize(
    ("found", "same"),
    [
        ("r = 0.771 in L3H1, 45%, 9 heads,  -0.00", True),
        ("r = 0.772 in L3H1, 45%, 9 heads, 0.00", False),
        ("r = 0.770 in L3H2, 45%, 9 heads, 0.00", False),
        ("r = 0.770 in L3H1, 48%, 9 heads, 0.00", False),
        ("r = 0.770 in L3H1, 45%, 8 heads, 0.00", False),
        ("r = 0.770 in L3H1, 45%, 9 heads", False),
    ],
)
def test_texts_agree_but_for_the_last_digit(found, same):
    assert (not differences(found, "r = 0.770 in L3H1, 46%, 9 heads, 0.00")) == same


def shown(outputs) -> tuple[str, str | None]:
    """What a cell of a notebook printed, and the text of the value that it shows last: None where that is a picture."""
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    values = [output.data for output in outputs if "data" in output]
    if not values:
        return printed, ""
    return printed, None if notebooks.is_picture(values[-1]) else values[-1]["text/plain"]


def text_of(value: object) -> str | None:
    """The text of the last value of a cell, as a kernel shows it; None for a picture."""
    if value is None:
        return ""
    if hasattr(value, "_repr_html_") and not isinstance(value, pd.DataFrame):
        assert value._repr_html_(), "nothing was drawn"  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return repr(value)


def last_value(code: str, names: dict) -> object:
    """Run a cell; the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def compare(found: list[tuple[str, str | None]], source: Path) -> None:
    """Fail where what the cells of an example showed is not what its committed notebook shows."""
    wrong = []
    for one, cell in zip(found, code_of(written(source)), strict=True):
        for ours, theirs in zip(one, shown(cell.outputs), strict=True):
            wrong += differences(str(ours), str(theirs))
    assert wrong == [], "run make notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("source", [path for path in EXAMPLES if path.stem != IN_A_KERNEL], ids=lambda path: path.stem)
def test_the_example_shows_what_its_notebook_shows(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOLLM2", notebooks.KERNEL["SMOLLM2"])
    names, found = {"__name__": "__main__"}, []
    with pd.option_context("display.max_columns", 20):  # as in a kernel
        for cell in code_of(notebooks.notebook_of(source)):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                value = last_value(cell.source, names)
            found.append((printed.getvalue(), text_of(value)))
    if not notebooks.is_of_another_model(source):
        compare(found, source)
    assert (tmp_path / f"report-{source.stem[:2]}" / "index.html").exists()  # of its own: it replaces no other's


@pytest.mark.slow
def test_an_example_in_a_kernel_shows_what_its_notebook_shows(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    source = next(path for path in EXAMPLES if path.stem == IN_A_KERNEL)
    notebook = notebooks.executed(notebooks.notebook_of(source), tmp_path)
    compare([shown(cell.outputs) for cell in code_of(notebook)], source)
    assert (tmp_path / f"report-{source.stem[:2]}" / "index.html").exists()  # of its own: it replaces no other's
