"""What a page is called, and what it says of maps."""

import json
from dataclasses import dataclass, replace
from html import escape, unescape

import pytest
import xarray as xr
from made_up import grown

import tl_posgen
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.registry import find
from tl_posgen.core.result import Result
from tl_posgen.report.page import QUESTION, figure_on_page, fill_page, question_of

SECTION = {"id": "one", "title": "one?", "findings": [], "views": [], "table": "", "rows": 0}


@pytest.mark.parametrize(
    ("names", "is_first"),
    [
        (["variance"], True),
        (["slash", "slash_planes", "cone", "band_ablation", "slash_ablation"], True),
        (["profiles", "slash", "variance"], True),
        (["plane_perturbation", "planes"], True),
        (["three_axis", "variance", "mean_key"], False),
        (["slash", "variance"], False),
    ],
)
def test_a_page_of_one_subject_has_its_question(names, is_first):
    kinds = [find(name) for name in names]
    assert question_of(*(kind() for kind in kinds)) == (kinds[0].question if is_first else QUESTION)


@pytest.mark.longer
def test_names_that_users_give_are_no_markup(alice):
    name = "<b>x</b> &lt; a_b*c*"
    options = {"measures": ["three_axis", "mean_key", "loss"], "length": 24, "n_prompts": 2, "nulls": 1}
    report = tl_posgen.analyze("mini", alice, progress=False, **options)
    compared = tl_posgen.compare(report, report, names=(name, "plain"))["comparison"]
    named = [
        replace(
            one,
            dataset=one.dataset.assign_coords(init_label=("init", [name, f"{name}, random init", f"{name}, shuffled"])),
        )
        for one in report.values()
    ]
    for result in (compared, *named):
        for kind in result.kinds:
            figure = result.plot(kind)
            drawn = json.dumps(figure.to_dict(), default=str)
            assert escape(name, quote=False) in drawn
            assert name not in drawn
    assert name in figure_on_page(compared.plot())["title"]  # as text of the page, which escapes it again


@pytest.mark.parametrize(
    "heads", [None, {"names": ["L0H0"], "first": "L0H0", "nulls": [], "numbers": [], "curves": [], "patterns": []}]
)
def test_a_click_on_a_head_is_spoken_of_where_there_are_heads(heads):
    words = {"title": "", "beside": "", "findings": []}
    page = fill_page([SECTION | {"figures": []}], (), {}, words, heads)
    assert ("A click on a head, in a sentence" in page) == (heads is not None)


@pytest.mark.longer
def test_a_page_says_every_sentence_once_and_carries_each_script_once(alice):
    measures = ["variance", "three_axis", "mean_key", "attention_examples"]
    report = tl_posgen.analyze("mini", alice, measures=measures, length=24, n_prompts=2, progress=False)
    page = report.html()
    shown = unescape(page)
    assert [shown.count(f"<li>{sentence}</li>") for sentence in report.findings()] == [1] * len(report.findings())
    assert page.count('<div class="view"') > 1
    assert page.count("var CircuitsVis=") == page.count("plotly.js v") == 1


@pytest.mark.longer
def test_a_table_of_many_heads_is_whole_and_numbers_of_two_measures_stand_once(alice):
    report = tl_posgen.analyze("mini", alice, measures=["variance"], length=16, n_prompts=1, nulls=0, progress=False)
    result = report["variance"]
    many = replace(result, dataset=grown(result, 20, 15).dataset)
    table = tl_posgen.Report({"variance": many}, {}).html().split('<div class="scroll">')[1].split("</div>")[0]
    assert table.count("<tr>") == 300

    @dataclass(frozen=True)
    class Again(Measure):
        """1. The same number again. Source: ours"""

        variables = {"share": Variable("position", headline="again"), "other": Variable("other", headline="other")}

    share = result.trained["position"].sel(tokens="without first", drop=True).expand_dims(init=["trained"])
    data = xr.Dataset({"share": share, "other": share + 1})
    both = tl_posgen.Report({"variance": result, "again": Result(Again(), data)}, {}).frame()
    assert "position_share" in both
    assert "other" in both
    assert "again" not in both


@pytest.mark.longer
def test_no_column_is_lost_that_agrees_by_chance(alice):
    cut = {"length": 40, "n_prompts": 2, "nulls": 0, "progress": False}
    for heads in (["L0H0", "L1H1", "L2H2"], ["L0H1", "L1H0"]):  # there slash_distance is 0, 1
        report = tl_posgen.analyze("mini", alice, measures=["slash"], heads=heads, **cut)
        frame = report.frame()
        assert {"slash_score", "slash_distance"} <= {*frame.columns}
        found = [f"L{row.layer}H{row.head}" for row in frame[["layer", "head"]].itertuples()]
        assert found == heads
