"""The residual against dense least squares, on synthetic heads and on real models."""

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr
from captures import collected
from dense_fit import dense_residual
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.core.inits import joined
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition import Residual, residual
from tl_posgen.position.decomposition.numbers.residual_sums import residual_sums
from tl_posgen.position.decomposition.three_axis import fit_capture

MEASURE = "residual"

N = 64
WITHOUT_FIRST = {"tokens": "without first"}
VISIBLE = torch.ones(N, N).tril().bool()


@pytest.fixture(scope="module")
def data(single):
    """Of the first prompt alone."""
    return single["residual"].trained


@pytest.fixture(scope="module")
def full(data):
    """Of layer 1 of the first prompt, all tokens."""
    return data.sel(tokens="all", layer=1)


@pytest.fixture(scope="module")
def scores(capture):
    return capture.scores().double()


@pytest.fixture(scope="module")
def left(scores):
    return dense_residual(scores, VISIBLE)


# Against dense least squares


def test_the_share_is_that_of_dense_least_squares_and_what_r_within_rows_leaves(single, data, full, scores, left):
    np.testing.assert_allclose(data["share"], 1 - single["three_axis"].trained["r_within_rows"] ** 2, atol=1e-6)
    shown = scores.masked_fill(~VISIBLE, 0)
    within = ((shown - shown.sum(-1, keepdim=True) / VISIBLE.sum(-1, keepdim=True)) * VISIBLE).square().sum((1, 2))
    np.testing.assert_allclose(full["share"], left.square().sum((1, 2)) / within, rtol=1e-5)


def test_leaving_out_the_first_token_fits_the_rest_alone(data, scores):
    rest = dense_residual(scores[:, 1:, 1:], VISIBLE[1:, 1:])
    expected = rest[:, VISIBLE[1:, 1:]].square().mean(-1).sqrt()
    np.testing.assert_allclose(data["std"].sel(WITHOUT_FIRST).sel(layer=1), expected, rtol=1e-5)


def test_the_share_in_one_direction_is_that_of_the_residual_with_hidden_pairs_at_zero(full, left):
    share = torch.linalg.svdvals(left) ** 2
    np.testing.assert_allclose(full["top_share"], share[:, 0] / share.sum(-1), atol=1e-5)


def test_energies_of_prompts_add_up(mini, prompts):
    def run(tokens: torch.Tensor) -> xr.Dataset:
        return Residual()(mini, tokens[:, :24], layers=[2], nulls=0, progress=False).trained

    both, one, other = run(prompts[:2]), run(prompts[:1]), run(prompts[1:2])
    np.testing.assert_allclose(2 * both["std"] ** 2, one["std"] ** 2 + other["std"] ** 2, rtol=1e-6)
    np.testing.assert_allclose(2 * both["top_share"], one["top_share"] + other["top_share"], rtol=1e-6)


def test_heads_taken_a_few_at_a_time_are_the_same(capture, data, monkeypatch):
    monkeypatch.setattr(residual, "ENTRIES", 3 * N**2)
    again, whole = collected(Residual(), capture), data.sel(layer=[1])
    for name in ("share", "top_share"):
        np.testing.assert_allclose(again[name], whole[name], rtol=1e-6, atol=1e-9)


# Heads made by hand


@pytest.fixture
def of_scores():
    """scores [query, key] -> the result of such a head without RoPE: key j is the j-th unit vector."""

    def result_of(scores: torch.Tensor) -> Result:
        n, measure = len(scores), Residual()
        capture = LayerCapture(
            LayerGeometry(0, "none", 1, 1, n, 1.0), range(1), 0, None, scores[None], torch.eye(n)[None]
        )
        return Result(measure, joined(measure, {"trained": collected(measure, capture)}, ["made up"]))

    return result_of


def test_an_additive_head_leaves_nothing_and_has_no_shape_and_one_of_constant_rows_no_share(of_scores):
    i = torch.arange(12.0)
    found = of_scores(torch.cos(i[:, None] - i) + 3 * i[:, None].sin() - i.sqrt()).sel(tokens="all")
    assert found["share"].item() < 1e-10
    assert found["top_share"].isnull().all()
    found = of_scores(torch.arange(12.0)[:, None].expand(12, 12))
    assert found.trained["share"].isnull().all()
    assert "not defined" in found.findings()[0]


def test_a_prompt_that_any_fit_fits_is_refused_where_somebody_elses_pass_feeds_it(of_scores):
    with pytest.raises(InputError, match="5 tokens at least"):
        of_scores(torch.ones(4, 4))


QUIET = {"nulls": 0, "progress": False}


@pytest.mark.parametrize(
    "family", ["llama", "bloom", "smollm3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "gemma2"))]
)
@pytest.mark.longer
def test_of_a_text_of_one_token_the_fit_leaves_nothing(family_model, family):
    """Its queries and keys are all alike, so scores are a function of distance, or of nothing (NoPE)."""
    result = Residual()(family_model(family, "bridge"), torch.full((1, 40), 5), **QUIET)
    data = result.trained
    assert bool((data["share"].fillna(0) == 0).all())
    assert bool(data["top_share"].isnull().all())
    assert "the fit leaves no more than float32 rounds" in result.findings()[1]
    if family == "smollm3":  # its second layer does not rotate
        assert bool(data["share"].sel(layer=1).isnull().all())
        assert "in 4 heads scores are constant within rows" in result.findings()[1]


@settings(deadline=None, max_examples=10)
@given(st.floats(-12, 0), st.integers(0, 1000))
@pytest.mark.longer
def test_a_small_residual_is_what_float64_says(capture, magnitude, seed):
    """A residual of 10^magnitude of the scores."""
    draw = torch.Generator().manual_seed(seed)
    n, heads = 24, len(capture.heads)
    same = [torch.randn(heads, 1, capture.q.shape[-1], generator=draw).expand(-1, n, -1) for _ in "qk"]
    q, k = (x + 10 ** (magnitude / 2) * torch.randn(x.shape, generator=draw) for x in same)
    part = dataclasses.replace(capture, q=q, k=k, tokens=None)
    exact = dataclasses.replace(capture, q=q.double(), k=k.double(), tokens=None)
    e, truth = (residual_sums(one.score_rows, fit_capture(one)[0], crop=n)[0].corner for one in (part, exact))
    error, size = (x.square().sum((1, 2)).sqrt() for x in (e - truth, truth))
    scale = part.geometry.scale * part.q.norm(dim=-1).mul(1.0).max() * part.k.norm(dim=-1).max()
    assert bool((error <= 1e-6 * scale * n + 1e-9 * size).all())
    query, key = torch.ones(n, n).tril().nonzero(as_tuple=True)
    for rows in (query - key, query, key):  # at right angles to every fit
        sums = torch.zeros(heads, n, dtype=torch.float64).index_add(1, rows, e[:, query, key])
        assert float((sums.abs().amax(1) / (e.square().sum((1, 2)).sqrt() + 1e-300)).max()) < 1e-8
