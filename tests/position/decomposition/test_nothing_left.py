"""Scores of which nothing but rounding is left: no share of it is told."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition import Residual
from tl_posgen.position.decomposition.layer_fits import fit_capture
from tl_posgen.position.decomposition.layer_residuals import residual_sums

pytestmark = pytest.mark.longer

QUIET = {"null_seeds": (), "progress": False}
SHARES = ("top_share", "effective_rank", "spectrum", "energy_share", "pair_share")


@pytest.mark.parametrize(
    "family", ["llama", "bloom", "smollm3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "gemma2"))]
)
def test_of_a_text_of_one_token_the_fit_leaves_nothing(family_model, family):
    """Its queries and keys are all alike, so scores are a function of distance, or of nothing (NoPE)."""
    result = Residual()(family_model(family, "bridge"), torch.full((1, 40), 5), **QUIET)
    data = result.own
    shares = SHARES + (("plane_share", "rest_share") if "plane_share" in data else ())
    assert bool((data["share"].fillna(0) == 0).all())
    assert all(bool(data[name].sel(of="residual").isnull().all()) for name in shares if "of" in data[name].dims)
    assert all(bool(data[name].isnull().all()) for name in SHARES)
    assert "the fit leaves no more than float32 rounds" in result.findings()[2]
    assert len(result.findings()) == 3 + bool(result.caveat)  # nothing of planes or token pairs
    assert result.kinds == ["map"]
    assert "example_share" not in data
    if family == "smollm3":  # its second layer does not rotate
        assert bool(data["share"].sel(layer=1).isnull().all())
        assert "in 4 heads scores are constant within rows" in result.findings()[2]


def test_layers_that_rotate_and_layers_that_do_not_stand_in_one_result(family_model):
    tokens = torch.randint(2, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    result = Residual()(family_model("smollm3", "bridge"), tokens, **QUIET)
    data = result.own
    for name in ("wavelength", "plane_share"):
        assert bool(data[name].sel(layer=0).notnull().all())
        assert bool(data[name].sel(layer=1).isnull().all())
    assert "planes" in result.kinds
    result.plot("planes")


@settings(deadline=None, max_examples=10)
@given(st.floats(-12, 0), st.integers(0, 1000))
def test_planes_share_a_small_residual_as_float64_says(capture, magnitude, seed):
    """A residual of 10^magnitude of the scores: the shares are right, or there are none."""
    draw = torch.Generator().manual_seed(seed)
    n, heads = 24, len(capture.heads)
    same = [torch.randn(heads, 1, capture.q.shape[-1], generator=draw).expand(-1, n, -1) for _ in "qk"]
    q, k = (x + 10 ** (magnitude / 2) * torch.randn(x.shape, generator=draw) for x in same)
    part = dataclasses.replace(capture, q=q, k=k, tokens=None)
    exact = dataclasses.replace(capture, q=q.double(), k=k.double(), tokens=None)
    for one in (part, exact):
        vars(one).pop("rotated_q", None)
    e, truth = (residual_sums(one, fit_capture(one)[0])[0].corner for one in (part, exact))
    error, size = (x.square().sum((1, 2)).sqrt() for x in (e - truth, truth))
    scale = part.geometry.scale * part.q.norm(dim=-1).mul(1.0).max() * part.k.norm(dim=-1).max()
    assert bool((error <= 1e-6 * scale * n + 1e-9 * size).all())
    query, key = torch.ones(n, n).tril().nonzero(as_tuple=True)
    for rows in (query - key, query, key):  # at right angles to every fit
        sums = torch.zeros(heads, n, dtype=torch.float64).index_add(1, rows, e[:, query, key])
        assert float((sums.abs().amax(1) / (e.square().sum((1, 2)).sqrt() + 1e-300)).max()) < 1e-8
