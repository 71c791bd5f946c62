"""The mean-key measure on real models."""

import numpy as np
import pytest

from tl_posgen.position.decomposition import mean_key
from tl_posgen.position.decomposition.mean_key_split import mean_key_r


@pytest.fixture(scope="module")
def result(report):
    return report["mean_key"]


def test_r_is_that_of_q_and_k_before_rope(capture, collected):
    found = collected(mean_key, capture, d0=7, distances=(0, 2.5)).squeeze("layer")
    geometry = capture.geometry
    assert found["d0"].values.tolist() == [0, 2.5, 7]
    fit = mean_key_r(capture.q, capture.k, geometry.rope, geometry.scale, [0, 2.5, 7])
    np.testing.assert_allclose(found["r_by_distance"].transpose("d0", "head"), fit.r, atol=1e-6)
    for one, suffix in ((fit, ""), (fit.without_first_token, "_without_first_token")):
        np.testing.assert_allclose(found[f"mean_key_r{suffix}"], one.r[2], atol=1e-6)
        np.testing.assert_allclose(found[f"mean_key_r_within_rows{suffix}"], one.r_within_rows[2], atol=1e-6)


def test_the_headline_is_the_curve_at_d0(result):
    data = result.dataset
    np.testing.assert_array_equal(data["mean_key_r"], data["r_by_distance"].sel(d0=1000))
    np.testing.assert_array_equal(data["mean_key_r_within_rows"], data["r_within_rows_by_distance"].sel(d0=1000))


def test_the_map_shows_the_headline_and_names_its_distance(result):
    figure = result.plot("map")
    np.testing.assert_array_equal(figure.data[0].z, result.dataset["mean_key_r"])
    np.testing.assert_array_equal(figure.data[3].z, result.null["mean_key_r_without_first_token"])
    assert "d0 = 1000 " in figure.layout.title.text


def test_curves_reach_every_distance(result):
    trained = result.plot("curves").data[1]
    assert trained.x.tolist() == [1, 65, 1001]
    np.testing.assert_allclose(trained.y, result.dataset["r_by_distance"].sel(layer=0, head=0))


def test_the_sentence_names_the_distance(mini, prompts):
    said = mean_key(mini, prompts[:1], layers=[1], d0=8, null_seeds=(), progress=False).findings()
    assert said[0].startswith("The mean-key split at dummy distance 8 correlates with the scores at ")
