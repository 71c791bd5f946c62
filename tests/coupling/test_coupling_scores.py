"""Coupling against scores: correlations with and without width, the warning, and what is refused."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from declared import assert_declared

from tl_posgen.coupling import coupling_scores
from tl_posgen.coupling.coupling_scores import LABELS, correlated, findings
from tl_posgen.errors import InputError
from tl_posgen.result import load
from tl_posgen.stats.partial_correlation import correlation
from tl_posgen.summary import jsonable

pytestmark = pytest.mark.slow

OPTIONS = {"k": 3, "length": 12, "n_prompts": 2, "widths": (16, 24, 32), "progress": False}
TEXT = "once there was a cat and a dog who ran " * 6
WIDTHS = (16, 16, 24, 32)


@pytest.fixture(scope="module")
def of_mini(alice):
    """One model: nothing can be correlated."""
    table = pd.DataFrame({"model": ["mini"], "score": [0.4]})
    return coupling_scores(table, alice, k=4, length=20, n_prompts=2, widths=(16, 32, 64), progress=False)


@pytest.fixture(scope="module")
def of_many(of_mini):
    """Forty made-up models in the place of one, so that everything is computed."""
    made = correlated(*scores_and_measures(), "score").assign_attrs(k=10, model="40 models")
    data = made.merge(of_mini.dataset[["width_coupling", "width_r2", "width_k", "one_minus_inverse_root_k"]])
    return type(of_mini)("coupling_scores", data)


def test_every_model_is_measured_under_its_name_and_width(scores):
    assert scores.dataset.model.values.tolist() == ["model0", "model1", "model2", "model3"]
    assert scores.dataset.d_model.values.tolist() == list(WIDTHS)
    assert scores.dataset.coupling.notnull().all()
    assert scores.provenance["seed"] == 0
    assert scores.provenance["null_seeds"] == [0, 1]


def test_r_is_that_of_the_columns_in_the_result(scores):
    data = scores.dataset
    expected = correlation(torch.tensor(data.line_shape_score.values), torch.tensor(data.score.values))
    assert data.r.sel(measure="line_shape_score").item() == pytest.approx(expected.r)
    assert scores.summary["line_shape_score_r"] == pytest.approx(expected.r)


def test_the_nulls_are_random_models_against_the_same_scores(scores):
    assert [null.attrs["model"] for null in scores.nulls] == ["random init (seed 0)", "random init (seed 1)"]
    np.testing.assert_array_equal(scores.null.score, scores.dataset.score)
    assert not np.allclose(scores.null.coupling, scores.dataset.coupling)
    assert not np.allclose(scores.null.coupling, scores.nulls[1].coupling)


def test_what_four_models_cannot_tell_is_said(scores):
    assert scores.dataset.partial_r.isnull().all()
    words = "the correlation given width and size (needs 6 models, 4 given)"
    assert scores.summary["not_computed"] == words
    assert scores.findings()[1] == f"Not computed: {words}."
    assert scores.plot("given_size").layout.annotations[0].text == "4 models: r not defined"


def test_fewer_than_four_models_are_drawn_without_a_correlation(score_rows):
    found = coupling_scores(score_rows[:2], TEXT, **OPTIONS, null_seeds=())
    assert found.dataset.r.isnull().all()
    assert "the correlation and its line (needs 4 models, 2 given)" in found.dataset.attrs["not_computed"]
    assert found.null is None
    assert len(found.plot().data) == 2 * len(LABELS)
    assert [sentence[:3] for sentence in found.findings()] == ["Not", "War"]


def test_a_result_survives_saving_and_is_tabulated_by_model(scores, tmp_path):
    loaded = load(scores.save(tmp_path / "r.nc"))["coupling_scores"]
    assert loaded.dataset.equals(scores.dataset)
    assert loaded.findings() == scores.findings()
    assert [loaded.plot(kind).to_json() for kind in loaded.kinds] == [
        scores.plot(kind).to_json() for kind in scores.kinds
    ]
    assert scores.frame()["score"].tolist() == [0.1, 0.3, 0.2, 0.4]


def test_every_variable_is_declared(scores):
    assert_declared(scores)


def test_the_correlation_is_told_with_its_interval_and_the_spread_of_its_nulls(scores):
    own = scores.summary
    nulls = [one["coupling_r"] for one in scores.null_summary.seeds]
    null = f"random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f}"
    interval = f"[{own['coupling_r_low']:.3f}, {own['coupling_r_high']:.3f}]"
    told = f"Top-3 coupling and score correlate at r = {own['coupling_r']:.3f} {interval} ({null}) over 4 models."
    assert scores.findings()[0] == told
    assert json.dumps(jsonable(own), allow_nan=False)


def test_the_short_table_has_a_row_a_measure_with_the_numbers_of_the_summary(scores):
    table, own = scores.table(), scores.summary
    assert table["measure"].tolist() == list(LABELS)
    interval = f"[{own['trace_r_low']:.3f}, {own['trace_r_high']:.3f}]"
    assert table["r"][1] == f"{own['trace_r']:.3f} {interval}"
    assert set(table["given size"]) == {"-"}
    assert table["slope"].tolist() == scores.dataset.slope.values.tolist()


def test_given_size_is_told_where_it_was_computed(of_many):
    own = of_many.summary
    assert f"given width and size {own['coupling_partial_r']:.3f} [" in findings(own, None)[0]
    assert "(no null measured)" in findings(own, None)[0]
    assert len(findings(own, None)) == 2  # everything was computed


def scores_and_measures(n=40, seed=0):
    """Width drives coupling and score; nothing else connects them."""
    rng = np.random.default_rng(seed)
    width = 2.0 ** rng.integers(6, 13, n)
    measure = 1 - width**-0.5 + 0.003 * rng.normal(size=n)
    names = ("coupling", "trace", "line_shape_score", "expodistance", "growth_r2")
    measured = pd.DataFrame({name: measure for name in names})
    measured = measured.assign(d_model=width, parameters=width**2 * rng.uniform(1, 9, n))
    scores = np.log(width) + 0.1 * rng.normal(size=n)
    return pd.DataFrame({"model": [f"model-{i}" for i in range(n)], "score": scores}), measured


def test_a_correlation_that_width_makes_is_gone_once_width_is_held_fixed():
    data = correlated(*scores_and_measures(), "score").sel(measure="coupling")
    assert data.r > 0.7
    assert abs(data.partial_r) < abs(data.r) / 2
    assert data.r2.item() == pytest.approx(data.r.item() ** 2)


def test_the_rest_that_is_drawn_has_the_partial_correlation():
    data = correlated(*scores_and_measures(), "score").sel(measure="trace")
    assert np.corrcoef(data.rest, data.rest_score)[0, 1] == pytest.approx(data.partial_r.item())


def test_sizes_in_the_table_count_before_those_of_the_models():
    table, measured = scores_and_measures()
    data = correlated(table.assign(d_model=7.0, parameters=5.0), measured, "score")
    assert (data.d_model == 7).all()
    assert data.attrs["not_computed"] == "the correlation given width and size (all models have the same)"


def test_the_scatter_has_a_row_a_measure_a_point_a_model_and_the_line(scores):
    figure, data = scores.plot(), scores.dataset
    for row, name in enumerate(LABELS):
        points, line, null_points, _ = figure.data[4 * row : 4 * row + 4]
        np.testing.assert_array_equal(points.x, data[name])
        np.testing.assert_array_equal(points.y, data["score"])
        np.testing.assert_allclose(points.error_x.array, data[f"{name}_high"] - data[name])
        np.testing.assert_array_equal(null_points.x, scores.null[name])
        x = data[name].min()
        assert line.y[0] == pytest.approx(float(data.intercept[row] + data.slope[row] * x))


def test_the_scatter_of_one_model_says_what_it_cannot_tell(of_mini):
    figure = of_mini.plot()
    np.testing.assert_array_equal(figure.data[0].x, of_mini.dataset.coupling)
    assert "needs 4 models, 1 given" in figure.layout.title.text
    assert figure.layout.annotations[0].text == "1 models: r not defined"


def test_panels_say_the_correlation_of_the_summary(scores):
    own = scores.summary
    interval = f"[{own['trace_r_low']:.2f}, {own['trace_r_high']:.2f}]"
    assert scores.plot().layout.annotations[2].text == f"4 models: r = {own['trace_r']:.2f} {interval}"


def test_the_warning_is_drawn_and_told(of_mini):
    curves = of_mini.plot(kind="width").data
    np.testing.assert_array_equal(curves[1].y, of_mini.dataset.width_coupling.sel(norm="trace"))
    assert curves[1].name == f"trace normalisation (R² against 1/√d: {of_mini.summary['width_trace_r2']:.4f})"
    np.testing.assert_allclose(curves[2].y, 1 - of_mini.dataset.width_k.values**-0.5)
    assert of_mini.kinds == ["scatter", "width"]  # nothing is left of one model given its size
    warning = of_mini.findings()[-1]
    assert warning.startswith("Warning: independent random Jacobians of width 16 to 64")
    most = float(re.search(r"stays within ([\d.]+) of 0", warning)[1])
    assert most - 0.001 <= of_mini.summary["width_frobenius_most"] <= most


def test_size_held_fixed_has_a_picture_of_its_own(of_many):
    figure = of_many.plot(kind="given_size")
    np.testing.assert_array_equal(figure.data[1].x, of_many.dataset.rest.sel(measure="trace"))
    np.testing.assert_array_equal(figure.data[1].y, of_many.dataset.rest_score)
    assert figure.layout.annotations[1].text.startswith(f"40 models: r = {of_many.summary['trace_partial_r']:.2f} [")


def test_bad_options_are_refused(score_rows):
    with pytest.raises(InputError, match="null_seeds"):
        coupling_scores(score_rows, TEXT, **OPTIONS, null_seeds=(0, 0))
    with pytest.raises(InputError, match="leaves no singular vector"):
        coupling_scores(score_rows, TEXT, **OPTIONS | {"widths": (4,)})
