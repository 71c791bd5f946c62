"""Coupling on trained models, their nulls, and tiny random models."""

import numpy as np
import pytest
import torch

from tl_posgen.coupling import Coupling
from tl_posgen.coupling.jacobians import residual_jacobians, residual_streams
from tl_posgen.coupling.numbers.trajectories import expodistance, line_shape_score
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.tokens import prompts_of_one_length

WHOLE = {"nulls": 0, "progress": False}
# model and random init, at the last of 64 tokens: coupling, then line-shape score and expodistance of each
REFERENCE = {
    "stories": ((0.058, 0.028), [1.70, 0.20, 2.14, 0.91], [1.65, 0.21, 1.81, 0.76]),
    "mini": ((0.0347, 0.0270), [1.431, 1.203, 2.035, 0.159], [1.258, 0.944, 1.774, 0.190]),
}


@pytest.fixture(params=REFERENCE)
def trained(request, of_mini):
    """(model, text, result, its reference values) of a trained model beside the null of seed 0."""
    if request.param == "mini":
        model, text, found = (*(request.getfixturevalue(name) for name in ("mini", "alice")), of_mini)
    else:
        model, text = (request.getfixturevalue(name) for name in ("stories", "tinystories"))
        found = Coupling()(model, text, length=64, n_prompts=1, progress=False)
    return model, text, found, REFERENCE[request.param]


def test_trained_models_have_the_reference_values_beside_their_random_inits(trained):
    """Reference values of straightness and growth that leave the last block's output out are found without it."""
    model, text, result, (couplings, whole, without_last) = trained
    coupling = result.numbers("coupling")
    assert (coupling.value, coupling.inits[0]) == pytest.approx(couplings, abs=0.0015)
    assert float(result.numbers("chance")) == pytest.approx(coupling.inits[0], abs=0.01)
    assert result.null.attrs["model"] == "random init (seed 0)"
    tokens = prompts_of_one_length(model, text, 64, 1)[0]
    streams = [residual_streams(one, tokens)[:, -1] for one in (model, random_like(model, 0))]
    for of, expected in ((streams, whole), ([x[:-1] for x in streams], without_last)):
        found = [float(measure(x)) for x in of for measure in (line_shape_score, expodistance)]
        assert found == pytest.approx(expected, abs=0.005)


def test_the_map_is_the_formula_on_dense_jacobians(llama, prompts):
    found = (
        Coupling(k=(3,))(llama, prompts[:1], **WHOLE).trained["coupling"].isel(prompt=0).sel(k=3, layer=0, layer_2=1)
    )
    first, second = (j.dense() for j in residual_jacobians(llama, prompts[0], -1))
    u, _, vh = torch.linalg.svd(second)
    values = torch.diag(torch.linalg.svdvals(first)[:3])
    signed, swapped = u[:, :3].mT @ first @ vh[:3].mT, vh[:3] @ first @ u[:, :3]
    by_hand = {
        ("absolute", "aligned"): (signed.abs() - values).norm() / values.norm(),
        ("signed", "aligned"): (signed - values).norm() / values.norm(),
        ("trace", "aligned"): (signed.abs() - values).norm() / values.sum(),
        ("absolute", "swapped"): (swapped.abs() - values).norm() / values.norm(),
    }
    for (version, bases), expected in by_hand.items():
        assert float(found.sel(version=version, bases=bases)) == pytest.approx(1 - expected.item(), abs=1e-5)


def test_intervals_are_over_prompts_and_the_mean_is_that_over_pairs_of_different_layers(result):
    for k in (2, 5):
        square = result.trained["coupling"].sel(k=k, version="absolute", bases="aligned")
        number = result.numbers("coupling", k=k)
        assert number.low < number.value < number.high
        assert number.value == pytest.approx(square.values[:, ~np.eye(2, dtype=bool)].mean())
        assert np.isnan(np.diagonal(square.values, axis1=1, axis2=2)).all()


def test_linearisation_is_the_product_of_all_blocks(llama, prompts, result):
    streams = residual_streams(llama, prompts[0])
    x = streams[0, -1]
    for jacobian in residual_jacobians(llama, prompts[0], -1):
        x = (torch.eye(len(x)) + jacobian.dense()) @ x
    expected = torch.nn.functional.cosine_similarity(x, streams[-1, -1], dim=0)
    assert result.trained["linearisation"].sel(prompt=0, token=19).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_subset_of_layers_is_labelled_with_their_numbers(llama, prompts):
    found = Coupling(k=(2,))(llama, prompts[:1], layers=[1], **WHOLE)
    assert found.trained["layer"].values.tolist() == [1]
    assert "linearisation" not in found.trained
    assert not found.numbers("coupling")
    assert found.kinds == ["trajectories", "growth"]
    assert "coupling over pairs of layers is not defined" in found.findings()[0]
    assert len(found.findings()) == 2  # nothing of a linearisation
    assert "linearisation" not in found.table()


def test_the_first_token_is_in_no_path_and_the_growth_line_is_fitted_to_the_mean_log_norm(result):
    paths = result.trained["trajectory"]
    assert paths.sel(position=0).isnull().all()
    assert paths.sel(position=slice(1, None)).notnull().all()
    curve, line, first = result.trained["log_norm"].sel(prompt=0).transpose("curve", "state")
    np.testing.assert_allclose(line, np.polyval(np.polyfit(curve.state, curve, 1), curve.state))
    assert not np.allclose(first, curve)


def test_matrix_free_and_dense_routes_give_the_same_map(llama, prompts):
    free, dense = (Coupling(k=(4,), dense_up_to=size)(llama, prompts[:1], **WHOLE).trained for size in (0, 64))
    np.testing.assert_allclose(free["coupling"], dense["coupling"], atol=1e-3)
    np.testing.assert_allclose(free["chance"], dense["chance"], atol=1e-5)


@pytest.mark.slow
def test_a_hooked_model_and_a_bridge_have_the_same_coupling(mini, mini_bridge, alice):
    hooked, bridge = (Coupling()(one, alice, length=32, n_prompts=1, progress=False) for one in (mini, mini_bridge))
    if hooked.provenance["backend"] != "hooked":
        pytest.skip("this TransformerLens has no HookedTransformer")
    for one, other in ((hooked.trained, bridge.trained), (hooked.null, bridge.null)):
        for name in ("coupling", "line_shape_score", "linearisation"):
            np.testing.assert_allclose(one[name], other[name], atol=2e-3, err_msg=name)
