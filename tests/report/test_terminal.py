"""Tables in the terminal: whole at every width."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from rich.console import Console

import tl_posgen
from tl_posgen.claims import Claims
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.result import Result
from tl_posgen.models.selection import head_name
from tl_posgen.report.tables import cell
from tl_posgen.report.terminal import (
    MOST_LINES,
    print_claims,
    print_frame,
    print_heads,
    print_measures,
    print_report,
)

WIDTHS = (60, 80, 120)
FRAMES = {
    "one label": pd.DataFrame(
        {"wavelength": ["up to 16", "above 8192"]}
        | {f"number {n} of {'very ' * (n % 4)}long name": [-1000.125 - n, 0.5 + n] for n in range(12)}
    ),
    "labels that leave little room": pd.DataFrame(
        {
            "measure": ["lift", "edge"],
            "bands_by": ["wavelength", "thirds"],
            "tokens": ["first token left out", "all tokens"],
            "heads": ["12 slash-dominant", "4 other"],
            **{name: [23.951 + n, 0.25 + n] for n, name in enumerate(("high", "medium", "low", "entropy"))},
        }
    ),
    "a label longer than the terminal": pd.DataFrame({"model": ["a/" * 70, "b"], "loss": [1.125, 2.25], "n": [3, 4]}),
    "words alone": pd.DataFrame({"function": ["step", "slash"], "error": ["1.2e-15", "3.4e-12"]}),
    "heads": pd.DataFrame({"layer": [0, 10], "head": [11, 2], **{f"m{n}": [n + 0.123, 0.456] for n in range(12)}}),
}


def printed(capsys, monkeypatch, width, show, *arguments):
    monkeypatch.setenv("COLUMNS", str(width))
    show(*arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FRAMES)
def test_every_cell_of_a_frame_is_printed_whole_at_every_width(capsys, monkeypatch, width, name):
    frame = FRAMES[name]
    text = printed(capsys, monkeypatch, width, lambda: print_frame(Console(markup=False), frame, "table"))
    words = text.split()
    for column in frame.columns:
        assert not set(str(column).replace("_", " ").split()) - set(words), column
        for value in frame[column]:
            assert not set(cell(value).split()) - set(words), (column, value)
    assert "…" not in text
    if "longer" not in name:
        assert max(map(len, text.splitlines())) <= width


@pytest.fixture(scope="module")
def report(mini, alice):
    measures = ["three_axis", "variance", "mean_key", "planes", "slash"]
    return tl_posgen.analyze(mini, alice, measures=measures, length=24, n_prompts=2, progress=False)


@pytest.mark.longer
@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_the_table_of_heads_is_printed_whole(capsys, monkeypatch, width, report):
    one = tl_posgen.Report({name: report[name] for name in ("three_axis", "variance", "mean_key")}, report.provenance)
    text = printed(capsys, monkeypatch, width, partial(print_report, full=True), one)
    tables = text[text.index(f"{len(one.frame())} heads") :]
    frame = one.frame()
    numbers = [cell(value) for name in frame.columns[2:] for value in frame[name]]
    assert not set(numbers) - set(tables.split())
    assert max(map(len, tables.splitlines())) <= width
    parts = [len(re.findall(rf"^ +{word} ", tables, re.MULTILINE)) for word in ("head", "mean", "random", "shuffled")]
    assert parts == [1 if width > 60 else 2] * 4  # all columns beside each other take 65


@pytest.mark.longer
@pytest.mark.parametrize("most", [4, 10, 16])
def test_where_not_all_heads_fit_those_of_most_position_and_of_most_interaction_are_shown(
    capsys, monkeypatch, report, most
):
    one = tl_posgen.Report({"variance": report["variance"]}, report.provenance)
    text = printed(capsys, monkeypatch, 120, lambda: print_heads(Console(markup=False), most, report=one))
    heads, frame = re.findall(r"^ +(L\dH\d) ", text, re.MULTILINE), one.frame()
    n = min(5, most // 2)
    ends = [frame.nlargest(n, f"{part}_share") for part in ("position", "interaction")]
    names = [head_name(*place) for end in ends for place in zip(end["layer"], end["head"], strict=True)]
    assert heads == [*dict.fromkeys(names)]  # a head of both once
    assert f"the {n} of most position, the {n} of most interaction" in " ".join(text.split())
    assert cell(float(frame["first_token_attention"].mean())) in text


@pytest.mark.longer
@pytest.mark.parametrize("full", [False, True])
def test_the_table_is_shown_where_a_measures_sentences_fail(capsys, report, full):
    class Broken(type(report["mean_key"].measure)):
        def findings(self, numbers):
            raise KeyError("no such number")

    one = {"broken": replace(report["mean_key"], measure=Broken(d0=23))}
    for show in (print_report, print_measures):
        with pytest.raises(KeyError, match="no such number"):
            show(tl_posgen.Report(one, report.provenance), full=full)
        number = float(report["mean_key"].headline_frame().iloc[0, -1])
        assert {cell(number)} & set(capsys.readouterr().out.split())


@pytest.mark.longer
def test_by_default_a_report_takes_few_lines_and_says_what_is_left_out(capsys, monkeypatch, report):
    for width in WIDTHS:
        text = printed(capsys, monkeypatch, width, print_measures, report)
        assert len(text.splitlines()) <= MOST_LINES
        assert max(map(len, text.splitlines())) <= width
        assert re.search(r"Not shown: .*\d+ tables; --full shows all\.$", text.strip())
    whole = printed(capsys, monkeypatch, 120, partial(print_measures, full=True), report)
    assert len(whole.splitlines()) > 100
    assert not [sentence for sentence in report.findings() if sentence.split()[-1] not in whole]


@pytest.mark.longer
def test_many_heads_by_default_are_those_of_the_highest_headline(capsys, monkeypatch, report):
    data = report["three_axis"].dataset
    many = xr.concat([data.assign_coords(layer=data["layer"] + 4 * n) for n in range(24)], "layer", data_vars="minimal")
    shape = many.sizes["layer"], many.sizes["head"]
    n = shape[0] * shape[1]
    ranks = np.random.default_rng(0).permutation(n).reshape(shape)
    many["r"] = many["r"] * 0 + xr.DataArray(ranks / n, dims=("layer", "head"))
    one = tl_posgen.Report({"three_axis": replace(report["three_axis"], dataset=many)}, report.provenance)
    text = printed(capsys, monkeypatch, 120, print_report, one)
    assert len(text.splitlines()) <= MOST_LINES
    assert f"{n} heads, the" in text
    rows = [line.split()[1] for line in text.splitlines() if re.match(r" +L\d+H\d+ ", line)]
    assert rows == [cell((n - 1 - place) / n) for place in range(len(rows))]  # the highest first


@pytest.mark.parametrize("width", WIDTHS)
def test_claims_take_a_line_each_by_default(capsys, monkeypatch, width):
    words = {
        "says": "a claim in more words than a line has room for " * 4,
        "criterion": "c",
        "measured": "m",
        "null": "n",
    }
    columns = {name: ("claim", [text] * 26) for name, text in words.items()}
    verdicts = {"verdict": ("claim", ["not held", "held"] * 13)}
    data = xr.Dataset(columns | verdicts, {"claim": [f"position {n}" for n in range(26)], "init": ["trained"]})
    report = tl_posgen.Report({"claims": Result(Claims(), data)}, {"model": "m"})
    text = printed(capsys, monkeypatch, width, print_claims, report)
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= width
    assert text.count("not held") == 13
    assert "--full" in text
    assert len(printed(capsys, monkeypatch, width, partial(print_claims, full=True), report).splitlines()) > MOST_LINES


@pytest.mark.longer
def test_two_columns_of_one_short_heading_are_both_shown(capsys, monkeypatch, report):
    class Own(Measure):
        variables = {"share": Variable("share", headline="own_share", short="r")}

    data = report["three_axis"].dataset[["r"]].sel(tokens="all").rename(r="share") * 0 + 0.777
    one = {"three_axis": report["three_axis"], "own": Result(Own(), data)}
    text = printed(capsys, monkeypatch, 120, print_report, tl_posgen.Report(one, report.provenance))
    assert "0.777" in text
    heading = next(line.split() for line in text.splitlines() if line.split()[:1] == ["head"])
    assert heading == ["head", "three", "curves", "in", "rows", "r"]
