"""What a notebook's cell shows of a result, a report, and the whole page."""

from dataclasses import replace

import pytest
from IPython.utils.capture import capture_output
from rich.console import Console

import tl_posgen
from tl_posgen.report.page import CELL_ROWS
from tl_posgen.report.tables import NO_NUMBER, as_text, compact
from tl_posgen.report.terminal import print_own

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def report(alice):
    measures = ["three_axis", "attention_examples", "loss"]
    return tl_posgen.analyze("mini", alice, measures=measures, length=24, n_prompts=2, progress=False)


def test_a_result_shows_its_findings_table_and_first_figure_and_a_report_all_findings_and_one_table_a_head(report):
    shown = report["three_axis"]._repr_html_()
    assert "Are the scores position + query + key?" in shown
    assert "random init" in shown
    assert shown.count("<tr") == 1 + CELL_ROWS
    assert "Three-axis fit" in shown
    assert len(shown) < 2_500_000  # with plotly's script, compressed
    shown = report._repr_html_()
    assert all(sentence.split("(")[0][:40] in shown for sentence in report.findings())
    assert "<th>three axis r</th>" in shown


def test_a_cell_draws_its_figures_without_a_network_and_two_cells_unpack_one_script(browser, report):
    cell = report["three_axis"]._repr_html_()
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_content(f"<!doctype html><body>{cell}{report['loss']._repr_html_()}</body>")
    page.locator("svg.main-svg").nth(2).wait_for()
    assert page.locator(".js-plotly-plot").count() == 2
    assert page.locator("head script").count() == 1
    assert page.locator("[data-title*=Share]").count() == 0  # an upload
    context.close()


def test_a_notebook_shows_words_and_a_figure_that_plotly_draws_and_a_terminal_plain_text(report, monkeypatch, request):
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    request.addfinalizer(InteractiveShell.clear_instance)
    for active, n_outputs in ((None, 2), (["text/plain"], 1)):
        shell.display_formatter = DisplayFormatter(parent=shell, **({"active_types": active} if active else {}))
        for one in (report, report["three_axis"], report.head("L3H1")):
            with capture_output() as shown, monkeypatch.context() as patch:
                patch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
                assert shell.display_formatter.format(one) == ({}, {})
            words, *figures = (output.data for output in shown.outputs)
            assert words["text/plain"] == repr(one)
            assert "<table" in words["text/html"]
            assert "<script" not in words["text/html"]
            assert len(words["text/html"]) < 100_000
            assert len(shown.outputs) == n_outputs
            assert all("application/vnd.plotly.v1+json" in figure for figure in figures)


def test_terminal_page_and_notebook_show_the_same_titles_and_the_same_cells(report, monkeypatch, capsys):
    result = report["three_axis"]
    undefined = result.dataset.assign(r=result.dataset["r"].where(result.dataset["head"] != 1))
    result = replace(result, dataset=undefined)
    table = as_text(compact(result))
    assert NO_NUMBER in table.iloc[:, 2].tolist()
    monkeypatch.setenv("COLUMNS", "200")
    print_own(Console(markup=False), result=result)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    page = tl_posgen.Report({"three_axis": result}, report.provenance).html()
    for shown in (result._repr_html_(), page):
        assert all(f"<th>{name}</th>" in shown for name in table)
        assert "NaN</td>" not in shown
    for row in table.to_numpy().tolist():
        assert " ".join(row).split() in lines
        assert f"<td>{row[2]}</td>" in page


def test_the_whole_page_is_framed_and_cannot_break_out(report):
    page = report.show(height=700)
    shown = page._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert shown.count("<") == 2  # the frame's own tags: the page's are escaped
    assert "height:700px" in shown
    assert "</html>" in page.source
    assert repr(page).endswith("shows it")


def test_tokens_and_names_are_escaped(report):
    names = ("init", ["<script>alert(1)</script>", "random init", "shuffled"])
    hostile = report["three_axis"].dataset.assign_coords(init_label=names)
    shown = replace(report["three_axis"], dataset=hostile)._repr_html_().split("<table")[0]
    assert "&lt;script&gt;alert" in shown
    assert "<script>alert" not in shown
