"""Models under other frequencies: against models whose config has them."""

from dataclasses import replace

import pytest
import torch
from families import family_cases, scaled_llama

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies import FrequencyRule, with_frequencies
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.rope.rotation import Rope

TOKENS = torch.randint(2, 60, (2, 20), generator=torch.manual_seed(0))
WITHOUT_ROPE = ["gpt2", "bloom", "opt", "gpt_neo", "mpt"]
NOT_HERE = [*WITHOUT_ROPE, "llama4", "gptj"]  # these two show scores only in streamed passes


@torch.no_grad()
def logits(model, hooks=()):
    return model.run_with_hooks(TOKENS, fwd_hooks=list(hooks))


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


def test_longrope_makes_the_model_whose_config_has_it(family_directory, family_model):
    """transformers takes the long divisors once a text is longer than the training length, here of 8 tokens."""
    from transformers import LlamaForCausalLM

    divisors = [1.0, 1.5, 3.0, 6.0]
    rope = {"factor": 4.0, "original_max_position_embeddings": 8, "short_factor": [1.0] * 4, "long_factor": divisors}
    config = scaled_llama(rope_type="longrope", **rope)()
    scaled = LlamaForCausalLM.from_pretrained(family_directory("llama"), config=config).eval()
    plain = family_model("llama")
    with torch.no_grad():
        expected = scaled(TOKENS).logits
    rule = FrequencyRule("longrope", 4, 8, divisors)
    torch.testing.assert_close(logits(plain, with_frequencies(plain, rule)), expected, atol=1e-4, rtol=1e-4)


def test_some_heads_alone(mini):
    """Its other heads have the scores that they had."""
    scores = {}
    for name, hooks in {"own": [], "one": with_frequencies(mini, FrequencyRule("linear", 2), heads="0.1")}.items():
        kept = ("blocks.0.attn.hook_attn_scores", lambda scores_, hook, name=name: scores.update({name: scores_}))
        logits(mini, [*hooks, kept])
    same = [bool(torch.equal(*(scores[one][:, head] for one in ("own", "one")))) for head in range(4)]
    assert same == [True, False, True, True]


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
def test_refused(mini, frequencies, message):
    with pytest.raises(InputError, match=message):
        with_frequencies(mini, frequencies)


def test_a_model_without_rope_is_refused(family_model):
    model = family_model("gpt2", "bridge")
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        with_frequencies(model, FrequencyRule("linear", 2))
