"""Plane contributions, ablations and the rank-one profile against score matrices written out."""

import numpy as np
import pytest
import torch
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.rope.frequency_bands import bands_by_thirds
from tl_posgen.rope.rotation import Rope, complex_frequencies, complex_planes, inverse_frequencies, rotate
from tl_posgen.slash.numbers.ablations import ablate, drop, keep
from tl_posgen.slash.numbers.plane_contributions import (
    match_profiles,
    plane_contributions,
    rank_one_logit,
    score_of_profile,
)
from tl_posgen.slash.numbers.slash_scores import slash_statistics

N, D_HEAD = 40, 16


def ropes():
    return st.builds(
        Rope,
        st.sampled_from([8, 12, 16]).map(lambda dim: inverse_frequencies(dim, base=100.0)),
        st.sampled_from(["half", "adjacent"]),
        st.sampled_from([1.0, 1.2]),
    )


def inner_products(q, k, rope):
    """InnerProd(i, j, l) by its cosine formula, [plane, query, key]."""
    z_q, z_k = complex_planes(q, rope), complex_planes(k, rope)
    distance = (torch.arange(N)[:, None] - torch.arange(N)).double()
    angle = complex_frequencies(rope, D_HEAD)[:, None, None] * distance
    phase = z_q.angle().T[:, :, None] - z_k.angle().T[:, None, :]
    scaling = torch.ones(len(angle), dtype=torch.float64)
    scaling[: len(rope.inv_freq)] = rope.scaling**2
    sizes = z_q.abs().T[:, :, None] * z_k.abs().T[:, None, :]
    return scaling[:, None, None] * sizes * torch.cos(angle + phase)


@settings(deadline=None, max_examples=15)
@given(rope=ropes(), window=st.none() | st.integers(1, N), seed=st.integers(0, 99))
def test_plane_contributions_are_the_diagonal_means_less_the_visible_mean(rope, window, seed):
    q, k = normal(2, 1, N, D_HEAD, seed=seed)
    products = inner_products(q[0], k[0], rope)
    diagonals = torch.stack([products.diagonal(-d, 1, 2).mean(-1) for d in range(N)], -1)
    expected = 0.5 * (diagonals - products[:, visible(N, window)].mean(-1, keepdim=True))
    found = plane_contributions(q, k, rope, scale=0.5, window=window)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_drop_and_keep_of_a_band_share_out_the_score(pairing):
    rope = Rope(inverse_frequencies(D_HEAD), pairing)
    band = bands_by_thirds(8)[1]
    q, k = normal(2, 2, N, D_HEAD)
    without, only = ((lambda a, b: a @ b.mT)(*ablate(q, k, rope, kind, band)) for kind in ("drop", "keep"))
    whole = (lambda a, b: a @ b.mT)(*ablate(q, k, rope, "none"))
    torch.testing.assert_close(without + only, whole)


def test_drop_spares_the_unrotated_remainder_and_keep_does_not():
    rope, x = Rope(inverse_frequencies(8)), normal(3, D_HEAD)
    band = torch.ones(4, dtype=torch.bool)
    assert drop(x, rope, band)[..., 8:].equal(x[..., 8:])
    assert keep(x, rope, band)[..., 8:].abs().max() == 0


def test_frozen_planes_do_not_turn_and_keep_their_content():
    rope, band = Rope(inverse_frequencies(D_HEAD)), bands_by_thirds(8)[0]
    x = normal(1, N, D_HEAD)
    frozen = complex_planes(ablate(x, x, rope, "freeze", band)[0], rope)
    torch.testing.assert_close(frozen[..., band], complex_planes(x, rope)[..., band])
    turned = complex_planes(rotate(x, torch.arange(N), rope), rope)
    torch.testing.assert_close(frozen[..., ~band], turned[..., ~band])
    assert (rope.inv_freq > 0).all()


def test_rank_one_ablation_truncates_q_and_k():
    q, k = normal(2, 2, N, D_HEAD)
    found = ablate(q, k, Rope(), "rank_one")
    for x, truncated in zip((q, k), found, strict=True):
        s = torch.linalg.svdvals(x - truncated)
        torch.testing.assert_close(s[:, :-1], torch.linalg.svdvals(x)[:, 1:])


@pytest.mark.parametrize(
    ("kind", "band", "message"),
    [
        ("vanish", None, "choose one of none, drop"),
        ("drop", None, "each of the 4 planes"),
        ("drop", torch.ones(3, dtype=torch.bool), "each of the 4 planes"),
    ],
)
def test_unknown_ablations_and_bands_that_do_not_fit_are_refused(kind, band, message):
    with pytest.raises(InputError, match=message):
        ablate(normal(1, 4, 8), normal(1, 4, 8), Rope(inverse_frequencies(8)), kind, band)


@settings(deadline=None, max_examples=15)
@given(rope=ropes(), seed=st.integers(0, 99))
def test_profile_is_exact_for_constant_queries_and_keys(rope, seed):
    q, k = normal(2, 3, 1, D_HEAD, seed=seed).expand(2, 3, N, D_HEAD)
    rotated_q, rotated_k = (rotate(x, torch.arange(N), rope) for x in (q, k))
    found = rank_one_logit(q, k, rope, scale=0.5)
    torch.testing.assert_close(found, (0.5 * rotated_q @ rotated_k.mT)[:, -1].flip(-1))
    scores = (0.5 * rotated_q @ rotated_k.mT).masked_fill(torch.ones(N, N).triu(1) > 0, -torch.inf)
    torch.testing.assert_close(score_of_profile(found), slash_statistics(scores.softmax(-1)).score[0])


def test_profile_is_a_sum_of_cosines_of_the_top_directions():
    rope, (q, k) = Rope(inverse_frequencies(12), scaling=1.1), normal(2, 2, N, D_HEAD)
    v_q, v_k = (torch.linalg.svd(x).Vh[:, 0] for x in (q, k))
    strength = (q.mean(1) * v_q).sum(-1) * (k.mean(1) * v_k).sum(-1)
    z = complex_planes(v_q, rope) * complex_planes(v_k, rope).conj() * strength[:, None]
    amplitude = 0.5 * z.abs() * torch.tensor([1.1**2] * 6 + [1.0] * 2)
    waves = torch.cos(complex_frequencies(rope, D_HEAD)[:, None] * torch.arange(N) + z.angle()[..., None])
    torch.testing.assert_close(rank_one_logit(q, k, rope, scale=0.5), (amplitude[..., None] * waves).sum(1))


def test_a_match_stands_beside_the_mean_over_all_other_heads():
    profiles = normal(3, 4, 13).exp()
    measured, predicted, uniform = profiles
    correlation, chance = match_profiles(measured, predicted, uniform)
    near = [(x - uniform)[:, :6].numpy() for x in (measured, predicted)]
    for head in range(4):
        r = [np.corrcoef(near[1][head], near[0][other])[0, 1] for other in range(4)]
        assert correlation[head].item() == pytest.approx(r[head])
        assert chance[head].item() == pytest.approx(np.mean(np.delete(r, head)))
    assert match_profiles(*(x[:1] for x in profiles))[1].isnan()


def test_score_of_a_profile_with_huge_logits_is_finite():
    logit = torch.zeros(1, 300, dtype=torch.float64)
    logit[0, 200] = 5000.0
    score = score_of_profile(logit)
    assert score[0, 200].item() == pytest.approx(1)
    assert score.isfinite().all()
