"""What biases of queries and keys make of position, on real models: against the scores, and with the biases at zero."""

import numpy as np
import pytest
import torch
from families import GROUPED, save_config, with_sizes
from rotated_heads import captures_of

import tl_posgen
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.position import BiasAblation, BiasPairs, Variance
from tl_posgen.position.decomposition.numbers.bias_pairs import PAIRS
from tl_posgen.rope.rotation import rotate

TOKENS = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(0))
QUIET = {"nulls": 0, "progress": False}
WITHOUT_FIRST = {"tokens": "without first"}


@pytest.fixture
def model(family_model, backend):
    """A tiny Qwen2 with grouped keys on either backend."""
    return family_model("qwen2", backend)


def test_the_scores_of_the_four_pairs_add_up_to_the_models_own(model):
    for capture in captures_of(model, TOKENS[:1], "inputs", "attn_scores"):
        rope, at, made = capture.geometry.rope, capture.positions, capture.projections
        sides = []
        for x, bias in zip((capture.q, capture.k), made.biases, strict=True):
            bias = bias[list(capture.heads), None].expand_as(x)
            sides.append({"bias": rotate(bias, at, rope), "rest": rotate(x - bias, at, rope)})
        of_pairs = [
            capture.geometry.scale * sides[0][query] @ sides[1][key].mT for query, key in (p.split("-") for p in PAIRS)
        ]
        seen = capture.geometry.visible(capture.length)
        found, expected = sum(of_pairs)[:, seen], capture.attn_scores[:, seen]
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        assert of_pairs[0].diagonal(-3, -2, -1).std(-1).max() < 1e-5  # biases alone know the distance alone


def test_shares_add_up_to_those_of_variance_and_the_rest_alone_is_the_layer_without_biases(model):
    report = tl_posgen.analyze(model, TOKENS, measures=["variance", "bias_pairs", "bias_ablation"], **QUIET)
    whole, pairs, ablated = (report[name].trained for name in ("variance", "bias_pairs", "bias_ablation"))
    for part in ("position", "content", "interaction"):
        np.testing.assert_allclose(pairs["share"].sel(part=part).sum("pair"), whole[part], rtol=1e-9)
        unchanged = ablated[part].sel(condition="unchanged")
        np.testing.assert_allclose(unchanged, whole[part].sel(WITHOUT_FIRST), rtol=1e-9)
    share, alone = (pairs[name].sel(WITHOUT_FIRST) for name in ("share", "alone"))
    assert abs(share.sel(pair="rest-bias", part=["content", "interaction"])).max() < 1e-12
    assert float(share.sel(pair="rest-rest", part="position").std()) > 0.001
    without = alone.sel(pair="rest-rest", layer=0)
    expected = without.sel(part="position") / without.sum("part")
    found = ablated["position"].sel(condition="no_biases", layer=0)  # layer 0 reads the same inputs
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found - ablated["position"].sel(condition="unchanged", layer=0)).max() > 1e-3


def test_a_random_init_whose_biases_are_zero_has_its_rest_alone_and_loses_nothing(family_model):
    how = {**QUIET, "nulls": 1}
    report = tl_posgen.analyze(family_model("qwen2"), TOKENS, measures=["bias_pairs", "bias_ablation"], **how)
    pairs, ablated = (report[name].null for name in ("bias_pairs", "bias_ablation"))
    assert not pairs["share"].drop_sel(pair="rest-rest").any()
    assert float(pairs["share"].sel(WITHOUT_FIRST).sum(("pair", "part")).min()) == pytest.approx(1)
    assert not (ablated["loss"] - ablated["loss"].sel(condition="unchanged")).any()
    assert report["bias_ablation"].trained["loss"].std("condition").min() > 1e-3


@pytest.mark.parametrize("measure", [BiasPairs(), BiasAblation()])
def test_models_without_biases_and_with_a_norm_behind_them_are_refused_before_a_pass(
    family_model, backend, tmp_path, monkeypatch, measure
):
    plain, normed = family_model("llama", backend), family_model("qwen3", backend)
    monkeypatch.setattr("tl_posgen.core.feed.run_capture", None)
    for model in (plain, normed):
        with pytest.raises(UnsupportedModelError, match="no layer of this model has biases of queries or keys"):
            measure(model, TOKENS, **QUIET)
    if backend == "bridge":  # TransformerLens drops them in a HookedTransformer
        config = with_sizes("Qwen3Config", GROUPED, head_dim=8, attention_bias=True)()
        biased = tl_posgen.load_model(save_config(config, tmp_path), backend=backend)
        with pytest.raises(UnsupportedModelError, match="layer 0: a norm or clipping follows the biases"):
            measure(biased, TOKENS, **QUIET)


def test_in_partial_rotary_heads_biases_alone_are_those_of_the_turning_planes(family_model):
    """A joint matrix of queries, keys and values, and half of each head that does not turn."""
    model = family_model("neox", "bridge")
    pairs = BiasPairs()(model, TOKENS, **QUIET).sel(**WITHOUT_FIRST)
    whole = Variance()(model, TOKENS, **QUIET).sel(**WITHOUT_FIRST)
    np.testing.assert_allclose(pairs["share"].sel(part="position").sum("pair"), whole["position"], rtol=1e-9)
    assert float(pairs["alone"].sel(pair="bias-bias", part="position").min()) > 0
