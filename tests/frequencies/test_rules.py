"""Rules against transformers' own functions and the papers' closed formulas."""

import math

import numpy as np
import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.frequencies import FrequencyRule
from tl_posgen.frequencies.numbers.changed_frequencies import base_of, change_elsewhere, fastest_alone
from tl_posgen.rope.rotation import Rope, inverse_frequencies

N_CTX, FACTORS = 512, [1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]


def transformers_own(rope_type, dim, base, length=None, **parameters):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": rope_type, "rope_theta": base, "original_max_position_embeddings": N_CTX, **parameters}
    config = LlamaConfig(
        hidden_size=3 * dim, num_attention_heads=3, max_position_embeddings=N_CTX, rope_parameters=rope
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=length)


THEIRS = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS},
}


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("rule", THEIRS)
def test_frequencies_are_transformers_own(rule, base):
    theta, scaling = transformers_own(rule, 16, base, 4 * N_CTX, **THEIRS[rule])
    values = FACTORS if rule == "longrope" else ()
    found = FrequencyRule(rule, 4, N_CTX, values)(Rope(inverse_frequencies(16, base).float().double()))
    np.testing.assert_allclose(found.inv_freq, theta, rtol=3e-7)
    assert found.scaling == scaling


def test_ntk_is_transformers_dynamic_rule_for_a_text_of_that_length():
    theta, _ = transformers_own("dynamic", 16, 10_000.0, 3 * N_CTX, factor=1.0)
    found = FrequencyRule("ntk", 3, N_CTX)(Rope(inverse_frequencies(16)))
    np.testing.assert_allclose(found.inv_freq, theta, rtol=3e-7)
    np.testing.assert_allclose(found.inv_freq, inverse_frequencies(16, 10_000.0 * 3 ** (16 / 14)), rtol=1e-6)


@pytest.mark.parametrize("factor", [1, 1.0001, 4])
def test_longrope_divides_by_its_values_at_any_factor(factor):
    """transformers has other divisors for texts within the training length."""
    theta = inverse_frequencies(16)
    found = FrequencyRule("longrope", factor, N_CTX, FACTORS)(Rope(theta))
    np.testing.assert_allclose(found.inv_freq, theta / torch.tensor(FACTORS), rtol=1e-6)
    assert found.scaling == pytest.approx(math.sqrt(1 + math.log(factor) / math.log(N_CTX)))


def test_closed_formulas():
    plain = Rope(inverse_frequencies(16))
    np.testing.assert_allclose(FrequencyRule("linear", 3)(plain).inv_freq, plain.inv_freq / 3, rtol=1e-6)
    assert FrequencyRule("yarn", 4, N_CTX)(plain).scaling == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(("factor", "dim", "kept"), [(1, 16, 8), (2, 16, 4), (3, 16, 2), (4, 16, 2), (49, 98, 0)])
def test_p_rope_is_transformers_proportional_rule(factor, dim, kept):
    """Where it rounds down, too: of 49 planes it keeps none at a share of 1 / 49."""
    pytest.importorskip("transformers.models.gemma4")  # with which it came
    theta, _ = transformers_own("proportional", dim, 10_000.0, partial_rotary_factor=1 / factor)
    np.testing.assert_allclose(
        FrequencyRule("p_rope", factor)(Rope(inverse_frequencies(dim))).inv_freq, theta, rtol=3e-7
    )
    assert int((theta > 0).sum()) == kept


def test_a_rule_comes_on_top_of_frequencies_that_are_scaled_already():
    once = FrequencyRule("yarn", 2, N_CTX)(Rope(inverse_frequencies(16)))
    twice = FrequencyRule("linear", 2)(once)
    np.testing.assert_allclose(twice.inv_freq, once.inv_freq / 2, rtol=1e-6)
    assert twice.scaling == once.scaling > 1


def test_given_frequencies_are_taken_as_they_are():
    rope = FrequencyRule("given", values=[0.5, 0.25])(Rope(inverse_frequencies(4), pairing="adjacent", scaling=1.5))
    assert (rope.inv_freq.tolist(), rope.pairing, rope.scaling) == ([0.5, 0.25], "adjacent", 1.5)


def test_a_layer_without_rope_stays_as_it_is():
    assert FrequencyRule("yarn", 2, N_CTX)(Rope()).rotary_dim == 0


@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("dim", [4, 16, 128])
def test_the_base_is_found(base, dim):
    assert base_of(Rope(inverse_frequencies(dim, base).float())) == base


def test_p_rope_keeps_the_fastest_wherever_they_are():
    assert fastest_alone(torch.tensor([0.1, 1.0, 0.5, 0.2]), 0.5).tolist() == pytest.approx([0, 1.0, 0.5, 0])


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_have_the_same_total_angle(seed):
    theta = inverse_frequencies(16)
    changed = FrequencyRule("ntk", 3)(Rope(theta)).inv_freq
    random = change_elsewhere(theta, changed, seed)
    assert float((random - theta).abs().sum()) == pytest.approx(float((changed - theta).abs().sum()))
    assert sorted((random - theta).tolist()) == pytest.approx(sorted((changed - theta).tolist()))
    assert not torch.allclose(random, changed)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_no_plane_keeps_its_own_change(n):
    theta, change = torch.zeros(n).double(), torch.arange(n).double() + 1
    found = torch.stack([change_elsewhere(theta, change, seed) for seed in range(200)])
    assert not (found == change).any()
    assert [len(one.unique()) for one in found.mT] == [n - 1] * n  # every other plane's change is drawn


def test_one_plane_has_no_random_change_and_none_needs_none():
    with pytest.raises(InputError, match="one RoPE plane alone"):
        change_elsewhere(torch.ones(1), torch.zeros(1), 0)
    assert len(change_elsewhere(torch.ones(0), torch.ones(0), 0)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FrequencyRule("linaer", 2), "FrequencyRule: name = 'linaer'"),
        (lambda: FrequencyRule("linear", 0.5), "1 or more"),
        (lambda: FrequencyRule("longrope", 2), "needs one value a plane"),
        (lambda: FrequencyRule("linear", 2, values=[1.0]), "needs no values"),
        (lambda: FrequencyRule("longrope", 2, values=[1.0, 0]), r"values above 0 .* not \[1.0, 0\]"),
        (lambda: FrequencyRule("given", values=[1e308]), "numbers that angles can be made of"),
        (lambda: FrequencyRule("yarn", 2, 64)(Rope(torch.tensor([0.1, 0.1]))), "all alike have no base"),
        (lambda: FrequencyRule("longrope", 2, 1, [1.0]), "a training length of 2 or more"),
        (lambda: FrequencyRule("longrope", 2, values=[1.0]).of_model(1), "a training length of 2 or more"),
        (lambda: FrequencyRule("given", values=[1.0])(Rope(inverse_frequencies(4))), "1.* values for 2 RoPE planes"),
        (lambda: FrequencyRule("ntk", 2)(Rope(torch.ones(1, dtype=torch.float64))), "no base to enlarge"),
        (lambda: FrequencyRule("yarn", 2)(Rope(inverse_frequencies(4))), "depends on the training length"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
