"""Every claim is judged from real results of a tiny model, with its numbers and its null's, and goes on from parts."""

import re
from typing import get_args

import pytest
import xarray as xr

import tl_posgen
from tl_posgen.claims import PAPERS, claims_result, judge, judge_claims
from tl_posgen.claims.judging import Verdict
from tl_posgen.claims.running import CUT as OF_A_RUN
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.registry import measure_from
from tl_posgen.errors import InputError
from tl_posgen.report.page import render_page
from tl_posgen.slash.slash_toy import slash_toy

CLAIMS = [claim for claims in PAPERS.values() for claim in claims]
ELSEWHERE = {"emergence", "coupling_scores", "slash_toy"}  # not of one model and one text
CUT = {"length": 32, "n_prompts": 2, "progress": False}
SLASH = {"papers": ["slash"], "length": 24, "n_prompts": 1, "progress": False}
QUICK = {
    "dummy_distance": {"distances": (0, 64), "limits": (8,)},
    "perturbation": {
        "n_draws": 1,
        "n_cloze": 4,
        "ratios": (0.05, 0.2),
        "conditions": ("words", "positions", "position_part"),
        "reaches": ("uniform",),
    },
    "length_extrapolation": {"inside": 16, "times": 2},
    "band_ablation": {"schemes": ("thirds",)},
    "plane_cost": {"edits": ("freeze",), "groups": ("quarters",)},
    "recall": {"half": 8, "n_copies": 2, "hits": 0.01},
}


@pytest.fixture(scope="session")
def results(small_model, alice):
    names = {name for claim in CLAIMS for name in claim.needs} - {*ELSEWHERE, "length_extrapolation"}
    measures = [measure_from(name, QUICK.get(name, {})) for name in sorted(names)]
    beyond = measure_from("length_extrapolation", QUICK["length_extrapolation"])
    return {
        **tl_posgen.analyze(small_model, alice, measures=measures, **CUT),
        **tl_posgen.analyze(small_model, alice, measures=beyond, n_prompts=2, progress=False),
        "slash_toy": slash_toy(steps=4, batch=4, seeds=(0,), progress=False),
    }


@pytest.fixture(scope="session")
def table(results):
    return claims_result(CLAIMS, results, "small", {}).frame().set_index("claim")


@pytest.mark.slow
def test_every_claim_has_a_row_with_numbers_a_null_and_a_criterion_or_says_why_not(table, results):
    assert table.index.tolist() == [claim.name for claim in CLAIMS]
    assert set(table["verdict"]) <= set(get_args(Verdict))
    assert table["criterion"].str.len().min() > 5
    lacking = [claim.name for claim in CLAIMS if set(claim.needs) & {"emergence", "coupling_scores"}]
    assert lacking == ["position 7b", "coupling 4", "coupling 4b", "coupling 4c", "coupling 6"]
    assert (table.loc[lacking, "verdict"] == "open").all()
    assert table.loc["coupling 4", "measured"].startswith("not measured: its checkpoints of training were not given")
    assert "`tl-posgen coupling-scores`" in table.loc["coupling 6", "measured"]
    measured = table[~table["measured"].str.startswith("not measured: ")]
    for column in ("measured", "null"):
        without = ["position 2b"] if column == "null" else []  # a random init has no sinks
        assert measured[column].drop(without).str.contains(r"\d").all()
    assert (table["measured"] != table["null"]).all()
    r = float(results["variance"].trained["additive_r"].sel(tokens="without first").mean())
    assert f"additive r {r:.3f}" in table.loc["position 1", "measured"]
    assert table.loc["position 1", "null"].startswith("random init: additive r ")
    assert "; shuffled: additive r " in table.loc["position 1", "null"]
    assert table.loc["position 1", "verdict"] == "open"  # two prompts have no interval


@pytest.mark.slow
def test_a_claim_without_its_results_is_open(results):
    found = claims_result(CLAIMS, {"cone": results["cone"]}, "small", {}).frame().set_index("claim")
    known = ~found["measured"].str.startswith("not measured: ")
    assert found.index[known].tolist() == ["slash 2", "slash 3a", "slash 3b", "slash 3c"]
    assert found.loc["slash 1", "measured"] == "not measured: slash_transfer cannot be had of this model"


@pytest.mark.slow
def test_the_table_is_saved_read_and_on_the_page(results, tmp_path):
    result = claims_result(CLAIMS, results, "small", {})
    read = tl_posgen.load(result.save(tmp_path / "claims.nc"))["claims"]
    assert read.frame().equals(result.frame())
    cells = re.findall(
        '<td data-verdict="([a-z ]+)">', render_page(tl_posgen.Report({"claims": read}, read.provenance))
    )
    verdicts = result.frame()["verdict"].tolist()
    assert cells == 2 * verdicts, "the table of the measure, and that of all columns"


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_number_of_a_judgement_is_one_of_a_result(claim, results, monkeypatch):
    """Words hold numbers that `Numbers` made, labels and options; nothing is computed beside them."""
    if not set(claim.needs) <= set(results) - ELSEWHERE:
        return
    known = [value for name in claim.needs for value in labels_of(results[name])]
    numbers, correlation = Numbers._numbers, Numbers.correlation  # of `number`, and of `along` at each label

    def keep(*found):
        known.extend(value for one in found for value in (one.value, one.low, one.high, one.spread or 0, *one.nulls))

    def recorded(*args):
        found = numbers(*args)
        keep(*found)
        return found

    def recorded_correlation(*args, **how):
        found = correlation(*args, **how)
        keep(found)
        return found

    monkeypatch.setattr(Numbers, "_numbers", recorded)
    monkeypatch.setattr(Numbers, "correlation", recorded_correlation)
    words = " ".join(judge(claim, results)[1:3])
    for word in re.findall(r"(?<![\w.])[+-]?\d+(?:\.\d+)?%?(?![\w])", words):
        value = float(word.rstrip("%")) / (100 if word.endswith("%") else 1)
        digits = len(word.rstrip("%").partition(".")[2]) + (2 if word.endswith("%") else 0)
        assert any(abs(one - value) <= 0.5001 * 10**-digits for one in known), word


def labels_of(result):
    """Labels that are numbers, sizes, options, and what the words quote of a paper or of the cloze."""
    labels = [
        value
        for dim in result.trained.coords
        if result.trained[dim].dtype.kind in "fi"
        for value in result.trained[dim].values.ravel()
    ]
    options = [value for value in result.measure.options().values() if isinstance(value, int | float)]
    named = re.findall(r"_(\d+)", " ".join(map(str, result.trained.get("condition", xr.DataArray([])).values.ravel())))
    sizes = result.trained.sizes
    return [
        float(one)
        for one in (*labels, *options, *named, *sizes.values(), sizes.get("state", 1) - 1, 0.959, 0.25, 0.05, 50, 100)
    ]


def test_claims_have_names_of_their_own_and_ask_for_options_that_their_measures_have():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert set(claim.options) <= set(claim.needs)
        for name, options in claim.options.items():
            if name in ELSEWHERE:
                continue  # takes measures, not options
            measure_from(name, {key: one for key, one in options.items() if key not in OF_A_RUN})
            assert all(isinstance(options[key], int | None) for key in OF_A_RUN if key in options)


@pytest.mark.slow
def test_a_run_goes_on_from_its_parts(small_model, alice, tmp_path, monkeypatch):
    monkeypatch.setattr("tl_posgen.claims.running.TOY_STEPS", 2)
    run = {**SLASH, "keep": tmp_path}
    first = judge_claims(small_model, alice, **run)
    monkeypatch.setattr(
        "tl_posgen.core.store.write_files", lambda *_: pytest.fail("a finished part was measured again")
    )
    second = judge_claims(small_model, alice, **run)
    assert second["claims"].frame().equals(first["claims"].frame())
    assert len(first["claims"].frame()) == len(PAPERS["slash"])


def test_a_claim_that_needs_several_random_inits_has_them_and_no_other_measure_does(small_model, alice, tmp_path):
    asked = ["frequency 6", "frequency 12"]
    found = judge_claims(small_model, alice, papers=asked, length=32, n_prompts=1, keep=tmp_path, progress=False)
    assert found["claims"].frame()["claim"].tolist() == asked
    inits = {name: found[name].numbers.by_null["random init"].labels for name in ("plane_use", "plane_roles", "recall")}
    assert inits == {"plane_use": list("01234"), "plane_roles": list("01234"), "recall": ["0"]}
    without = judge_claims(
        small_model, alice, papers=asked[:1], length=32, n_prompts=1, nulls=0, keep=None, progress=False
    )
    assert not without["plane_use"].nulls


@pytest.mark.slow
def test_without_a_null_the_claims_say_so(small_model, alice, tmp_path, monkeypatch):
    monkeypatch.setattr("tl_posgen.claims.running.TOY_STEPS", 2)
    found = judge_claims(small_model, alice, nulls=0, keep=tmp_path, **SLASH)
    rows = found["claims"].frame()[:4]
    assert rows["null"].tolist() == ["not judged", "", "", ""]  # slash 1, of fewer than ten dominant heads
    assert found["claims"].findings() == ["Without null models, the claims that are judged against them are open."]
    assert set(rows["verdict"]) == {"open"}
    assert all(not result.nulls for result in found.values())


@pytest.mark.parametrize(("wrong", "words"), [({"papers": ["tea"]}, "tea"), ({"papers": "slash"}, "give a list")])
def test_papers_that_nobody_wrote_are_refused(small_model, alice, tmp_path, wrong, words):
    with pytest.raises(InputError, match=words):
        judge_claims(small_model, alice, keep=tmp_path, **wrong)
