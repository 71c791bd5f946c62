"""Slash scores on real models."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import Slash, SlashTransfer, slash_heads
from tl_posgen.slash.numbers.slash_scores import uniform_scores

pytestmark = pytest.mark.longer

CUT = {"length": 64, "n_prompts": 2}


@pytest.fixture(scope="module")
def result(report):
    return report["slash"]


@pytest.fixture(scope="module")
def data(result):
    """Of all tokens."""
    return result.sel(tokens="all")


def test_maps_are_of_different_numbers_on_a_scale_of_their_own(result, data):
    maps = result.plot("map")
    values = [np.asarray(one.z, float) for one in maps.data]
    assert not any(np.array_equal(one, other) for one, other in pairwise(values))
    assert maps.layout.coloraxis.cmax == max(map(np.nanmax, values)) < 1


@pytest.fixture(scope="module")
def captures(mini, alice, captured):
    """[prompt][layer] captures of the same prompts."""
    return [captured(mini, tokens, "pattern") for tokens in to_prompts(mini, alice, **CUT)]


def test_scores_are_mean_diagonals_of_the_pattern_over_prompts(data, captures):
    for layer in range(4):
        patterns = torch.stack([prompt[layer].pattern for prompt in captures]).double()
        for distance in (0, 1, 5, 63):
            diagonal = patterns.diagonal(-distance, -2, -1).mean(-1).mean(0)
            np.testing.assert_allclose(data.score.sel(layer=layer, distance=distance), diagonal, atol=1e-6)


def test_the_attention_distance_and_first_token_are_those_of_the_pattern(data, captures):
    pattern = torch.stack([prompt[2].pattern for prompt in captures]).double()
    distance = (torch.arange(64)[:, None] - torch.arange(64)).clamp(min=0)
    expected = (pattern * distance).sum(-1).mean((0, 2))
    np.testing.assert_allclose(data.attention_distance.sel(layer=2), expected, rtol=1e-5)
    np.testing.assert_allclose(data.first_token.sel(layer=2), pattern[..., 0].mean((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("side", ["q", "k"])
def test_the_spectrum_is_that_of_queries_and_keys_before_rope(data, captures, side):
    values = torch.stack([torch.linalg.svdvals(getattr(prompt[1], side).double()) for prompt in captures]) ** 2
    r1 = (values[..., 0] / values.sum(-1)).mean(0)
    np.testing.assert_allclose(data.sel(layer=1, side=side).r1, r1, rtol=1e-6)


def test_the_best_distance_is_where_the_score_is_highest_in_the_first_half(data):
    np.testing.assert_allclose(data.best_score, data.score.isel(distance=slice(32)).max("distance"))
    np.testing.assert_allclose(data.best_score, data.score.sel(distance=data.best_distance))
    np.testing.assert_allclose(data.best_uniform, data.uniform.sel(distance=data.best_distance))
    np.testing.assert_allclose(data.uniform[0], uniform_scores(64))
    assert data.best_distance.dtype.kind == "i"


def test_the_best_heads_stand_with_their_distances(result, data):
    heads = result.heads(3)
    assert heads.columns.tolist() == ["layer", "head", "best_score", "best_distance"]
    for row in heads.to_dict("records"):
        own = data.sel(layer=row["layer"], head=row["head"])
        assert float(own["score"].sel(distance=row["best_distance"])) == pytest.approx(row["best_score"])


def test_dominant_heads_reach_kappa(mini, alice):
    slash = Slash(kappa=0.3, distances=[1, 0, 500], kappa_long=0.0128)
    whole = slash(mini, alice, length=112, n_prompts=1, null_seeds=(), progress=False)  # long is 50 and more
    data = whole.sel(tokens="all")
    assert data.short_distance.values.tolist() == [0, 1]
    np.testing.assert_array_equal(data.dominant, data.score.sel(distance=[0, 1]) >= 0.3)
    assert 0 < int(data.dominant.sum()) < data.dominant.size
    long = data.sel(distance=slice(50, 56))
    assert 0 < int((long.uniform[0] < 0.0128).sum()) < long.sizes["distance"]
    for tokens in ("all", "without first"):
        far = whole.sel(tokens=tokens, distance=slice(50, 56))
        expected = far.score >= xr.where(far.uniform < 0.0128, 0.0128, 2 * far.uniform)
        n_long = whole.sel(tokens=tokens)["n_long"]
        np.testing.assert_array_equal(n_long, expected.sum("distance").transpose("layer", "head"))


def test_no_head_of_a_prompt_of_two_tokens_is_dominant_and_the_sentence_says_why(mini, alice):
    n = 2
    report = tl_posgen.analyze(
        mini, alice, measures=["slash", SlashTransfer(distances=[0])], length=n, n_prompts=2, progress=False
    )
    result = report["slash"]
    assert float(result.sel(tokens="all")["score"].max()) > 0.5
    assert not result.dataset["dominant"].any()
    transfer = report["slash_transfer"]
    assert not transfer.measure.n_dominant(transfer.numbers, 0, "natural").value
    assert slash_heads(report).empty
    (sentence,) = result.findings()
    distances = ", ".join(map(str, range(n)))
    assert sentence.startswith(f"Slash-dominant at any of the distances {distances}, with kappa = 0.1: 0 of 16 heads ")
    assert f"At D = {distances} uniform attention itself reaches kappa, as queries see few keys" in sentence
