"""The measures on models that know positions otherwise than by RoPE, and what is said of them there."""

from dataclasses import replace

import numpy as np
import pytest
from captures import collected
from drawn import token_ids
from rotated_heads import captures_of

from tl_posgen.core.engine import analyze
from tl_posgen.core.formatting import ENCODINGS as WHERE
from tl_posgen.core.report import Report
from tl_posgen.position.decomposition import MeanKey, Residual, ThreeAxis

pytestmark = pytest.mark.longer

MEASURES = ["three_axis", "variance", "mean_key", "residual", "attention_examples"]
ENCODINGS = {"gpt2": "absolute", "bloom": "alibi"}
CAVEATS = {"gpt2": set(MEASURES), "bloom": set(MEASURES[:-1])}
LOST = {"gpt2": {"variance", "mean_key"}, "bloom": {"mean_key"}}  # what they would conclude holds by construction
OPTIONS = {"nulls": 0, "progress": False}


@pytest.fixture(scope="module")
def reports(family_model):
    """All measures on two random prompts of 24 tokens."""
    return {
        name: analyze(family_model(name), token_ids(2, 24, seed=1), measures=MEASURES, **OPTIONS) for name in ENCODINGS
    }


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_has_numbers_that_its_encoding_allows(reports, name):
    report = reports[name]
    assert report.provenance["encoding"] == ENCODINGS[name]
    for result in report.values():
        scalars = result.frame(every=True).select_dtypes("number")
        assert len(scalars.columns)
        assert np.isfinite(scalars.to_numpy()).all(), result.name
    np.testing.assert_allclose(report["mean_key"].trained["r"], 1, atol=1e-6)
    share = report["variance"].trained["share"]
    np.testing.assert_allclose(share.sel(part=["qd", "kd", "qkd"]), 0, atol=1e-9)
    assert (share.sel(part="d") > 0).all() if name == "bloom" else np.allclose(share.sel(part="d"), 0, atol=1e-9)


def test_the_slope_of_alibi_is_not_in_the_residual_nor_in_the_mean_key_split_but_in_r(family_model):
    (one,) = captures_of(family_model("bloom"), token_ids(2, 40, seed=1, high=64)[:1], layers=[1])
    captures = one, replace(one, geometry=replace(one.geometry, alibi_slopes=None))

    def both_slopes(measure):
        return [collected(measure, capture).sel(tokens="all") for capture in captures]

    with_slope, without = both_slopes(Residual())
    for name in ("std", "top_share"):
        np.testing.assert_allclose(with_slope[name], without[name], atol=1e-4)
    assert (with_slope["share"] < without["share"]).all()
    np.testing.assert_array_equal(*(data["r"] for data in both_slopes(MeanKey())))
    with_slope, without = (data["r_within_rows"] for data in both_slopes(ThreeAxis()))
    assert (with_slope > without).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_that_changes_its_meaning_says_so_and_concludes_nothing_that_holds_by_construction(reports, name):
    said = {result.name for result in reports[name].values() if result.caveat}
    assert said == CAVEATS[name]
    assert all(reports[name][measure].findings()[-1] == reports[name][measure].caveat for measure in said)
    assert all(WHERE[ENCODINGS[name]] in reports[name][measure].caveat for measure in said)
    concluding = {result.name for result in reports[name].values() if len(result.findings()) > bool(result.caveat)}
    assert concluding == set(MEASURES) - LOST[name] - {"attention_examples"}


def test_a_report_says_where_restrictions_come_from_once(reports):
    report = reports["gpt2"]
    [note, without_null] = report.notes()
    assert without_null == "No null model was measured."
    assert note.startswith(f"{WHERE['absolute']}, which restricts what ")
    assert all(name in note for name in CAVEATS["gpt2"])
    alone = Report({"mean_key": report["mean_key"]}, report.provenance)
    assert alone.notes() == [report["mean_key"].caveat, without_null]
