"""Coupling against scores: correlations with and without width, the warning, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

from tl_posgen.core.inits import joined
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.saved import load
from tl_posgen.coupling import coupling_scores
from tl_posgen.coupling.coupling_scores import SIZES, dataset_of
from tl_posgen.coupling.coupling_scores_figure import LABELS
from tl_posgen.errors import InputError
from tl_posgen.stats.correlations import correlation

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
    by_width = of_mini.trained[["width_coupling", "width_r2"]]
    sides = {TRAINED: dataset_of(*made_up(), "score").merge(by_width)}
    return type(of_mini)(of_mini.measure, joined(of_mini.measure, sides, ["40 models"]))


def made_up(n=40, seed=0):
    """Width drives coupling and score; nothing else connects them. Returns the table, what is measured, sizes."""
    rng = np.random.default_rng(seed)
    width = 2.0 ** rng.integers(6, 13, n)
    measured = 1 - width**-0.5 + 0.003 * rng.normal(size=n)
    depth = rng.integers(4, 40, n)
    sizes = pd.DataFrame({"d_model": width, "n_layers": depth, "parameters": width**2 * depth})
    table = pd.DataFrame({"model": [f"model-{i}" for i in range(n)], "score": np.log(width) + 0.1 * rng.normal(size=n)})
    return table, [dict.fromkeys(LABELS, Number(value)) for value in measured], sizes


def test_every_model_is_measured_beside_its_random_inits_against_the_same_scores(scores):
    assert scores.trained.model_name.values.tolist() == ["model0", "model1", "model2", "model3"]
    assert scores.trained.d_model.values.tolist() == list(WIDTHS)
    assert scores.trained.measured.notnull().all()
    assert (scores.provenance["seed"], scores.provenance["nulls"]) == (0, {"random init": [0, 1], "shuffled": [0]})
    assert scores.provenance["drawn"] == "spread over the text"
    measured = scores.trained.measured.sel(quantity="line_shape_score", end="value")
    columns = torch.tensor(measured.values), torch.tensor(scores.trained.score.values)
    expected, found = correlation(*columns), scores.measure.r(scores.numbers, "line_shape_score")
    assert (found.value, found.low, found.high) == pytest.approx((expected.r, expected.low, expected.high))
    names = [*(f"random init (seed {seed})" for seed in (0, 1)), "shuffled weights (seed 0)"]
    assert [null.attrs["model"] for null in scores.nulls] == names
    np.testing.assert_array_equal(scores.null.score, scores.trained.score)
    for other in (scores.trained, *scores.nulls[1:]):
        assert not np.allclose(scores.null.measured, other.measured)


def test_fewer_than_four_models_are_drawn_without_a_correlation(score_rows):
    found = coupling_scores(score_rows[:2], TEXT, **OPTIONS, nulls=0)
    assert not any(found.measure.r(found.numbers, name) for name in LABELS)
    assert "the correlation (needs 4 models, 2 given)" in found.findings()[0]
    assert found.null is None
    assert len(found.plot().data) == len(LABELS)
    assert found.plot().layout.annotations[0].text == "2 models: r not defined"
    assert found.kinds == ["scatter", "width"]
    assert [sentence[:3] for sentence in found.findings()] == ["Not", "War"]


def test_a_result_has_its_declared_dims_survives_saving_and_is_tabulated_by_model(scores, tmp_path):
    dims = {name: array.dims for name, array in scores.trained.data_vars.items()}
    assert dims == {name: one.dims for name, one in scores.measure.variables.items()}
    loaded = load(scores.save(tmp_path / "r.nc"))["coupling_scores"]
    assert loaded.measure.options() == scores.measure.options()
    assert loaded.findings() == scores.findings()
    for kind in scores.kinds:
        assert loaded.plot(kind).to_json() == scores.plot(kind).to_json()
    frame = scores.frame()
    assert frame["score"].tolist() == [0.1, 0.3, 0.2, 0.4]
    ends = ("", ", low", ", high")
    wanted = {f"measured, {name}{end}" for name in LABELS for end in ends}
    assert wanted == {one for one in frame.columns if one.startswith("measured")}


def test_sizes_that_all_models_share_are_not_compared_with(scores):
    """All have two layers."""
    own, measure = scores.numbers, scores.measure
    assert not measure.excess(own, "n_layers")
    _, of_width, of_parameters, *_ = scores.findings()
    width, excess = measure.r(own, "d_model"), measure.excess(own, "d_model")
    assert of_width.startswith(
        f"Width correlates with score at r = {width.with_interval:.2f}: coupling is not told from"
    )
    assert of_width.endswith(f"it, |r| of coupling {excess:+.2f}.")
    assert of_parameters.startswith("Parameters")
    assert width.inits == (width.value, width.value)  # random inits have the sizes of their models


def test_coupling_is_said_to_beat_the_sizes_that_it_beats_beyond_chance_and_no_others(of_mini):
    """Coupling and parameters follow the score equally closely, width and depth not at all."""
    table, measured, sizes = made_up(60)
    score, *noise = np.random.default_rng(0).normal(size=(3, 60))
    coupled, parameters = (score + 0.3 * one for one in noise)
    measured = [one | {"coupling": Number(value)} for one, value in zip(measured, coupled, strict=True)]
    by_width = of_mini.trained[["width_coupling", "width_r2"]]
    table, sizes = table.assign(score=score), sizes.assign(parameters=np.exp(parameters))
    sides = {TRAINED: dataset_of(table, measured, sizes, "score").merge(by_width)}
    found = type(of_mini)(of_mini.measure, joined(of_mini.measure, sides, ["60 models"]))
    excess = {size: found.measure.excess(found.numbers, size) for size in SIZES}
    r, of_depth = (found.measure.r(found.numbers, name) for name in ("coupling", "n_layers"))
    assert float(excess["n_layers"]) == pytest.approx(abs(r.value) - abs(of_depth.value))
    assert excess["d_model"].low > 0
    assert excess["parameters"].low < 0 < excess["parameters"].high
    told = [one.split(": coupling ")[1].split(" it, ")[0] for one in found.findings()[1:4]]
    assert told == ["beats", "beats", "is not told from"]


def test_a_correlation_that_width_makes_is_gone_once_width_is_held_fixed(of_many):
    measure, own = of_many.measure, of_many.numbers
    r, given = measure.r(own, "coupling"), measure.given_sizes(own, "coupling")
    assert r.value > 0.7
    assert abs(given.value) < abs(r.value) / 2
    first, *more = of_many.findings()
    assert f"given width and size {given.plain:.3f} [" in first
    assert "random init" not in first
    assert [one.split()[0] for one in more] == ["Width", "Depth", "Parameters", "Warning:"]  # all was computed
    told = [one.split(": coupling ")[1].split(" it, ")[0] for one in more[:3]]
    assert told == ["is beaten by", "beats", "is not told from"]


def test_sizes_in_the_table_count_before_those_of_the_models(of_many):
    table, measured, sizes = made_up()
    data = dataset_of(table.assign(d_model=7.0, parameters=5.0), measured, sizes, "score")
    assert (data.d_model == 7).all()
    numbers = type(of_many)(of_many.measure, joined(of_many.measure, {TRAINED: data}, ["alike"])).numbers
    assert of_many.measure.not_computed(numbers) == ["the correlation given width and size (all models have the same)"]
    assert not of_many.measure.given_sizes(numbers, "coupling")


def test_a_quantity_that_a_model_lacks_has_no_correlation(of_many):
    table, measured, sizes = made_up()
    measured[3] = measured[3] | {"expodistance": Number(float("nan"))}
    data = dataset_of(table, measured, sizes, "score")
    numbers = type(of_many)(of_many.measure, joined(of_many.measure, {TRAINED: data}, ["lacking"])).numbers
    for told in (of_many.measure.r, of_many.measure.given_sizes):
        assert not told(numbers, "expodistance")
        assert told(numbers, "trace")


def test_bad_options_are_refused(score_rows):
    for wrong, message in (({"nulls": -1}, "nulls=-1"), ({"widths": (4,)}, "leaves no singular vector")):
        with pytest.raises(InputError, match=message):
            coupling_scores(score_rows, TEXT, **OPTIONS | wrong)
