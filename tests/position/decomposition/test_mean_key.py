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


def test_the_headline_is_the_largest_distance_that_the_prompts_and_every_window_allow(mini, prompts):
    assert MeanKey().prepare(mini, list(prompts)).d0 == prompts.shape[1] - 1
    assert MeanKey(d0=7).prepare(mini, list(prompts)).d0 == 7
