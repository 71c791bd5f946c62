"""The coupling experiment on a trained model, its null, tiny random models, and against scores."""

import numpy as np
import pandas as pd
import pytest
import torch
from families import VOCAB, save_family

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling import coupling, headline
from tl_posgen.experiments.coupling_scores import coupling_scores, headlines, width_alone
from tl_posgen.maths.trajectories import expodistance, line_shape_score
from tl_posgen.models.jacobians import residual_jacobians, residual_streams
from tl_posgen.models.load import load_model
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import read_text, to_prompts
from tl_posgen.results import load


@pytest.fixture(scope="module")
def stories(shared):
    """(model, its null with seed 0, the first 64 tokens of TinyStories)."""
    model = load_model(shared / "models" / "stories260K", backend="bridge")
    text = read_text(shared / "text" / "tinystories.txt")
    return model, random_like(model, 0), torch.stack(to_prompts(model, text, length=64, n_prompts=1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(save_family("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(2, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def result(tiny, prompts):
    return coupling(tiny, prompts, k=(2, 5), tokens=[4, -1], token_wise=True, progress=False)


def test_stories260k_has_the_reference_coupling_beside_its_random_init(stories):
    model, null, prompts = stories
    found = coupling(model, prompts, null_model=null, progress=False)
    assert found.dataset.mean_coupling.item() == pytest.approx(0.058, abs=0.0015)
    assert found.null.mean_coupling.item() == pytest.approx(0.028, abs=0.0015)
    assert found.dataset.mean_chance.item() == pytest.approx(found.null.mean_coupling.item(), abs=0.01)


def test_stories260k_has_the_reference_straightness_and_growth_up_to_the_last_block(stories):
    """The reference values leave the last block's output out; with it they are 1.70, 2.14, .20 and .91."""
    model, null, prompts = stories
    trained, random = (residual_streams(m, prompts[0])[:, -1] for m in (model, null))
    measured = [float(m(x[:-1])) for x in (trained, random) for m in (line_shape_score, expodistance)]
    assert measured == pytest.approx([1.65, 0.21, 1.81, 0.76], abs=0.005)
    whole = [float(m(x)) for x in (trained, random) for m in (line_shape_score, expodistance)]
    assert whole == pytest.approx([1.70, 0.20, 2.14, 0.91], abs=0.005)


def test_the_map_is_the_formula_on_dense_jacobians(tiny, prompts):
    found = coupling(tiny, prompts[:1], k=(3,), progress=False).dataset.coupling.sel(k=3).values
    first, second = (j.dense() for j in residual_jacobians(tiny, prompts[0], -1))
    u, _, vh = torch.linalg.svd(second)
    values = torch.linalg.svdvals(first)[:3]
    aligned = (u[:, :3].mT @ first @ vh[:3].mT).abs()
    expected = 1 - torch.linalg.matrix_norm(aligned - torch.diag(values)) / values.norm()
    assert found[0, 1] == pytest.approx(expected.item(), abs=1e-5)
    np.testing.assert_allclose(np.diag(found), 1, atol=1e-5)


def test_matrix_free_and_dense_routes_give_the_same_map(tiny, prompts):
    free, dense = (coupling(tiny, prompts[:1], k=(4,), dense_up_to=size, progress=False) for size in (0, 64))
    np.testing.assert_allclose(free.dataset.coupling, dense.dataset.coupling, atol=1e-3)
    np.testing.assert_allclose(free.dataset.chance, dense.dataset.chance, atol=1e-5)
    assert free.dataset.triplet_residual.max() < 1e-4


def test_intervals_hold_the_means_and_need_two_prompts(tiny, prompts, result):
    data = result.dataset
    assert ((data.mean_coupling_low <= data.mean_coupling) & (data.mean_coupling <= data.mean_coupling_high)).all()
    assert (data.chance_low < data.chance_high).all()
    assert coupling(tiny, prompts[:1], k=(2,), progress=False).dataset.mean_coupling_low.isnull().all()


def test_tokens_are_coupled_in_three_ways_and_agree_where_the_pairs_coincide(result):
    found = result.dataset.token_coupling
    assert list(found.kind.values) == ["self", "same_input", "same_output"]
    for kind in found.kind.values:
        np.testing.assert_allclose(np.diagonal(found.sel(kind=kind), axis1=2, axis2=3), 1, atol=1e-4)
    assert (found.sel(token=4, token_2=19) < 0.9).all()


def test_linearisation_is_the_product_of_all_blocks(tiny, prompts, result):
    streams = residual_streams(tiny, prompts[0])
    jacobians = [j.dense() for j in residual_jacobians(tiny, prompts[0], -1)]
    x = streams[0, -1]
    for jacobian in jacobians:
        x = (torch.eye(len(x)) + jacobian) @ x
    expected = torch.nn.functional.cosine_similarity(x, streams[-1, -1], dim=0)
    assert result.dataset.linearisation.sel(prompt=0, token=19).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_subset_of_layers_is_labelled_with_their_numbers(tiny, prompts):
    data = coupling(tiny, prompts[:1], layers=[1], k=(2,), progress=False).dataset
    assert data.layer.values.tolist() == [1]
    assert "linearisation" not in data
    assert data.mean_coupling.isnull().all()


def test_a_result_survives_saving(result, tmp_path):
    loaded = load(result.save(tmp_path / "coupling.nc"))["coupling"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.frame()["k"].tolist() == [2, 5]


def test_the_first_token_is_not_in_the_picture(result):
    data = result.dataset.trajectory
    assert data.sel(position=0).isnull().all()
    assert data.sel(position=slice(1, None)).notnull().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": (33,)}, r"k \[33\]: choose from 1 to 32"),
        ({"layers": [0, 7]}, r"layer \[7\]: choose from 0 to 1"),
        ({"tokens": [20]}, r"token \[20\]: choose from -20 to 19"),
        ({"tokens": [3], "token_wise": True}, "two positions or more"),
        ({"chance_samples": 0}, "chance line"),
    ],
)
def test_bad_choices_are_refused_before_the_model_runs(tiny, prompts, arguments, message):
    with pytest.raises(InputError, match=message):
        coupling(tiny, prompts, progress=False, **{"k": (2,), **arguments})


def scores_and_measures(n=12, seed=0):
    """Width drives both columns; nothing else connects them."""
    rng = np.random.default_rng(seed)
    width = 2.0 ** rng.integers(6, 13, n)
    names = [f"model-{i}" for i in range(n)]
    measure = 1 - width**-0.5 + 0.003 * rng.normal(size=n)
    score = np.log(width) + 0.1 * rng.normal(size=n)
    measured = pd.DataFrame(
        {"model": names, "coupling_10": measure, "d_model": width, "parameters": width**2 * rng.uniform(1, 9, n)}
    )
    return measured, pd.DataFrame({"model": names, "score": score})


def test_a_correlation_that_width_makes_is_gone_once_width_is_held_fixed(tmp_path):
    measured, scores = scores_and_measures(n=40)
    scores.to_csv(tmp_path / "scores.csv", index=False)
    data = coupling_scores(measured, tmp_path / "scores.csv", measure="coupling_10").dataset
    assert data.r > 0.7
    assert abs(data.partial_r) < abs(data.r) / 2
    assert data.r2.item() == pytest.approx(data.r.item() ** 2)


def test_models_without_a_score_are_left_out():
    measured, scores = scores_and_measures()
    data = coupling_scores(measured, scores[3:], measure="coupling_10").dataset
    assert data.model.values.tolist() == scores["model"][3:].tolist()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m, s: (m, s.rename(columns={"score": "points"})), "the score table has no column score"),
        (lambda m, s: (m.drop(columns="d_model"), s), "the measured table has no column d_model"),
        (lambda m, s: (m, pd.concat([s, s[:1]])), "names model-0 twice"),
        (lambda m, s: (m[:5], s), "5 models have both"),
        (lambda m, s: (m, s.assign(score=["?", *s["score"][1:]])), "the score of model-0 is not a number"),
        (lambda m, s: (m, "nowhere.csv"), "no such file"),
    ],
)
def test_bad_score_tables_are_refused(spoil, message):
    with pytest.raises(InputError, match=message):
        coupling_scores(*spoil(*scores_and_measures()), measure="coupling_10")


def test_headlines_carry_what_the_partial_correlation_needs(result):
    table = headlines({"tiny": result})
    assert {"model", "d_model", "parameters", "coupling_5", "expodistance"} <= set(table)
    assert table.loc[0, "coupling_5"] == headline(result.dataset)["coupling_5"]


def test_random_jacobians_alone_make_the_trace_version_rise_with_width():
    found = width_alone([64, 128, 256], members=2).coupling
    trace, frobenius = found.sel(norm="trace").values, found.sel(norm="frobenius").values
    assert np.corrcoef(trace, np.array([64, 128, 256]) ** -0.5)[0, 1] ** 2 > 0.99
    np.testing.assert_allclose(trace, 1 - (np.array([64, 128, 256]) / 8) ** -0.5, atol=0.03)
    assert np.abs(frobenius).max() < 0.06
