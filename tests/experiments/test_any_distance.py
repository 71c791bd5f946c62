"""Functions of distance built into a head, and what the bundled model learned instead."""

import numpy as np
import pytest
import torch
from families import save_family

from tl_posgen import analyze, load, load_model
from tl_posgen.analyzers.variance import Variance
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.any_distance import (
    INVERSE_DFT,
    any_distance,
    exact_scores,
    example_functions,
    layer_names,
    two_axis_r,
)
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import compact

OPTIONS = {"length": 48, "n_prompts": 1, "n_distances": 24, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return any_distance(mini, bundled_text(), **OPTIONS)


@pytest.fixture(scope="module")
def best(result):
    return result.dataset.sel(planes="layers 0 to 3, rcond 1e-12")


def test_the_head_made_by_inverse_dft_has_the_functions_for_its_scores(result):
    exact = result.dataset.sel(planes=INVERSE_DFT)
    assert float(exact["error"].max()) < 1e-12
    np.testing.assert_allclose(exact["scores"], result.dataset["values"], atol=1e-12)


def test_the_exact_scores_are_right_for_every_token_pair():
    table = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores, largest, n_planes = exact_scores(table)
    torch.testing.assert_close(scores, table)
    assert n_planes == 3 * 7
    assert largest >= float(table.abs().max())


def test_the_fits_use_the_models_own_frequencies(mini, result, best):
    from tl_posgen.models.probe import probe

    theta = probe(mini)[0].geometry.rope.inv_freq.numpy()
    angles = np.arange(24)[:, None] * theta
    design = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    values = result.dataset["values"].sel(function="sawtooth").values
    fitted = design @ np.linalg.lstsq(design, values, rcond=1e-12)[0]
    np.testing.assert_allclose(best["scores"].sel(function="sawtooth"), fitted, atol=1e-4)
    error = np.sqrt(np.mean((fitted - values) ** 2)) / values.std()
    assert float(best["error"].sel(function="sawtooth")) == pytest.approx(error, abs=1e-4)


def test_a_larger_rcond_has_smaller_logits_and_a_larger_error(result, best):
    small = result.dataset.sel(planes="layers 0 to 3, rcond 0.01")
    assert (small["largest_logit"] < best["largest_logit"]).all()
    assert (small["error"] >= best["error"]).all()


def test_a_function_that_the_planes_have_is_reached(mini):
    wave = torch.arange(24).double().cos()  # the fastest plane turns by 1 per token
    options = {"functions": {"wave": wave}, "rconds": [1e-12], "null_seed": None}
    found = any_distance(mini, bundled_text(), **options, **OPTIONS).dataset
    assert float(found["error"].max()) < 1e-5


def test_two_axis_r_is_one_for_functions_of_distance_and_for_sums():
    position, meaning = torch.rand(3, 1, 9).double(), torch.rand(3, 4, 1).double()
    assert two_axis_r(position + meaning) == pytest.approx(1)
    assert two_axis_r(torch.rand(1, 1, 9).double()) == 1


def test_two_axis_r_of_independent_noise_is_what_the_counts_say():
    n_keys, n_distances = 40, 50
    noise = torch.randn(30, n_keys, n_distances, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = ((n_keys + n_distances - 2) / (n_keys * n_distances - 1)) ** 0.5
    assert two_axis_r(noise) == pytest.approx(expected, rel=0.03)


def test_the_correlation_of_trained_heads_is_that_of_the_variance_decomposition(mini, result):
    analyzer = Variance(n_distances=24)
    report = analyze(mini, bundled_text(), analyzers=[analyzer], length=48, n_prompts=1, null_seed=None, progress=False)
    expected = (1 - report["variance"].dataset["interaction"]) ** 0.5
    np.testing.assert_allclose(result.dataset["head_two_axis_r"], expected)


def test_trained_heads_are_more_additive_than_random_ones_and_both_than_the_made_one(result):
    made = float(result.dataset["two_axis_r"].sel(function="token pairs", planes=INVERSE_DFT))
    trained, random = (float(side["head_two_axis_r"].mean()) for side in (result.dataset, result.null))
    assert made < random < trained


def test_layers_of_other_frequencies_are_fitted_on_their_own(tmp_path):
    model = load_model(save_family("gemma3", tmp_path), backend="bridge")
    tokens = torch.arange(2, 26)[None]
    options = {"length": None, "n_prompts": None, "null_seed": None, "progress": False}
    found = any_distance(model, tokens, n_distances=16, rconds=[1e-12], **options)
    assert found.dataset["planes"].values.tolist() == [INVERSE_DFT, "layer 0, rcond 1e-12", "layer 1, rcond 1e-12"]
    step = found.dataset["error"].sel(function="step").values
    assert step[1] != pytest.approx(step[2])


def test_runs_of_layers_have_short_names():
    assert [layer_names(layers) for layers in ([3], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "layer 3", "layers 0, 1", "layers 0 to 2", "layers 0, 2, 3"
    ]  # fmt: skip


def test_the_seed_decides_the_noise_alone():
    first, again, other = (example_functions(16, seed) for seed in (0, 0, 1))
    assert torch.equal(first["noise"], again["noise"])
    assert not torch.equal(first["token pairs"], other["token pairs"])
    assert torch.equal(first["spike"], other["spike"])


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    traces = result.plot(kind="functions").data
    np.testing.assert_array_equal(traces[0].y, result.dataset["values"].sel(function="step"))
    assert len(traces) == 5 * (1 + 3)
    assert [len(trace.x) for trace in result.plot(kind="heads").data] == [16, 16, 1]
    assert load(result.save(tmp_path / "r.nc"))["any_distance"].dataset.equals(result.dataset)
    assert len(result.frame()) == len(compact(result)) == 15
    assert len(compact(result, null=True)) == 4


def test_the_words_have_the_trained_heads_and_their_null(result):
    sentences = " ".join(findings({"any_distance": result}))
    for side in (result.dataset, result.null):
        assert f"{float(side['head_two_axis_r'].mean()):.3f}" in sentences


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": {}},
        {"functions": {"short": torch.arange(5).double()}},
        {"functions": {"flat": torch.ones(24)}},
        {"functions": {"broken": torch.full((24,), torch.nan)}},
        {"functions": {"matrix": torch.rand(3, 24)}},
        {"rconds": ()},
        {"layers": [9]},
    ],
    ids=str,
)
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        any_distance(mini, bundled_text(), **OPTIONS, **wrong)


def test_a_model_without_rope_is_refused(tmp_path):
    model = load_model(save_family("gpt2", tmp_path), backend="bridge")
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        any_distance(model, torch.arange(2, 26)[None], length=None, n_prompts=None, progress=False)
