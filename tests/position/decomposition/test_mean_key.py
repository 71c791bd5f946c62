"""The mean-key measure on real models."""

import numpy as np
import pytest

from tl_posgen.position.decomposition import MeanKey
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_r


@pytest.fixture(scope="module")
def result(report):
    return report["mean_key"]


def test_r_is_that_of_q_and_k_before_rope(capture, collected):
    found = collected(MeanKey(d0=7, distances=(0, 2.5)), capture).squeeze("layer")
    geometry = capture.geometry
    assert found["d0"].values.tolist() == [0, 2.5, 7]
    both = mean_key_r(capture.q, capture.k, geometry.rope, geometry.scale, [0, 2.5, 7])
    for name, expected in zip(("r", "r_within_rows"), both, strict=True):
        np.testing.assert_allclose(found[name].transpose("tokens", "d0", "head"), expected, atol=1e-6)


def test_maps_are_at_the_headline_distance_and_curves_reach_every_one(result):
    figure = result.plot("map")
    np.testing.assert_array_equal(figure.data[0].z, result.own["r"].sel(tokens="all", d0=63))
    np.testing.assert_array_equal(figure.data[3].z, result.null["r"].sel(tokens="without first", d0=63))
    assert "d0 = 63 " in figure.layout.title.text
    trained = result.plot("curves").data[0]
    assert list(trained.x) == [0, 63, 64]
    np.testing.assert_allclose(trained.y, result.sel(tokens="all")["r"].mean(("layer", "head")))


def test_the_headline_is_the_largest_distance_that_the_prompts_and_every_window_allow(mini, prompts):
    assert MeanKey().prepare(mini, list(prompts)).d0 == prompts.shape[1] - 1
    assert MeanKey(d0=7).prepare(mini, list(prompts)).d0 == 7


def test_the_sentence_names_the_distance(mini, prompts):
    found = MeanKey(d0=8)(mini, prompts[:1], layers=[1], null_seeds=(), progress=False).findings()
    assert "plus content as at distance 8, correlates with the scores at 0." in found[0]
