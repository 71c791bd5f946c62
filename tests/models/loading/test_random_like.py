"""The null model is the architecture's own random initialisation, the same on both backends, and disturbs nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from families import VOCAB

from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.nulls import random_like
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.session import session_of

TOKENS = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_weights_are_those_transformers_makes_from_the_seed(family_directory, family_model, backend, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    null = random_like(family_model(name, backend), seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(family_directory(name))).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(null), expected(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_the_null_is_the_same_kind_of_object_with_other_weights_and_says_what_it_is(llama):
    null = random_like(llama, seed=5)
    assert type(null) is type(llama)
    assert next(null.parameters()).dtype == next(llama.parameters()).dtype
    assert not torch.allclose(logits(null), logits(llama), atol=1e-2)
    assert torch.equal(null.to_tokens("a cat"), llama.to_tokens("a cat"))
    origin = session_of(null).origin
    assert (origin.seed, origin.initialisation) == (5, "transformers, LlamaForCausalLM")
    assert origin.name == session_of(llama).origin.name


def test_the_seed_decides(llama):
    first, again, other = (logits(random_like(llama, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_no_random_state_is_touched(llama, unchecked):  # the type checker draws random numbers
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    random_like(llama, seed=3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()


@pytest.mark.usefixtures("needs_hooked")
def test_a_hooked_transformer_made_from_a_cfg_has_a_null_from_that_cfg():
    HookedTransformer, HookedTransformerConfig, _ = hooked_parts()
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=32, n_ctx=32, d_head=8, n_heads=4, d_vocab=VOCAB, act_fn="gelu", seed=1,
        positional_embedding_type="rotary", device="cpu",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    state = torch.get_rng_state()
    null = random_like(model, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(logits(null), logits(random_like(model, seed=2)))
    assert not torch.allclose(logits(null), logits(model))
    assert null.blocks[0].attn.W_Q.std().item() == pytest.approx(cfg.initializer_range, rel=0.1)
    assert session_of(null).origin.initialisation == "HookedTransformer, init_mode gpt2"
    assert model.cfg.seed == 1


def test_a_bridge_that_load_model_did_not_make_has_a_null_from_its_config(family_directory):
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(str(family_directory("llama")), device="cpu")
    ours = random_like(load_model(family_directory("llama"), "bridge"), seed=4)
    assert torch.equal(logits(random_like(model, seed=4)), logits(ours))


@pytest.mark.parametrize("backend", ["auto", "bridge"])
def test_a_deep_copy_has_the_null_of_its_original(backend):
    model = load_model("mini", backend)
    same = copy.deepcopy(model)
    assert session_of(same).origin == session_of(model).origin
    assert fingerprint(session_of(random_like(same, 0))) == fingerprint(session_of(random_like(model, 0)))
