"""Rules of frequencies against transformers' own functions and the papers' formulas; models under other frequencies
against models whose config has them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import family_cases
from interventions import logits
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.extension.frequency_rules import FrequencyRule, _base_of, with_frequencies
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.rope.rotation import Rope, inverse_frequencies

WITHOUT_ROPE = ["gpt2", "bloom", "opt", "gpt_neo", "mpt"]
NOT_HERE = [*WITHOUT_ROPE, "llama4", "gptj"]  # these two show scores only in streamed passes
N_CTX, FACTORS = 512, [1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]


def transformers_own(rope_type, dim, base, length=None, **parameters):
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


PLAIN, TWO = Rope(inverse_frequencies(16)), torch.tensor([1.0, 0.1])


@pytest.mark.parametrize(
    ("rule", "before", "inv_freq", "scaling"),
    [
        (FrequencyRule("linear", 3), PLAIN, PLAIN.inv_freq / 3, 1),
        (FrequencyRule("linear", 2), Rope(TWO, scaling=1.2), TWO / 2, 1.2),  # on top of what is scaled already
        (FrequencyRule("given", values=[0.5, 0.25]), Rope(TWO, "adjacent", 1.5), [0.5, 0.25], 1.5),
        (FrequencyRule("p_rope", 2), Rope(torch.tensor([0.1, 1.0, 0.5, 0.2])), [0, 1, 0.5, 0], 1),  # the fastest
        (FrequencyRule("yarn", 2, N_CTX), Rope(), [], 1),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_closed_formulas_change_frequencies_and_nothing_else(rule, before, inv_freq, scaling):
    found = rule(before)
    np.testing.assert_allclose(found.inv_freq, inv_freq, rtol=1e-6)
    assert (found.pairing, found.scaling) == (before.pairing, pytest.approx(scaling))


@pytest.mark.parametrize(("factor", "dim", "kept"), [(1, 16, 8), (2, 16, 4), (3, 16, 2), (4, 16, 2), (49, 98, 0)])
def test_p_rope_is_transformers_proportional_rule(factor, dim, kept):
    """Where it rounds down, too: of 49 planes it keeps none at a share of 1 / 49."""
    pytest.importorskip("transformers.models.gemma4")  # with which it came
    theta, _ = transformers_own("proportional", dim, 10_000.0, partial_rotary_factor=1 / factor)
    np.testing.assert_allclose(
        FrequencyRule("p_rope", factor)(Rope(inverse_frequencies(dim))).inv_freq, theta, rtol=3e-7
    )
    assert int((theta > 0).sum()) == kept


@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("dim", [4, 16, 128])
def test_the_base_is_found(base, dim):
    assert _base_of(Rope(inverse_frequencies(dim, base).float())) == base


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
def test_rules_that_cannot_be_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# Hooks


@pytest.mark.parametrize(("name", "backend"), family_cases("llama", "neox", without=NOT_HERE))
def test_own_frequencies_change_nothing(family_model, name, backend):
    model = family_model(name, backend)
    torch.testing.assert_close(logits(model, with_frequencies(model, lambda rope: rope)), logits(model))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama_linear", FrequencyRule("linear", 4)),
        ("llama_yarn", FrequencyRule("yarn", 4, 32)),
        ("llama3", FrequencyRule("llama3", 8, 32)),
    ],
)
def test_hooks_make_the_model_whose_config_scales(family_model, name, backend, rule):
    """These families have the same weights."""
    plain, scaled = (family_model(one, backend) for one in ("llama", name))
    expected = logits(scaled)
    assert not torch.allclose(expected, logits(plain), atol=1e-2)
    torch.testing.assert_close(logits(plain, with_frequencies(plain, rule)), expected, atol=1e-4, rtol=1e-4)


def test_numbers_of_ones_own(mini):
    theta = geometry_of(mini)[0].rope.inv_freq
    given = [theta / 2, (theta / 2).tolist(), FrequencyRule("given", values=(theta / 2).tolist())]
    found = [logits(mini, with_frequencies(mini, one)) for one in (*given, FrequencyRule("linear", 2))]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("frequencies", "message"),
    [
        ([1.0, 0.1], r"layer 0: frequencies: \[2\] values for 16 RoPE planes"),
        (lambda rope: 3, "let the function give a Rope"),
        (lambda rope: Rope(), r"\[0\] values for 16"),
        (lambda rope: replace(rope, inv_freq=[1, 2]), r"give a tensor of angles"),
        (lambda rope: replace(rope, inv_freq="fast"), "give a tensor of angles"),
        ("linear 2", "give a FrequencyRule"),
        ([float("nan")] * 16, "finite"),
        ([True] * 16, "give a FrequencyRule"),
        (torch.ones(16, dtype=torch.complex64), "give a FrequencyRule"),
        (lambda rope: replace(rope, scaling=float("nan")), "a scaling of nan"),
        (FrequencyRule("ntk", 1e300), "too large"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_frequencies_that_no_layer_can_have_are_refused(mini, frequencies, message):
    with pytest.raises(InputError, match=message):
        with_frequencies(mini, frequencies)


def test_a_model_without_rope_is_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        with_frequencies(family_model("gpt2", "bridge"), FrequencyRule("linear", 2))
