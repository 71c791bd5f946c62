"""Sliding windows of one and two tokens: every measure of one pass says what can be said, and nothing else."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers
from drawn import normal, visible
from families import GROUPED, save_config
from rotated_heads import true_distances

import tl_posgen
from tl_posgen.slash.numbers.plane_contributions import score_of_profile

pytestmark = pytest.mark.slow

N = 16
FED = ["three_axis", "variance", "mean_key", "residual", "slash", "slash_planes"]


@pytest.fixture(scope="module")
def of_window(tmp_path_factory):
    """window -> every measure of a tiny Mistral with that window."""

    @cache
    def of(window):
        config = transformers.MistralConfig(**GROUPED, sliding_window=window)
        model = tl_posgen.load_model(save_config(config, tmp_path_factory.mktemp("window")), "bridge")
        prompts = torch.randint(2, 62, (1, N), generator=torch.Generator().manual_seed(0))
        return tl_posgen.analyze(model, prompts, measures=FED, nulls=0, progress=False)

    return of


def test_every_page_of_windows_of_one_and_two_is_made(of_window):
    for report in map(of_window, (1, 2)):
        assert "nan%" not in " ".join(report.findings())
        assert "nan" not in report.html().partition("<script")[0].lower().split()


@pytest.mark.parametrize("window", [1, 2])
def test_a_fit_of_as_many_parameters_as_pairs_leaves_nothing_that_can_be_told(window, of_window):
    report = of_window(window)
    data = report["residual"].dataset
    for name in ("share", "std", "top_share"):
        assert bool(data[name].isnull().all()), name
    assert "in 8 heads a window of 1 or 2 tokens leaves no more pairs" in " ".join(report["residual"].findings())
    assert bool(report["three_axis"].dataset["r"].isnull().all())
    assert f"a window of {window} leaves no more pairs" in report["three_axis"].findings()[0]


def test_of_a_single_key_softmax_sees_nothing_vary(of_window):
    alone = of_window(1)
    variance = alone["variance"]
    for part in ("position", "content", "interaction"):
        assert bool(variance.dataset[part].isnull().all())
    assert "in layer 0, 1 a token sees itself alone" in " ".join(variance.findings())
    assert bool(alone["mean_key"].dataset["r_within_rows"].isnull().all())
    planes = alone["slash_planes"].dataset
    for name in ("correlation", "chance_correlation"):
        assert bool(planes[name].isnull().all())
    assert bool(planes["contribution"].sel(at=["1", "4"]).isnull().all())
    assert bool((alone["slash"].dataset["score"].sel(distance=0) == 1).all())


def test_what_a_window_hides_is_in_no_lift_and_no_prediction(of_window):
    data = of_window(2)["slash_planes"].dataset
    assert bool(data["contribution"].sel(at=["2", "3", "4"]).isnull().all())
    assert bool(data["contribution"].sel(at=["0", "1", "best"]).notnull().all())
    for name in ("score", "predicted"):
        inside, outside = data[name].sel(distance=[0, 1]), data[name].sel(distance=slice(2, None))
        assert float(abs(outside.sel(tokens="all")).max()) == 0
        # both distances share all attention but that of the first token, whose row has one
        whole = inside.sel(tokens="all").isel(distance=0) * N + inside.sel(tokens="all").isel(distance=1) * (N - 1)
        np.testing.assert_allclose(whole, N, rtol=1e-5)


def test_the_score_of_a_profile_in_a_window_is_its_softmax():
    logit = normal(2, 9)
    for window in (1, 2, 5, None):
        pattern = logit[:, true_distances(9)].masked_fill(~visible(9, window), -torch.inf).softmax(-1)
        expected = torch.stack([pattern.diagonal(-d, 1, 2).mean(-1) for d in range(9)], -1)
        torch.testing.assert_close(score_of_profile(logit, window), expected)
