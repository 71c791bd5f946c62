"""Photographs of figures and pages, in a real browser: a blank one is refused."""

import struct
import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest

pytest.importorskip("playwright")
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "source"))
from pictures import photograph  # pyright: ignore[reportMissingImports]

LATE = """<div id="place"></div><script>setTimeout(() => {
    place.innerHTML = '<div style="height: 700px; background: linear-gradient(red, blue)"></div>'
}, 1200)</script>"""


def size_of(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


@pytest.mark.longer
def test_a_page_that_draws_itself_late_is_photographed_at_its_own_height(browser):
    width, height = size_of(photograph(browser, LATE, 600))
    assert width <= 600
    assert height == pytest.approx(700, abs=20)


@pytest.mark.longer
def test_a_page_lower_than_the_window_leaves_no_white_below(browser):
    low = "<div style='height: 60px; background: linear-gradient(red, blue)'></div>"
    assert size_of(photograph(browser, low))[1] == 60 + 2 * 10  # its padding


@pytest.mark.longer
def test_a_blank_page_is_refused(browser, monkeypatch):
    monkeypatch.setattr("pictures.SECONDS", 1)
    with pytest.raises(ValueError, match="one colour"):
        photograph(browser, "<div style='height: 300px'>.</div>")


@pytest.mark.longer
def test_a_figure_is_photographed_and_an_empty_one_refused(browser):
    figure = go.Figure().add_heatmap(z=[[0, 1], [2, 3]])
    assert size_of(photograph(browser, figure, 500)) == (500, 450)
    empty = go.Figure().update_xaxes(visible=False).update_yaxes(visible=False)
    with pytest.raises(ValueError, match="one colour"):
        photograph(browser, empty.update_layout(template="simple_white"), 500)
