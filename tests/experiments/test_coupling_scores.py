"""Coupling against scores: correlations with and without width, the warning, and what is refused."""

import numpy as np
import pandas as pd
import pytest
from families import save_config
from transformers import LlamaConfig

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling_scores import correlated, coupling_scores, score_table, width_alone
from tl_posgen.maths.partial_correlation import correlation
from tl_posgen.results import load

WIDTHS = (16, 16, 24, 32)
OPTIONS = {"k": 3, "length": 12, "n_prompts": 2, "widths": (16, 24, 32), "progress": False}
TEXT = "once there was a cat and a dog who ran " * 6


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Four tiny models of three widths, and a score each."""
    root = tmp_path_factory.mktemp("models")
    for number, width in enumerate(WIDTHS):
        sizes = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
        save_config(config, root / f"model{number}", seed=number)
    models = [str(root / f"model{number}") for number in range(len(WIDTHS))]
    return pd.DataFrame({"model": models, "score": [0.1, 0.3, 0.2, 0.4]})


@pytest.fixture(scope="module")
def result(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "scores.csv"
    table.to_csv(path, index=False)
    return coupling_scores(path, TEXT, **OPTIONS)


def test_every_model_is_measured_under_its_name_and_width(result):
    assert result.dataset.model.values.tolist() == ["model0", "model1", "model2", "model3"]
    assert result.dataset.d_model.values.tolist() == list(WIDTHS)
    assert result.dataset.coupling.notnull().all()


def test_r_is_that_of_the_columns_in_the_result(result):
    import torch

    data = result.dataset
    expected = correlation(torch.tensor(data.line_shape_score.values), torch.tensor(data.score.values))
    assert data.r.sel(measure="line_shape_score").item() == pytest.approx(expected.r)


def test_the_null_are_random_models_against_the_same_scores(result):
    assert result.null.attrs["model"] == "random init (seed 0)"
    np.testing.assert_array_equal(result.null.score, result.dataset.score)
    assert not np.allclose(result.null.coupling, result.dataset.coupling)


def test_what_four_models_cannot_tell_is_said(result):
    assert result.dataset.partial_r.isnull().all()
    assert result.dataset.attrs["not_computed"] == "the correlation given width and size (needs 6 models, 4 given)"


def test_fewer_than_four_models_are_drawn_without_a_correlation(table):
    found = coupling_scores(table[:2], TEXT, **OPTIONS | {"null_seed": None})
    assert found.dataset.r.isnull().all()
    assert "the correlation and its line (needs 4 models, 2 given)" in found.dataset.attrs["not_computed"]
    assert found.null is None


def test_a_result_survives_saving_and_is_tabulated_by_model(result, tmp_path):
    assert load(result.save(tmp_path / "r.nc"))["coupling_scores"].dataset.equals(result.dataset)
    assert result.frame()["score"].tolist() == [0.1, 0.3, 0.2, 0.4]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,points\na,1\n", "has no column score; it has model, points"),
        ("name,score\na,1\n", "has no column model"),
        ("model,score\na,1\n\nb,high\n", "line 4: score is 'high', not a finite number"),
        ("model,score\na,1\nb,\n", "line 3: score is '', not a finite number"),
        ("model,score\na,inf\n", "line 2: score is 'inf', not a finite number"),
        ("model,score\na,1\n ,2\n", "line 3: no model named"),
        ("model,score\na,1\na,2\n", "line 3: a is named a second time"),
        ("model,score,d_model\na,1,64\nb,1,-3\n", "line 3: d_model is '-3', not a positive number"),
        ("model,score\na,1,2,3\nb,1,2,3,4,5\n", "not a CSV table .*line 3"),
        ("model,score\n", "has no row"),
        ("", "not a CSV table"),
    ],
)
def test_bad_score_files_are_refused_with_the_line_and_the_reason(tmp_path, text, message):
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        coupling_scores(path, TEXT, **OPTIONS)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"nowhere\.csv: no such file"):
        score_table("nowhere.csv")


def test_blank_lines_and_spaces_do_not_matter(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("model, score\n a , 0.5\n\nb,1\n\n")
    table = score_table(path)
    assert table["model"].tolist() == ["a", "b"]
    assert table["score"].tolist() == [0.5, 1]


def test_random_jacobians_alone_make_the_trace_version_rise_with_width():
    found = width_alone([64, 128, 256], members=2)
    trace, frobenius = (found.coupling.sel(norm=norm).values for norm in ("trace", "frobenius"))
    assert found.width_r2.sel(norm="trace") > 0.99
    np.testing.assert_allclose(trace, 1 - (np.array([64, 128, 256]) / 8) ** -0.5, atol=0.03)
    assert np.abs(frobenius).max() < 0.06
