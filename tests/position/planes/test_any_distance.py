"""Functions of distance built into a head, and what the bundled model learned instead."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from declared import assert_declared

from tl_posgen import load
from tl_posgen.analysis import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.position.planes.any_distance import (
    INVERSE_DFT,
    AnyDistance,
    additive_r,
    exact_scores,
    example_functions,
    layer_names,
)
from tl_posgen.position.planes.any_distance import MEASURE as any_distance
from tl_posgen.report.tables import compact

CUT = {"length": 48, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="session")
def result(mini, alice):
    return any_distance(mini, alice, n_distances=24, null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="session")
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
    theta = wrap(mini).found()[0].geometry.rope.inv_freq.numpy()
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


def test_a_function_that_the_planes_have_is_reached(mini, alice):
    wave = torch.arange(24).double().cos()  # the fastest plane turns by 1 per token
    options = {"functions": {"wave": wave}, "rconds": [1e-12], "n_distances": 24}
    found = any_distance(mini, alice, null_seeds=(), **options, **CUT)
    assert float(found.dataset["error"].max()) < 1e-5
    assert found.summary["fit_error_highest"] == [float(found.dataset["error"].isel(planes=1).max())]
    assert len(found.plot("functions").data) == 3


def test_additive_r_is_one_for_functions_of_distance_and_for_sums():
    position, content = torch.rand(3, 1, 9).double(), torch.rand(3, 4, 1).double()
    assert additive_r(position + content) == pytest.approx(1)
    assert additive_r(torch.rand(1, 1, 9).double()) == 1


def test_additive_r_of_independent_noise_is_what_the_counts_say():
    n_keys, n_distances = 40, 50
    noise = torch.randn(30, n_keys, n_distances, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = ((n_keys + n_distances - 2) / (n_keys * n_distances - 1)) ** 0.5
    assert additive_r(noise) == pytest.approx(expected, rel=0.03)


def test_the_correlation_of_trained_heads_is_that_of_the_variance_decomposition(mini, alice, result):
    found = analyze(mini, alice, measures=[Variance(n_distances=24)], null_seeds=(), **CUT)["variance"]
    np.testing.assert_allclose(result.dataset["head_additive_r"], (1 - found.dataset["interaction"]) ** 0.5)


def test_trained_heads_are_more_additive_than_random_ones_and_both_than_the_made_one(result):
    made = float(result.dataset["additive_r"].sel(function="token pairs", planes=INVERSE_DFT))
    trained, random = (float(side["head_additive_r"].mean()) for side in (result.dataset, result.null))
    assert made < random < trained


def test_layers_of_other_frequencies_are_fitted_on_their_own(family_model):
    tokens = torch.arange(2, 26)[None]
    found = any_distance(
        family_model("gemma3", "bridge"), tokens, n_distances=16, rconds=[1e-12], null_seeds=(), progress=False
    )
    assert found.dataset["planes"].values.tolist() == [INVERSE_DFT, "layer 0, rcond 1e-12", "layer 1, rcond 1e-12"]
    step = found.dataset["error"].sel(function="step").values
    assert step[1] != pytest.approx(step[2])


def test_chosen_layers_and_heads_are_fitted_and_set_beside_alone(mini, alice, result):
    some = any_distance(mini, alice, layers=[1], heads=[2], n_distances=24, null_seeds=(), **CUT).dataset
    assert some["planes"].values.tolist()[1] == "layer 1, rcond 1e-12"
    assert some["head_additive_r"].shape == (1, 1)
    np.testing.assert_allclose(some["head_additive_r"], result.dataset["head_additive_r"].sel(layer=[1], head=[2]))


def test_runs_of_layers_have_short_names():
    assert [layer_names(layers) for layers in ([3], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "layer 3", "layers 0, 1", "layers 0 to 2", "layers 0, 2, 3"
    ]  # fmt: skip


def test_the_seed_decides_the_noise_alone():
    first, again, other = (example_functions(16, seed) for seed in (0, 0, 1))
    assert torch.equal(first["noise"], again["noise"])
    assert not torch.equal(first["token pairs"], other["token pairs"])
    assert torch.equal(first["spike"], other["spike"])


def test_the_seed_of_the_job_draws_the_functions(mini, alice, result):
    other = any_distance(mini, alice, seed=1, n_distances=24, null_seeds=(), **CUT).dataset
    same = (result.dataset["values"] == other["values"]).all("distance")
    assert same.values.tolist() == [True, True, True, False, False]


def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    loaded = load(result.save(tmp_path / "r.nc"))["any_distance"]
    assert loaded.dataset.equals(result.dataset)
    for kind in ("functions", "heads"):
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()


def test_functions_are_drawn_with_every_head_made_for_them_and_heads_as_points(result):
    traces = result.plot(kind="functions").data
    assert len(traces) == 5 * (1 + 3)
    np.testing.assert_array_equal(traces[0].y, result.dataset["values"].sel(function="step"))
    np.testing.assert_array_equal(traces[1].y, result.dataset["scores"].sel(function="step", planes=INVERSE_DFT))
    own, null, made = result.plot(kind="heads").data
    np.testing.assert_array_equal(own.x, result.dataset["head_additive_r"].values.ravel())
    np.testing.assert_array_equal(null.x, result.null["head_additive_r"].values.ravel())
    assert made.x == (result.summary["least_additive_r"],)


def test_the_errors_in_the_titles_are_those_of_the_summary(result):
    titles = [note.text for note in result.plot(kind="functions").layout.annotations]
    for name, title in zip(result.dataset["function"].values, titles, strict=True):
        errors = result.dataset["error"].sel(function=name).values.tolist()
        assert result.summary[f"error_{name}"] == errors
        assert title == f"{name}: errors {', '.join(f'{error:.2g}' for error in errors)}"


def test_rows_of_the_tables(result):
    assert len(result.frame()) == len(compact(result)) == 15
    assert len(compact(result, null=True)) == 4


def test_every_variable_is_declared(result):
    assert_declared(result)


def test_the_sentences_say_the_summary_with_the_null_or_without(result):
    assert json.loads(json.dumps(result.summary)) == result.summary
    first, *fits, last = result.findings()
    data = result.dataset
    assert f"relative error at most {float(data['error'].sel(planes=INVERSE_DFT).max()):.0e}" in first
    assert f"'token pairs', which takes {8 * 13} planes" in first
    for sentence, planes in zip(fits, data["planes"].values[1:], strict=True):
        one = data.sel(planes=planes)
        assert f"is {float(one['error'].min()):.2f} to {float(one['error'].max()):.2f}" in sentence
        ratio = float((one["largest_logit"] / one["largest_value"]).max())
        assert f"({planes})" in sentence
        assert f"as much as {ratio:.2g} times" in sentence
    own = float(data["head_additive_r"].mean())
    nulls = [float(null["head_additive_r"].mean()) for null in result.nulls]
    told = f"{own:.3f} (random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f})"
    assert told in last
    assert f"{own:.3f} (no null measured)" in replace(result, nulls=()).findings()[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": {}},
        {"functions": {"short": torch.arange(5).double()}},
        {"functions": {"flat": torch.ones(24)}},
        {"functions": {"broken": torch.full((24,), torch.nan)}},
        {"functions": {"matrix": torch.rand(3, 24)}},
        {"functions": {"list": [1.0] * 24}},
        {"functions": torch.rand(24)},
        {"rconds": ()},
        {"rconds": (-1.0,)},
        {"rconds": 0.1},
        {"n_distances": 0},
        {"n_distances": "many"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError, match=next(iter(wrong)).removesuffix("s")):
        AnyDistance(**{"n_distances": 24, **wrong})


def test_a_layer_that_is_not_there_is_refused(mini, alice):
    with pytest.raises(InputError, match="layer 9"):
        any_distance(mini, alice, layers=[9], **CUT)


def test_a_model_without_rope_is_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        any_distance(family_model("gpt2", "bridge"), torch.arange(2, 26)[None], progress=False)
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        any_distance(family_model("smollm3", "bridge"), torch.arange(2, 26)[None], layers=[1], progress=False)
