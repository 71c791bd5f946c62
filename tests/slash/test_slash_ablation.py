"""Slash scores of one layer with its own Q, K or RoPE ablated."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of

from tl_posgen.models.layers.capture import scores_from
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rope.frequency_bands import bands_by_thirds, bands_by_wavelength
from tl_posgen.slash import SlashAblation
from tl_posgen.slash.numbers.ablations import ablate
from tl_posgen.slash.numbers.slash_scores import slash_statistics

MEASURE = "slash_ablation"

pytestmark = pytest.mark.longer

QUIET = {"nulls": 0, "progress": False}


def test_unchanged_is_the_model_and_means_without_rope_are_uniform(report, result):
    data, slash = result.sel(tokens="all"), report["slash"].sel(tokens="all")
    assert data["distance"].values.tolist() == slash["short_distance"].values.tolist()
    near = slash["score"].sel(distance=data["distance"])
    np.testing.assert_allclose(data.score.sel(condition="unchanged"), near, atol=1e-6)
    np.testing.assert_allclose(data.slash_score.sel(condition="unchanged"), slash["slash_score"], atol=1e-6)
    np.testing.assert_allclose(data.slash_score.sel(condition="means_no_rope"), data.best_uniform, atol=1e-5)


def test_a_condition_is_attention_from_ablated_q_and_k_whose_bands_by_wavelength_end_at_each_prompts_length(mini):
    words = ["Down, down, down.", "Would the fall never come to an end? I wonder how many miles I have fallen by now."]
    result = SlashAblation()(mini, words, **QUIET).sel(tokens="all", layer=1)
    layers = captures_of(mini, to_prompts(mini, words), layers=[1])
    bands = {
        "rank_one": lambda rope, n: None,
        "drop medium, thirds": lambda rope, n: bands_by_thirds(16)[1],
        "keep high, thirds": lambda rope, n: bands_by_thirds(16)[0],
        "drop low, wavelength": lambda rope, n: bands_by_wavelength(rope, n)[2],
    }
    for label, band_of in bands.items():
        scores = []
        for one in layers:
            rope = one.geometry.rope
            q, k = ablate(one.q, one.k, rope, label.split()[0], band_of(rope, one.length))
            scores.append(slash_statistics(scores_from(q, k, one.geometry, one.heads).softmax(-1)).score[0])
        means = sum(one[:, :5] for one in scores) / 2
        np.testing.assert_allclose(result.score.sel(condition=label), means, atol=1e-6)


def test_a_slash_is_lost_without_rope_and_survives_the_means(trained):
    model, text = trained
    frame = SlashAblation(schemes=[])(model, text, length=192, n_prompts=1, **QUIET).frame()
    by_kind = frame.pivot_table(index=["layer", "head"], columns="condition", values="slash_score")
    strongest = by_kind.nlargest(2, "unchanged")
    assert (strongest["no_rope"] < strongest["unchanged"] / 3).all()
    assert (strongest["means"] > strongest["unchanged"] / 3).all()


def test_without_rotary_planes_ablations_of_rope_are_left_out_and_said_to_be(family_model):
    result = SlashAblation()(family_model("gpt2", "bridge"), torch.arange(2, 42)[None], **QUIET)
    assert result.trained["condition"].values.tolist() == ["unchanged", "rank_one", "means"]
    assert "ablations of RoPE mean nothing and are left out" in result.findings()[-1]


def test_without_rotary_planes_the_slash_is_lost_with_the_content_of_q_and_k(learned_positions, tinystories):
    data = SlashAblation()(learned_positions, tinystories, length=96, n_prompts=1, **QUIET).trained
    assert data["condition"].values.tolist() == ["unchanged", "rank_one", "means"]
    layer, head = data["slash_score"].sel(condition="unchanged").to_series().idxmax()
    strongest = data.sel(layer=layer, head=head)
    assert float(strongest.slash_score.sel(condition="unchanged")) > 0.3
    at_means = float(strongest.slash_score.sel(condition="means"))
    assert at_means == pytest.approx(float(strongest.best_uniform), abs=1e-4)


def test_slopes_of_alibi_stay(family_model):
    model = family_model("bloom", "bridge")
    tokens = torch.arange(2, 42)[None]
    data = SlashAblation(distances=(0, 1, 5))(model, tokens, heads=[(1, 2)], **QUIET).sel(tokens="all", layer=1, head=2)
    [layer] = captures_of(model, tokens, heads=(1, 2))
    slope = float(layer.geometry.alibi_slopes[2])
    distance = (torch.arange(40)[:, None] - torch.arange(40)).double()
    pattern = (-slope * distance).masked_fill(distance < 0, -torch.inf).softmax(-1)
    for at in (0, 1, 5):
        expected = float(pattern.diagonal(-at).mean())
        assert float(data.score.sel(condition="means", distance=at)) == pytest.approx(expected, abs=1e-5)
