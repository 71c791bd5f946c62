"""The slash analyzer on real models."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.analysis import Feed
from tl_posgen.analyzers.slash import Slash
from tl_posgen.errors import InputError
from tl_posgen.maths.slash import uniform_baseline
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text, to_prompts

OPTIONS = {"length": 112, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return tl_posgen.analyze(mini, bundled_text(), analyzers=["slash"], **OPTIONS)["slash"]


@pytest.fixture(scope="module")
def captures(mini):
    """[prompt][layer] captures of the same prompts."""
    kept = []
    for tokens in to_prompts(mini, bundled_text(), length=112, n_prompts=2):
        run_capture(mini, tokens[None], kept.append, frozenset({"pattern"}))
    return [kept[:4], kept[4:]]


def test_scores_are_mean_diagonals_of_the_pattern_over_prompts(result, captures):
    for layer in range(4):
        patterns = torch.stack([prompt[layer].pattern for prompt in captures]).double()
        for distance in (0, 1, 5, 111):
            diagonal = patterns.diagonal(-distance, -2, -1).mean(-1).mean(0)
            np.testing.assert_allclose(result.dataset.score.sel(layer=layer, distance=distance), diagonal, atol=1e-6)


def test_the_attention_distance_and_first_token_are_those_of_the_pattern(result, captures):
    pattern = torch.stack([prompt[2].pattern for prompt in captures]).double()
    distance = (torch.arange(112)[:, None] - torch.arange(112)).clamp(min=0)
    expected = (pattern * distance).sum(-1).mean((0, 2))
    np.testing.assert_allclose(result.dataset.attention_distance.sel(layer=2), expected, rtol=1e-5)
    np.testing.assert_allclose(result.dataset.first_token.sel(layer=2), pattern[..., 0].mean((0, 2)), rtol=1e-5)


def test_the_spectrum_is_that_of_queries_before_rope(result, captures):
    values = torch.stack([torch.linalg.svdvals(prompt[1].q.double()) for prompt in captures]) ** 2
    share = values.cumsum(-1) / values.sum(-1, keepdim=True)
    np.testing.assert_allclose(result.dataset.r1_q.sel(layer=1), share[..., 0].mean(0), rtol=1e-6)
    np.testing.assert_allclose(result.dataset.rank95_q.sel(layer=1), (share < 0.95).sum(-1).double().mean(0) + 1)


def test_the_best_distance_is_where_the_score_is_highest_in_the_first_half(result):
    data = result.dataset
    np.testing.assert_allclose(data.best_score, data.score.isel(distance=slice(56)).max("distance"))
    np.testing.assert_allclose(data.best_score, data.score.sel(distance=data.best_distance))
    np.testing.assert_allclose(data.best_ratio, data.best_score / data.baseline.sel(distance=data.best_distance))
    np.testing.assert_allclose(data.baseline[0], uniform_baseline(112))


def test_dominant_heads_reach_kappa_and_the_columns_count_them(mini):
    analyzer = Slash(kappa=0.3, distances=[0, 1, 500], kappa_long=0.012)
    report = tl_posgen.analyze(mini, bundled_text(), analyzers=[analyzer], null_seed=None, **OPTIONS)
    data = report["slash"].dataset
    assert data.short_distance.values.tolist() == [0, 1]
    xr.testing.assert_equal(
        data.dominant.drop_vars("short_distance"),
        (data.score.sel(distance=[0, 1]) >= 0.3)
        .rename(distance="short_distance")
        .drop_vars("short_distance")
        .rename("dominant"),
    )
    assert 0 < int(data.dominant.sum()) < data.dominant.size
    long = (data.score.sel(distance=slice(50, 56)) >= 0.012).sum("distance")
    np.testing.assert_array_equal(data.n_long, long)


def test_the_trained_model_has_stronger_slashes_than_its_null(result):
    assert result.dataset.best_ratio.max() > 2 * result.null.best_ratio.max()


def test_the_frame_has_a_row_a_head_and_it_comes_back_from_disk(result, tmp_path):
    frame = result.frame()
    assert len(frame) == 16
    expected = {"best_distance", "best_score", "previous_token", "r1_q", "rank95_k", "entropy_without_first"}
    assert expected <= set(frame.columns)
    loaded = tl_posgen.load(result.save(tmp_path / "slash.nc"))["slash"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)


def test_prompts_of_different_lengths_and_very_short_ones_work(mini):
    feed = Feed([Slash()])
    for n in (2, 60):
        feed.first_prompt = len(feed.prompts)
        run_capture(mini, torch.arange(n)[None] + 300, feed, feed.needs)
    data = feed.datasets("mini")["slash"]
    assert data.sizes["distance"] == 60
    assert np.isfinite(data.score).all()
    alone = tl_posgen.analyze(mini, torch.arange(60)[None] + 300, analyzers=["slash"], null_seed=None, progress=False)
    np.testing.assert_allclose(data.score[..., 2:], alone["slash"].dataset.score[..., 2:])
    pair = tl_posgen.analyze(mini, torch.tensor([[5, 9]]), analyzers=["slash"], null_seed=None, progress=False)
    assert pair["slash"].dataset.sizes["distance"] == 2


@pytest.mark.parametrize("wrong", [{"kappa": 0.0}, {"kappa_long": 1.5}, {"distances": ()}, {"distances": (-1, 2)}])
def test_settings_that_find_nothing_are_refused(wrong):
    with pytest.raises(InputError):
        Slash(**wrong)
