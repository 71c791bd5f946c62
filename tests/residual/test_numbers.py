"""Norms read off their outputs, and queries and keys as linear maps of the residual stream, in float64."""

import pytest
import torch
from drawn import normal

from tl_posgen.residual.numbers import freeze, frozen_map

D, N = 8, 5


def rms_norm(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5) * weight + bias


NORMS = {
    "rms": lambda x: rms_norm(x, normal(D)),
    "layer": lambda x: layer_norm(x, normal(D), normal(D, seed=1)),
    "layer without weights": lambda x: layer_norm(x, 1, 0),
    "identity": lambda x: x,
    "odd": lambda x: layer_norm(x, normal(x.shape[-1]), normal(x.shape[-1], seed=1)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_linear_in_its_parts_once_it_is_frozen(kind):
    norm, parts = NORMS[kind], normal(3, N, D - (kind == "odd"), seed=2)
    x = parts.sum(0)
    frozen = freeze(norm, x, norm(x))
    assert frozen.centred == (kind not in ("rms", "identity"))
    assert frozen.error < 1e-9
    torch.testing.assert_close(frozen.linear(parts).sum(0) + frozen.beta, norm(x), rtol=0, atol=1e-8)


def test_what_is_no_norm_shows_in_the_error():
    x = normal(N, D)
    assert freeze(torch.tanh, x, torch.tanh(x)).error > 0.05


@pytest.mark.parametrize("before", ["rms", "layer", "identity"])
@pytest.mark.parametrize("behind", [None, "rms", "layer", "rms over heads"])
def test_a_frozen_map_gives_the_vectors_of_the_whole(before, behind):
    parts, weight, bias = normal(3, N, D), normal(2, D, 4, seed=3), normal(2, 4, seed=4)
    x = parts.sum(0)
    raw = NORMS[before](x) @ weight + bias[:, None]
    gamma, beta = normal(2, 1, 4, seed=5), normal(2, 1, 4, seed=6)

    def finish(x):
        if behind == "rms over heads":
            return gamma * x / (x.square().mean((0, 2), keepdim=True) + 1e-6).sqrt()
        return rms_norm(x, gamma) if behind == "rms" else layer_norm(x, gamma, beta)

    expected = raw if behind is None else finish(raw)
    norm = freeze(NORMS[before], x, NORMS[before](x))
    after = None if behind is None else freeze(finish, raw, expected)
    frozen = frozen_map(norm, weight, bias, after, ("ln bias", "b_K", "k_norm bias"))
    vectors = frozen.vectors(parts)
    torch.testing.assert_close(vectors.sum(0), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(frozen.mean_vectors(parts), vectors[:, :, 1:].mean(2), rtol=1e-9, atol=1e-12)
    weights = normal(2, N, 4, seed=7)
    expected = (vectors * weights)[:, :, 1:].sum((2, 3))
    torch.testing.assert_close(frozen.products(parts, weights), expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(frozen.of_heads([1, 0]).vectors(parts), vectors[:, [1, 0]])
    names = ["ln bias"] * (before == "layer") + ["b_K"] + ["k_norm bias"] * (behind == "layer")
    assert list(frozen.constants) == names
