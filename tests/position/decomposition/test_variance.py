"""The variance measure: moments over prompts, and what the figures draw."""

import numpy as np
import pytest
import torch

from tl_posgen.analysis import analyze
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.position.decomposition import Variance, variance
from tl_posgen.position.decomposition.variance_shares import COMPONENTS, TripleMoments, variance_shares

SHARES = [f"share_{name}" for name in COMPONENTS]


@pytest.fixture(scope="module")
def result(report):
    return report["variance"]


def test_shares_sum_to_one(result):
    np.testing.assert_allclose(result.frame()[SHARES].sum(axis=1), 1, atol=1e-6)
    kept = [f"{share}_with_first_token" for share in SHARES]
    np.testing.assert_allclose(result.frame()[kept].sum(axis=1), 1, atol=1e-6)


def test_parts_are_shares_of_what_softmax_sees(result):
    data = result.dataset
    seen = 1 - data["share_q"]
    np.testing.assert_allclose(data["position"], (data["share_d"] + data["share_qd"]) / seen)
    np.testing.assert_allclose(data["content"], (data["share_k"] + data["share_qk"]) / seen)
    np.testing.assert_allclose(data["interaction"], (data["share_kd"] + data["share_qkd"]) / seen)
    np.testing.assert_allclose(data["additive_r"], np.sqrt(1 - data["share_kd"] - data["share_qkd"]))


def test_heads_are_ranked_by_position_unless_said_otherwise(result):
    ranked = result.heads(top=3)
    assert ranked.columns.tolist() == ["layer", "head", "position"]
    assert ranked["position"].iloc[0] == float(result.dataset["position"].max())


def test_shares_are_those_of_all_tokens_of_all_prompts(mini, prompts, result):
    kept = []
    for tokens in prompts:
        run_capture(mini, tokens[None], kept.append, layers=[2])
    geometry = kept[0].geometry
    q, k = (torch.cat([getattr(one, name)[:, 1:] for one in kept], 1).double() for name in "qk")
    found = variance_shares(TripleMoments.from_qk(q, k, geometry.rope), geometry.rope, geometry.scale, 64)
    np.testing.assert_allclose(result.dataset["share_kd"].sel(layer=2), found.share("kd"), rtol=1e-5)
    np.testing.assert_allclose(result.dataset["variance"].sel(layer=2), found.total, rtol=1e-5)


def test_distances_and_weights_are_those_asked_for(capture, collected):
    few = collected(variance, capture, n_distances=5, weights="causal")
    geometry = capture.geometry
    moments = TripleMoments.from_qk(capture.q, capture.k, geometry.rope, first_token=False)
    expected = variance_shares(moments, geometry.rope, geometry.scale, 5, weights="causal")
    np.testing.assert_allclose(few["share_d"].squeeze("layer"), expected.share("d"))


def test_options_used_for_a_second_model_start_afresh(mini, prompts):
    """One options object, two analyses: the first one's moments are not in the second's."""
    options = Variance()
    first, second = (
        analyze(mini, part, measures=[options], layers=[1], null_seeds=(), progress=False)["variance"].dataset
        for part in (prompts[:1], prompts[1:2])
    )
    alone = variance(mini, prompts[1:2], layers=[1], null_seeds=(), progress=False).dataset
    np.testing.assert_array_equal(second["variance"], alone["variance"])
    assert not np.allclose(first["variance"], second["variance"])


def test_the_atlas_has_a_point_a_head_between_position_content_and_interaction(result):
    null, trained = result.plot("atlas").data
    assert (trained.name, null.name) == ("mini", "random init (seed 0)")
    for corner, part in zip("abc", ("position", "content", "interaction"), strict=True):
        np.testing.assert_array_equal(getattr(trained, corner), result.dataset[part].values.ravel())
        np.testing.assert_array_equal(getattr(null, corner), result.null[part].values.ravel())
    assert trained.text[7] == "layer 1 head 3"
    np.testing.assert_array_equal(trained.marker.color, np.repeat(range(4), 4))


def test_bars_stack_the_seven_shares_of_every_head(result):
    figure = result.plot("shares")
    bars = figure.data
    assert [bar.name for bar in bars[:7]] == ["q", "k", "q k", "d", "q d", "k d", "q k d"]
    np.testing.assert_array_equal(bars[2].y, result.dataset["share_qk"].values.ravel())
    np.testing.assert_array_equal(bars[13].y, result.null["share_qkd"].values.ravel())
    assert bars[0].x[5] == "L1H1"
    assert figure.layout.barmode == "stack"


def test_the_map_shows_the_three_parts(result):
    maps = result.plot("map").data
    np.testing.assert_array_equal(maps[1].z, result.dataset["content"])
    np.testing.assert_array_equal(maps[5].z, result.null["interaction"])
