"""The variance measure: moments over prompts, and what the figures draw."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of

from tl_posgen.position.decomposition import Variance
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares

OUT = {"tokens": "without first"}


@pytest.fixture(scope="module")
def result(report):
    return report["variance"]


def test_parts_are_shares_of_what_softmax_sees(result):
    data = result.own
    share = {str(part): data["share"].sel(part=part) for part in data["part"].values}
    seen = 1 - share["q"]
    np.testing.assert_allclose(data["position"], (share["d"] + share["qd"]) / seen)
    np.testing.assert_allclose(data["content"], (share["k"] + share["qk"]) / seen)
    np.testing.assert_allclose(data["interaction"], (share["kd"] + share["qkd"]) / seen)
    np.testing.assert_allclose(data["additive_r"], np.sqrt(1 - share["kd"] - share["qkd"]))
    np.testing.assert_allclose(data["three_axis_share"], share["q"] + share["k"] + share["d"])


@pytest.mark.parametrize(("tokens", "first"), [("all", 0), ("without first", 1)])
def test_shares_are_those_of_all_tokens_of_all_prompts(mini, prompts, result, tokens, first):
    kept = captures_of(mini, prompts, layers=[2])
    geometry = kept[0].geometry
    q, k = (torch.cat([getattr(one, name)[:, first:] for one in kept], 1).double() for name in "qk")
    moments = TripleMoments.from_qk(q, k, geometry.rope)
    expected = variance_shares(moments, geometry.rope, geometry.scale, 64)
    found = result.sel(tokens=tokens, layer=2)
    np.testing.assert_allclose(found["share"].transpose("head", "part"), expected.shares, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["variance"], expected.total, rtol=1e-5)
    np.testing.assert_allclose(found["mean_energy"].sel(side="k"), moments.k.mean_energy, rtol=1e-5)


def test_distances_and_weights_are_those_asked_for(capture, collected):
    few = collected(Variance(n_distances=5, weights="causal"), capture)
    geometry = capture.geometry
    moments = TripleMoments.from_qk(capture.q, capture.k, geometry.rope, first_token=False)
    expected = variance_shares(moments, geometry.rope, geometry.scale, 5, weights="causal")
    np.testing.assert_allclose(few["share"].sel(OUT | {"part": "d"}).squeeze("layer"), expected.share("d"))


def test_the_atlas_has_a_point_a_head_between_position_content_and_interaction(result):
    _, null, trained = result.plot("atlas").data
    assert (trained.name, null.name) == ("mini", "random init (seed 0)")
    for corner, part in zip("abc", ("position", "content", "interaction"), strict=True):
        np.testing.assert_array_equal(getattr(trained, corner), result.own[part].sel(OUT).values.ravel())
        np.testing.assert_array_equal(getattr(null, corner), result.null[part].sel(OUT).values.ravel())
    assert trained.text[7] == "L1H3"
    np.testing.assert_array_equal(trained.marker.color, np.repeat(range(4), 4))


def test_bars_and_maps_show_the_shares_of_every_head(result):
    bars, maps = result.plot("shares").data, result.plot("map").data
    assert [bar.name for bar in bars[:7]] == ["q", "k", "q k", "d", "q d", "k d", "q k d"]
    assert bars[0].x[5] == "L1H1"
    np.testing.assert_array_equal(bars[2].y, result.own["share"].sel(OUT | {"part": "qk"}).values.ravel())
    np.testing.assert_array_equal(bars[13].y, result.null["share"].sel(OUT | {"part": "qkd"}).values.ravel())
    np.testing.assert_array_equal(maps[0].z, result.own["additive_r"].sel(OUT))
    np.testing.assert_array_equal(maps[2].z, result.own["content"].sel(OUT))
    np.testing.assert_array_equal(maps[7].z, result.null["interaction"].sel(OUT))
    np.testing.assert_array_equal(maps[9].z, result.sides["shuffled"]["position"].sel(OUT))


def test_sizes_are_those_of_the_shares_that_softmax_sees(result):
    for data in result.sides.values():
        size = data["size"].sel(OUT)
        seen = data["variance"].sel(OUT) * (1 - data["share"].sel(OUT | {"part": "q"}, drop=True))
        np.testing.assert_allclose(size.sel(of="scores"), seen**0.5, rtol=1e-9)
        for part in ("position", "content", "interaction"):
            np.testing.assert_allclose(size.sel(of=part), (seen * data[part].sel(OUT)) ** 0.5, rtol=1e-9, atol=1e-12)


def test_the_figure_by_layer_has_means_over_heads_beside_both_nulls(result):
    traces = {trace.name: trace for trace in result.plot("depth").data}
    data = result.dataset["additive_r"].sel(OUT | {"group": "all"}).mean("head")
    expected = {"": data.sel(init="trained"), ", random init": data.sel(init=["0", "1"]).mean("init")}
    expected[", shuffled"] = data.sel(init="shuffled 0")
    for words, dash in zip(expected, ("solid", "dash", "dot"), strict=True):
        trace = traces[f"position + content{words}"]
        np.testing.assert_allclose(trace.y, expected[words])
        assert trace.line.dash == dash


def test_two_tokens_say_nothing_of_what_varies(mini):
    result = Variance()(mini, torch.tensor([[3, 4]]), null_seeds=(), progress=False)
    assert result.own["position"].isnull().all()
    assert "one token besides the first says nothing" in result.findings()[-1]
