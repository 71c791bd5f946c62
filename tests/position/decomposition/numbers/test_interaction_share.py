"""The differentiable interaction share: equal to that of the measure, and gradients against finite differences."""

import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.position import Variance, interaction_share
from tl_posgen.rope.rotation import Rope, inverse_frequencies

ROPES = [Rope(inverse_frequencies(6, 50.0)), Rope(inverse_frequencies(4, 50.0), "adjacent", 1.4)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize(("tokens", "first_token"), [("all", True), ("without first", False)])
@pytest.mark.parametrize("weights", ["uniform", "causal"])
def test_it_is_that_of_the_measure(capture, collected, tokens, first_token, weights):
    expected = collected(Variance(weights=weights), capture).sel(tokens=tokens)["interaction"].values[0]
    rope = capture.geometry.rope
    found = interaction_share(capture.q, capture.k, rope, weights=weights, first_token=first_token)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("first_token", [True, False])
def test_gradients_are_those_of_finite_differences(rope, first_token):
    q, k = (drawn(2, 1, 5, 6, seed=seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(lambda q, k: interaction_share(q, k, rope, first_token=first_token), (q, k))


def test_descent_takes_the_interaction_away():
    q, k = drawn(3, 20, 6), drawn(3, 20, 6, seed=1).float().requires_grad_()
    optimiser = torch.optim.Adam([k], lr=0.05)
    shares = []
    for _ in range(60):
        share = interaction_share(q.float(), k, ROPES[0])
        shares.append(float(share.detach().mean()))
        optimiser.zero_grad()
        share.sum().backward()
        optimiser.step()
    assert shares[0] > 0.2 > 0.05 > shares[-1]


def test_every_batch_stands_for_itself():
    q, k = drawn(2, 3, 8, 6), drawn(2, 3, 8, 6, seed=1)
    whole = interaction_share(q, k, ROPES[0], n_distances=5)
    torch.testing.assert_close(whole[1, 2], interaction_share(q[1, 2], k[1, 2], ROPES[0], n_distances=5))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("q", "k", "how", "message"),
    [
        (drawn(4, 8, 6), drawn(2, 8, 6), {}, "repeat keys of grouped heads"),
        (*[drawn(4, 2, 6)] * 2, {}, "2 tokens: too few"),
        (*[drawn(4, 8, 4)] * 2, {}, "vectors of 4 components and a rope that rotates 6"),
        (*[drawn(2, 9, 6)] * 2, {"n_distances": 0}, "n_distances 0: give a whole number"),
        *((x, x, {}, "give tensors of real numbers") for x in (drawn(6), drawn(3, 6).numpy(), drawn(3, 6) + 0j)),
    ],
)
def test_what_has_no_share_is_refused(q, k, how, message):
    with pytest.raises(InputError, match=message):
        interaction_share(q, k, ROPES[0], **how)
