"""Functions of distance built into a head, and what the bundled model learned instead."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of

from tl_posgen.core.files import jsonable
from tl_posgen.errors import InputError
from tl_posgen.models.tokens import to_prompts
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.planes import AnyDistance
from tl_posgen.position.planes.any_distance import layer_names
from tl_posgen.position.planes.made_scores import INVERSE_DFT, additive_r

CUT = {"length": 48, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="session")
def result(mini, alice):
    return AnyDistance(n_distances=24)(mini, alice, null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="session")
def best(result):
    return result.own.sel(planes="layers 0 to 3, rcond 1e-12")


def test_the_head_made_by_inverse_dft_has_the_functions_for_its_scores(result):
    exact = result.own.sel(planes=INVERSE_DFT)
    assert float(exact["error"].max()) < 1e-12
    np.testing.assert_allclose(exact["scores"], result.own["values"], atol=1e-12)


def test_the_fits_use_the_models_own_frequencies(mini, result, best):
    theta = wrap(mini).found()[0].geometry.rope.inv_freq.numpy()
    angles = np.arange(24)[:, None] * theta
    design = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    values = result.own["values"].sel(function="sawtooth").values
    fitted = design @ np.linalg.lstsq(design, values, rcond=1e-12)[0]
    np.testing.assert_allclose(best["scores"].sel(function="sawtooth"), fitted, atol=1e-4)
    error = np.sqrt(np.mean((fitted - values) ** 2)) / values.std()
    assert float(best["error"].sel(function="sawtooth")) == pytest.approx(error, abs=1e-4)


def test_a_larger_rcond_has_smaller_logits_and_a_larger_error(result, best):
    small = result.own.sel(planes="layers 0 to 3, rcond 0.01")
    assert (small["largest_logit"] < best["largest_logit"]).all()
    assert (small["error"] >= best["error"]).all()


def test_a_function_that_the_planes_have_is_reached(mini, alice):
    wave = torch.arange(24).double().cos()  # the fastest plane turns by 1 per token
    options = {"functions": {"wave": wave}, "rconds": [1e-12], "n_distances": 24}
    found = AnyDistance(**options)(mini, alice, null_seeds=(), **CUT)
    assert float(found.own["error"].max()) < 1e-5
    assert "relative error is 0.00 to 0.00" in found.findings()[1]
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
    (layer,) = captures_of(mini, to_prompts(mini, alice, length=48, n_prompts=1), layers=[2])
    moments = TripleMoments.from_qk(layer.q, layer.k, layer.geometry.rope, first_token=False)
    shares = variance_shares(moments, layer.geometry.rope, layer.geometry.scale, 24).within_rows
    expected = (1 - shares.share("kd", "qkd")) ** 0.5
    np.testing.assert_allclose(result.own["head_additive_r"].sel(layer=2), expected, rtol=1e-6)


def test_trained_heads_are_more_additive_than_random_ones_and_both_than_the_made_one(result):
    made = float(result.own["additive_r"].sel(function="token pairs", planes=INVERSE_DFT))
    trained = result.numbers("head_additive_r")
    assert made < min(trained.inits) <= max(trained.inits) < trained.value


def test_layers_of_other_frequencies_are_fitted_on_their_own(family_model):
    tokens = torch.arange(2, 26)[None]
    model, measure = family_model("gemma3", "bridge"), AnyDistance(n_distances=16, rconds=[1e-12])
    found = measure(model, tokens, null_seeds=(), progress=False)
    assert found.own["planes"].values.tolist() == [INVERSE_DFT, "layer 0, rcond 1e-12", "layer 1, rcond 1e-12"]
    step = found.own["error"].sel(function="step").values
    assert step[1] != pytest.approx(step[2])


def test_chosen_layers_and_heads_are_fitted_and_set_beside_alone(mini, alice, result):
    some = AnyDistance(n_distances=24)(mini, alice, layers=[1], heads=[2], null_seeds=(), **CUT).own
    assert some["planes"].values.tolist()[1] == "layer 1, rcond 1e-12"
    assert some["head_additive_r"].shape == (1, 1)
    np.testing.assert_allclose(some["head_additive_r"], result.own["head_additive_r"].sel(layer=[1], head=[2]))


def test_runs_of_layers_have_short_names():
    assert [layer_names(layers) for layers in ([3], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "layer 3", "layers 0, 1", "layers 0 to 2", "layers 0, 2, 3"
    ]  # fmt: skip


def test_the_seed_of_the_job_draws_the_functions(mini, alice, result):
    for seed, drawn_alike in ((0, True), (1, False)):
        other = AnyDistance(n_distances=24)(mini, alice, seed=seed, null_seeds=(), **CUT).own
        same = (result.own["values"] == other["values"]).all("distance")
        assert same.values.tolist() == [True, True, True, drawn_alike, drawn_alike]


def test_functions_are_drawn_with_every_head_made_for_them_and_heads_as_points(result):
    figure, data = result.plot(kind="functions"), result.own
    traces, titles = figure.data, [note.text for note in figure.layout.annotations]
    for name, title in zip(data["function"].values, titles, strict=True):
        errors = data["error"].sel(function=name).values
        assert title == f"{name}: errors {', '.join(f'{error:.2g}' for error in errors)}"
    assert len(traces) == 5 * (1 + 3)
    np.testing.assert_array_equal(traces[0].y, result.own["values"].sel(function="step"))
    np.testing.assert_array_equal(traces[1].y, result.own["scores"].sel(function="step", planes=INVERSE_DFT))
    own, null, made = result.plot(kind="heads").data
    np.testing.assert_array_equal(own.x, result.own["head_additive_r"].values.ravel())
    np.testing.assert_array_equal(null.x, result.null["head_additive_r"].values.ravel())
    assert made.x == (float(result.own["additive_r"].sel(planes=INVERSE_DFT).min()),)


def test_rows_of_the_tables(result):
    assert len(result.frame()) == len(result.table()) == 15
    null = result.table("random init")
    assert len(null) == 4
    mean = np.mean([one["head_additive_r"].mean("head") for one in result.nulls], 0)
    np.testing.assert_allclose(null["head_additive_r"], mean)


def test_the_sentences_say_the_numbers(result):
    first, *fits, last = result.findings()
    data = result.own
    assert f"relative error at most {float(data['error'].sel(planes=INVERSE_DFT).max()):.0e}" in first
    assert f"'token pairs', which takes {8 * 13} planes" in first
    for sentence, planes in zip(fits, data["planes"].values[1:], strict=True):
        one = data.sel(planes=planes)
        assert f"is {float(one['error'].min()):.2f} to {float(one['error'].max()):.2f}" in sentence
        ratio = float((one["largest_logit"] / one["largest_value"]).max())
        assert f"({planes})" in sentence
        assert f"as much as {ratio:.2g} times" in sentence
    assert f"{result.numbers('head_additive_r'):.3f}" in last


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
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError, match=next(iter(wrong)).removesuffix("s")):
        AnyDistance(**{"n_distances": 24, **wrong})


def test_functions_are_options_in_json():
    options = AnyDistance(n_distances=4, functions={"mine": torch.arange(4.0)}).options()
    assert options == jsonable(options)
