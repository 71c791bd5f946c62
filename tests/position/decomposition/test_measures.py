"""What all six measures keep: declared variables, one summary, drawn again from disk, told with a null and without."""

import dataclasses
import json
import re

import pytest
import xarray as xr
from declared import assert_declared

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition import AcrossPrompts, AttentionExamples, MeanKey, Residual, ThreeAxis, Variance
from tl_posgen.report.sentences import with_interval
from tl_posgen.summary import jsonable

MEASURES = ["three_axis", "variance", "mean_key", "residual", "across_prompts", "attention_examples"]
WITH_NULL = MEASURES[:-1]


@pytest.mark.parametrize("name", MEASURES)
def test_every_variable_is_declared_with_its_dims(report, name):
    assert_declared(report[name])


@pytest.mark.parametrize("name", MEASURES)
def test_every_declared_variable_is_found(report, name):
    assert set(report[name].measure.variables) <= set(report[name].dataset.data_vars)


@pytest.mark.parametrize("name", MEASURES)
def test_the_summary_is_flat_and_json(report, name):
    summary = report[name].summary
    assert json.loads(json.dumps(jsonable(summary), allow_nan=False)) == summary


@pytest.mark.parametrize("name", MEASURES)
def test_a_result_comes_back_from_disk_as_it_was(report, loaded, name):
    xr.testing.assert_identical(loaded[name].dataset, report[name].dataset)
    assert len(loaded[name].nulls) == len(report[name].nulls)
    assert loaded[name].summary == report[name].summary


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_a_loaded_result_draws_every_kind_again(report, loaded, name):
    assert loaded[name].kinds == report[name].kinds == list(report[name].measure.figures)
    for kind in report[name].kinds:
        assert loaded[name].plot(kind).to_json() == report[name].plot(kind).to_json()


@pytest.mark.parametrize("name", MEASURES)
def test_every_figure_names_the_model(report, name):
    for kind in report[name].kinds:
        assert "· mini</b>" in report[name].plot(kind).layout.title.text


@pytest.mark.parametrize("name", WITH_NULL)
def test_findings_give_the_mean_and_spread_of_two_nulls(report, name):
    said = report[name].findings()
    assert said
    assert "(random init " in said[0]
    assert " ± " in said[0]


@pytest.mark.parametrize("name", WITH_NULL)
def test_findings_without_a_null_say_so_and_give_the_same_numbers(report, name):
    alone = dataclasses.replace(report[name], nulls=())
    assert "(no null measured)" in alone.findings()[0]
    assert alone.findings()[0].split(" (")[0] == report[name].findings()[0].split(" (")[0]


@pytest.mark.parametrize(("name", "key", "form"), [
    ("three_axis", "r", ".3f"),
    ("three_axis", "r_without_first_token", ".3f"),
    ("three_axis", "r_within_rows", ".3f"),
    ("variance", "position", ".0%"),
    ("variance", "content", ".0%"),
    ("variance", "interaction", ".0%"),
    ("mean_key", "mean_key_r", ".3f"),
    ("residual", "share", ".0%"),
    ("residual", "top_share_without_first_token", ".0%"),
    ("residual", "effective_rank_without_first_token", ".1f"),
    ("across_prompts", "position_without_first_token", ".1%"),
    ("across_prompts", "by_key_without_first_token", ".1%"),
    ("across_prompts", "by_line_without_first_token", ".1%"),
])  # fmt: skip
def test_sentences_show_means_over_heads_beside_those_of_the_null(report, name, key, form):
    result = report[name]
    own, *nulls = (float(data[key].mean()) for data in (result.dataset, *result.nulls))
    mean = sum(nulls) / len(nulls)
    said = with_interval({**result.summary, key: own}, key, form)
    assert any(f"{said} (random init {mean:{form}} ± " in sentence for sentence in result.findings())


@pytest.mark.parametrize(("name", "key"), [
    ("three_axis", "r_within_rows"),
    ("variance", "position"),
    ("variance", "interaction"),
    ("residual", "share_without_first_token"),
    ("across_prompts", "position_without_first_token"),
])  # fmt: skip
def test_sentences_name_the_head_where_it_is_highest(report, name, key):
    series = report[name].dataset[key].to_series()
    layer, head = series.idxmax()
    assert any(f"layer {layer} head {head} ({series.max():.3f})" in one for one in report[name].findings())


def test_the_headlines_keep_their_names(report):
    shares = [f"share_{name}" for name in ("q", "k", "d", "qk", "qd", "kd", "qkd")]
    axes = ["three_axis_r", "three_axis_r_without_first_token", "three_axis_r_within_rows"]
    named = [*axes, "position_share", *shares, "mean_key_r", "residual_share", "residual_std"]
    frame = report.frame()
    assert frame.columns[: 2 + len(named)].tolist() == ["layer", "head", *named]
    assert (
        set(report.summary()["mean"]) == set(report.summary()["null"]["mean"]) == set(frame.columns) - {"layer", "head"}
    )


# Heads of one's choice


def test_heads_of_different_layers_are_measured_and_no_others(mini, prompts, report):
    from tl_posgen.analysis import analyze

    heads = [(0, 1), (2, 3), (2, 0)]
    few = analyze(mini, prompts, measures=MEASURES, heads=heads, null_seeds=(), progress=False)
    for name, key in [
        ("three_axis", "r_within_rows"),
        ("variance", "position"),
        ("mean_key", "mean_key_r"),
        ("residual", "share_without_first_token"),
        ("residual", "pair_share"),
        ("across_prompts", "position"),
    ]:
        found = few[name].dataset[key]
        first = found if "rank" not in found.dims else found.isel(rank=0)
        chosen = first.to_series().dropna()
        assert sorted(chosen.index) == sorted(heads), name
        whole = report[name].dataset[key]
        same = (whole if "rank" not in whole.dims else whole.isel(rank=0)).to_series()[chosen.index]
        assert chosen.to_numpy() == pytest.approx(same.to_numpy(), rel=1e-4, abs=1e-5)
    assert few["three_axis"].summary["n_heads"] == 3
    for result in few.values():
        assert_declared(result)
        assert all(result.plot(kind).data for kind in result.kinds)
    assert set(few["attention_examples"].summary["heads"]) <= {"0.1", "2.3", "2.0"}


# Options


@pytest.mark.parametrize(
    ("options", "wrong", "said"),
    [
        (ThreeAxis, {"ridge": -1.0}, "three_axis: ridge=-1.0: give a number of pairs, 0 or more"),
        (ThreeAxis, {"ridge": float("nan")}, "ridge=nan"),
        (ThreeAxis, {"ridge": "1"}, "ridge = '1': give a number"),
        (ThreeAxis, {"ridge": True}, "ridge = True: give a number"),
        (ThreeAxis, {"gauge": "flat"}, "gauge = 'flat': give one of 'flat_keys', 'flat_queries', 'flat_distance'"),
        (ThreeAxis, {"gauge": None}, "gauge = None"),
        (ThreeAxis, {"diagonal": 1}, "diagonal = 1: give True or False"),
        (Variance, {"n_distances": 0}, "variance: n_distances=0: give a whole number, 1 to 1048576"),
        (Variance, {"n_distances": 2.5}, "n_distances = 2.5: give a whole number or None"),
        (Variance, {"weights": "near"}, "weights = 'near': give one of 'uniform', 'causal'"),
        (Variance, {"weights": 3}, "weights = 3"),
        (MeanKey, {"d0": -1}, "mean_key: distance -1: give tokens, 0 or more"),
        (MeanKey, {"d0": "8"}, "d0 = '8'"),
        (MeanKey, {"d0": float("inf")}, "distance inf"),
        (MeanKey, {"distances": 8}, "distances = 8: give a list"),
        (MeanKey, {"distances": "08"}, "distances = '08': give a list"),
        (MeanKey, {"distances": (0, -2)}, "mean_key: distance -2"),
        (Residual, {"n_pairs": 0}, "residual: n_pairs=0: give a whole number, 1 to 1024"),
        (Residual, {"n_pairs": 2**31}, "residual: n_pairs=2147483648: give a whole number, 1 to 1024"),
        (Residual, {"components": 513}, "residual: components=513: give a whole number, 1 to 512"),
        (Variance, {"n_distances": 2**31}, "variance: n_distances=2147483648: give a whole number, 1 to 1048576"),
        (Variance, {"n_distances": 10**30}, "give a whole number"),
        (Residual, {"components": 0}, "residual: components=0"),
        (Residual, {"components": True}, "components = True: give a whole number"),
        (Residual, {"examples": -1}, "residual: examples=-1: give a whole number, 0 or more"),
        (Residual, {"examples": "2"}, "examples = '2'"),
        (AcrossPrompts, {"crop": 2}, "across_prompts: crop=2: give a whole number, 3 or more"),
        (AcrossPrompts, {"crop": None}, "crop = None"),
        (AcrossPrompts, {"examples": -1}, "across_prompts: examples=-1"),
        (AttentionExamples, {"examples": 0}, "attention_examples: examples=0: give a whole number, 1 or more"),
        (AttentionExamples, {"examples": 1.5}, "examples = 1.5: give a whole number"),
    ],
)
def test_options_that_cannot_be_used_are_refused_without_any_type_checker(options, wrong, said):
    made = object.__new__(options)  # past the type checks of __init__, which only tests turn on
    for field in dataclasses.fields(options):
        object.__setattr__(made, field.name, wrong.get(field.name, field.default))
    with pytest.raises(InputError, match=re.escape(said)):
        made.__post_init__()
