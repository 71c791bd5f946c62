"""Slash scores of biases alone, against attention of queries and keys that are their biases and nothing else."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of

import tl_posgen
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.rope.rotation import rotate
from tl_posgen.slash import SlashBiases
from tl_posgen.stats.correlations import pearson

TOKENS = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(0))
QUIET = {"nulls": 0, "progress": False}


@pytest.mark.parametrize("first", [0, 1])
def test_scores_are_those_of_the_softmax_of_biases_alone(family_model, backend, first):
    model = family_model("qwen2", backend)
    data = SlashBiases()(model, TOKENS, **QUIET).sel(tokens=["all", "without first"][first])
    n = TOKENS.shape[1] - first
    for capture in captures_of(model, TOKENS[:1], "inputs"):
        at, rope = torch.arange(n), capture.geometry.rope
        q, k = (rotate(bias.double()[:, None].expand(-1, n, -1), at, rope) for bias in capture.projections.biases)
        scores = capture.geometry.scale * q @ k.mT
        pattern = scores.masked_fill(~capture.geometry.visible(n), -torch.inf).softmax(-1)
        for distance in (0, 1, 7, n - 1):
            found = data["alone"].sel(layer=capture.layer, distance=distance)
            np.testing.assert_allclose(found, pattern.diagonal(-distance, -2, -1).mean(-1), rtol=1e-6)


def test_agreement_is_over_heads_and_no_less_is_counted(family_model):
    model = family_model("qwen2")
    result = SlashBiases(kappa=0.14)(model, TOKENS, **QUIET)
    own, data = result.numbers, result.sel(tokens="all")
    slash = tl_posgen.analyze(model, TOKENS, measures="slash", **QUIET)["slash"].trained.sel(tokens="all")
    np.testing.assert_allclose(data["score"], slash["score"], atol=1e-6)
    alone, score = (torch.tensor(data[name].sel(distance=2).values.ravel()) for name in ("alone", "score"))
    assert result.measure.correlation(own, 2).value == pytest.approx(float(pearson(alone, score)))
    both = (data["dominant"] > 0) & (data["dominant_alone"] > 0)
    counted = result.measure.n_dominant(own, "dominant", "dominant_alone", distance=2)
    assert counted.value == int(both.sel(short_distance=2).sum())


def test_by_the_zero_biases_of_a_random_init_attention_is_uniform_and_a_llama_is_refused(family_model):
    result = SlashBiases()(family_model("qwen2"), TOKENS, **QUIET | {"nulls": 1})
    np.testing.assert_allclose(result.null["alone"].isel(head=0), result.null["uniform"], rtol=1e-9)
    with pytest.raises(UnsupportedModelError, match="no layer of this model has biases"):
        SlashBiases()(family_model("llama"), TOKENS, **QUIET)


def test_it_is_left_out_without_a_word_where_there_are_no_biases(mini, alice, capsys):
    measures, cut = ["slash", "slash_biases"], {"length": 16, "n_prompts": 1, **QUIET}
    report = tl_posgen.analyze(mini, alice, measures=measures, skip_unsupported=True, **cut)
    assert list(report) == ["slash"]
    assert "left out" not in capsys.readouterr().err
