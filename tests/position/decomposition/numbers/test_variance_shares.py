"""The variance decomposition against brute force over every triple (query, key, distance)."""

from itertools import product

import pytest
import torch
from captures import collected
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import scores_at_every

from tl_posgen.errors import InputError
from tl_posgen.position import Variance, interaction_share
from tl_posgen.position.decomposition.numbers.variance_shares import COMPONENTS, TripleMoments, variance_shares
from tl_posgen.rope.rotation import Rope, inverse_frequencies

ROPES = {
    "half": Rope(inverse_frequencies(6, 50.0)),
    "adjacent": Rope(inverse_frequencies(6, 50.0), pairing="adjacent"),
    "partial, odd rest, scaled": Rope(inverse_frequencies(4, 50.0), scaling=1.4),
    "no planes": Rope(),
}


def random_qk(n_q: int, n_k: int, d_head: int, seed: int = 0, heads: int = 2):
    return normal(heads, n_q, d_head, seed=seed) + 0.7, normal(heads, n_k, d_head, seed=seed + 1) - 0.4


def hoeffding(w: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Variance of every component by inclusion and exclusion of conditional means, in the order of COMPONENTS."""
    axes = {"q": 1, "k": 2, "d": 3}

    def mean_over(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x * weights).sum(3, keepdim=True) if name == "d" else x.mean(axes[name], keepdim=True)

    def conditional(kept: str) -> torch.Tensor:
        x = w
        for name in axes:
            x = x if name in kept else mean_over(x, name)
        return x

    variances = []
    for component in COMPONENTS:
        effect = torch.zeros(())
        for chosen in product([True, False], repeat=len(component)):
            kept = "".join(name for name, yes in zip(component, chosen, strict=True) if yes)
            effect = effect + (-1) ** (len(component) - len(kept)) * conditional(kept)
        variances.append((effect.square().expand_as(w) * weights).sum(3).mean((1, 2)))
    return torch.stack(variances, -1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("weights", ["uniform", "causal", torch.tensor([3.0, 0.0, 1.0, 1.0, 5.0])], ids=str)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_every_component_equals_brute_force(rope, weights, with_bias):
    q, k = random_qk(6, 6, 7 if rope.scaling != 1 else 6)
    bias = -0.4 * torch.arange(5, dtype=torch.float64).expand(2, 5) if with_bias else None  # belongs to d
    found = variance_shares(TripleMoments.from_qk(q, k, rope), rope, 0.3, 5, weights=weights, bias=bias)
    p = {"uniform": torch.ones(5), "causal": torch.arange(5.0, 0, -1)}[weights] if isinstance(weights, str) else weights
    p = p.double() / p.sum()
    w = scores_at_every(range(5), q, k, rope, 0.3) + (bias[:, None, None] if with_bias else 0)
    variances = hoeffding(w, p)
    mean = (w * p).sum(3).mean((1, 2))
    total = ((w - mean[:, None, None, None]).square() * p).sum(3).mean((1, 2))
    torch.testing.assert_close(found.shares * found.total[:, None], variances, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.total, total)
    torch.testing.assert_close(found.mean, mean)


@pytest.mark.parametrize("weights", ["uniform", "causal"])
@pytest.mark.parametrize("rope", [Rope(), Rope(torch.zeros(3, dtype=torch.float64), scaling=1.4)])
def test_without_a_turn_the_interaction_is_zero_exactly(rope, weights):
    q, k = random_qk(6, 6, 6)
    found = variance_shares(TripleMoments.from_qk(q, k, rope), rope, 0.3, 49, weights=weights)
    assert found.share("d", "qd", "kd", "qkd").tolist() == found.interaction.tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 8),
    half=st.integers(1, 4),
    n_distances=st.integers(1, 40),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_shares_add_up_to_one(n, half, n_distances, causal, seed):
    rope = Rope(inverse_frequencies(2 * half, 100.0))
    moments = TripleMoments.from_qk(*random_qk(n, n, 2 * half, seed), rope)
    found = variance_shares(moments, rope, 1.0, n_distances, weights="causal" if causal else "uniform")
    assert bool((found.shares >= 0).all())
    torch.testing.assert_close(found.shares.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_large_constant_costs_no_digits():
    rope = Rope(torch.zeros(3, dtype=torch.float64))
    q, k = random_qk(20, 20, 6)
    found = variance_shares(TripleMoments.from_qk(q + 1e5, k, rope), rope, 1.0, 3)
    w = scores_at_every(range(3), q + 1e5, k, rope, 1.0)
    expected = hoeffding(w, torch.full((3,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(found.shares * found.total[:, None], expected, rtol=1e-4, atol=1e-4)


# What the shares mean


def test_sums_of_shares_are_what_the_best_fits_explain():
    """f(q, d) + g(q, k), three axes, and, within rows, all that is left of each query's mean."""
    rope, (q, k) = ROPES["half"], random_qk(7, 6, 6)
    w = scores_at_every(range(5), q, k, rope, 1.0)
    moments = TripleMoments(TripleMoments.from_qk(q, q, rope).q, TripleMoments.from_qk(k, k, rope).k)
    found = variance_shares(moments, rope, 1.0, 5)
    best = w.mean(2, keepdim=True) + w.mean(3, keepdim=True) - w.mean((2, 3), keepdim=True)
    r = [torch.corrcoef(torch.stack([w[head].flatten(), best[head].flatten()]))[0, 1] for head in range(2)]
    torch.testing.assert_close(found.additive_r, torch.stack(r))
    mean = w.mean((1, 2, 3), keepdim=True)
    best = w.mean((2, 3), keepdim=True) + w.mean((1, 3), keepdim=True) + w.mean((1, 2), keepdim=True) - 2 * mean
    explained = 1 - (w - best).square().mean((1, 2, 3)) / (w - mean).square().mean((1, 2, 3))
    torch.testing.assert_close(found.share("q", "k", "d"), explained)
    variances = hoeffding(w - w.mean((2, 3), keepdim=True), torch.full((5,), 0.2, dtype=torch.float64))
    within = found.within_rows
    torch.testing.assert_close(within.shares, variances / variances.sum(-1, keepdim=True), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(within.total, variances.sum(-1))


# Moments


def test_moments_of_prompts_add_up_to_those_of_the_corpus():
    rope = ROPES["partial, odd rest, scaled"]
    q, k = random_qk(30, 30, 7)
    parts = [TripleMoments.from_qk(q[:, part], k[:, part], rope) for part in (slice(3), slice(3, 20), slice(20, 30))]
    together, added = TripleMoments.from_qk(q, k, rope), parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(added.q.mean_energy, q.mean(1).square().sum(-1) / q.square().sum(-1).mean(-1))
    for whole, merged in [(together.q, added.q), (together.k, added.k)]:
        assert whole.n == merged.n
        torch.testing.assert_close(merged.mean, whole.mean)
        torch.testing.assert_close(merged.about_mean.plain, whole.about_mean.plain)
        torch.testing.assert_close(merged.about_mean.conjugate, whole.about_mean.conjugate)


def test_a_head_that_never_varies_has_no_shares():
    rope = Rope(torch.zeros(2, dtype=torch.float64))
    found = variance_shares(
        TripleMoments.from_qk(torch.full((1, 6, 4), 0.1), torch.full((1, 6, 4), 0.7), rope), rope, 1.0, 4
    )
    assert found.shares.isnan().all()
    assert found.additive_r.isnan().all()


# Bad input


def test_a_prompt_of_one_token_cannot_lose_it():
    with pytest.raises(InputError, match="no token is left of a prompt of 1;"):
        TripleMoments.from_qk(*random_qk(1, 1, 6), ROPES["half"], first_token=False)


TURNING = [Rope(inverse_frequencies(6, 50.0)), Rope(inverse_frequencies(4, 50.0), "adjacent", 1.4)]


@pytest.mark.parametrize(("tokens", "first_token"), [("all", True), ("without first", False)])
@pytest.mark.parametrize("weights", ["uniform", "causal"])
def test_it_is_that_of_the_measure(capture, tokens, first_token, weights):
    expected = collected(Variance(weights=weights), capture).sel(tokens=tokens)["interaction"].values[0]
    rope = capture.geometry.rope
    found = interaction_share(capture.q, capture.k, rope, weights=weights, first_token=first_token)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rope", TURNING)
@pytest.mark.parametrize("first_token", [True, False])
def test_gradients_are_those_of_finite_differences(rope, first_token):
    q, k = (normal(2, 1, 5, 6, seed=seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(lambda q, k: interaction_share(q, k, rope, first_token=first_token), (q, k))


def test_every_batch_stands_for_itself():
    q, k = normal(2, 3, 8, 6), normal(2, 3, 8, 6, seed=1)
    whole = interaction_share(q, k, TURNING[0], n_distances=5)
    torch.testing.assert_close(whole[1, 2], interaction_share(q[1, 2], k[1, 2], TURNING[0], n_distances=5))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("q", "k", "how", "message"),
    [
        (normal(4, 8, 6), normal(2, 8, 6), {}, "repeat keys of grouped heads"),
        (*[normal(4, 2, 6)] * 2, {}, "2 tokens: too few"),
        (*[normal(4, 8, 4)] * 2, {}, "vectors of 4 components and a rope that rotates 6"),
        (*[normal(2, 9, 6)] * 2, {"n_distances": 0}, "n_distances 0: give a whole number"),
        *((x, x, {}, "give tensors of real numbers") for x in (normal(6), normal(3, 6).numpy(), normal(3, 6) + 0j)),
    ],
)
def test_what_has_no_share_is_refused(q, k, how, message):
    with pytest.raises(InputError, match=message):
        interaction_share(q, k, TURNING[0], **how)
