"""Positional and symbolic heads under permuted keys, on heads that are one or the other by construction."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tl_posgen.joining.literature import LITERATURE, literature_metrics, permuted_overlaps

from tl_posgen.joining import Profiles
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.wrapped import wrap
from tl_posgen.rope.rotation import to_planes


def captured(model, layer=1, n=24):
    found = []
    tokens = torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(1))
    run_capture(wrap(model), tokens, found.append, {"pattern"}, layers=[layer])
    return found[0]


def overlaps(capture):
    return permuted_overlaps(capture, np.random.default_rng(0))


def test_equal_keys_make_a_head_positional(mini):
    capture = captured(mini)
    equal = replace(capture, k=capture.k[:, :1].expand_as(capture.k).clone())
    equal._rotated = {"q": capture.rotated_q}
    positional, symbolic = overlaps(equal)
    torch.testing.assert_close(positional, torch.ones_like(positional))
    assert symbolic.max() < 0.99


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])
def test_a_head_without_rotation_is_symbolic(family_model, backend, name):
    from families import FAMILIES

    if not getattr(FAMILIES[name], backend):
        pytest.skip("not described on this backend")
    positional, symbolic = overlaps(captured(family_model(name, backend)))
    torch.testing.assert_close(symbolic, torch.ones_like(symbolic), atol=1e-6, rtol=0)
    assert positional.min() < 0.99


@pytest.mark.longer
def test_profiles_take_the_metrics_as_columns(mini, alice):
    cut = {"length": 32, "n_prompts": 2, "null_seeds": (), "progress": False}
    own, plain = (Profiles(costs=False, metrics=metrics)(mini, alice, **cut).own for metrics in ("literature", "own"))
    assert set(LITERATURE) <= set(own)
    assert not set(LITERATURE) & set(plain)
    assert set(own["column"].values) - set(plain["column"].values) == {
        *(f"{name}_{side}" for name in ("massive", "concentration", "slow_mean") for side in "qk"),
        *("frequency_entropy", "sink_rate", "positional", "symbolic"),
    }
    for name in plain.data_vars:
        if name != "rho":
            np.testing.assert_array_equal(own[name], plain[name])


def test_sink_rates_and_slow_means_are_those_of_brute_force(mini):
    capture = captured(mini)
    found = literature_metrics(capture, 0)
    sunk = [[float(head[i, 0]) > 0.3 for i in range(1, 24)] for head in capture.pattern]
    np.testing.assert_allclose(found["sink_rate"], np.mean(sunk, axis=1))
    assert 0 < found["sink_rate"].mean() < 1
    slow = [m for m, theta in enumerate(capture.geometry.rope.inv_freq.tolist()) if theta * 24 < 2 * np.pi]
    assert 0 < len(slow) < len(capture.geometry.rope.inv_freq)
    for side, x in enumerate((capture.q, capture.k)):
        z = to_planes(x[:, 1:].double(), capture.geometry.rope)
        energies = z.mean(1).abs().square()[:, slow].sum(1), z.abs().square().mean(1).sum(1)
        torch.testing.assert_close(found["slow_mean"][side], energies[0] / energies[1])
