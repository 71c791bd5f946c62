"""The shuffled model has the weights of the trained one in another order, and is a model of its own."""

import threading

import pytest
import torch
from families import VOCAB

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.loading.nulls import is_matrix, shuffled_like
from tl_posgen.models.session import session_of

TOKENS = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))
# joint q/k/v matrices, patched forward methods, learned positions, ALiBi, layers of different kinds
RUNS = [("hooked", "llama"), ("hooked", "bloom"), ("bridge", "llama"), ("bridge", "neox"), ("bridge", "falcon")]
RUNS += [("bridge", "phi3"), ("bridge", "gpt2"), ("bridge", "gemma3")]


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "falcon", "phi3"])
def test_every_matrix_keeps_its_entries_and_loses_their_order(family_model, backend, name):
    if name != "llama" and backend == "hooked":
        pytest.skip("analysed as a bridge only")
    model = family_model(name, backend)
    before, after = weights(model), weights(shuffled_like(model, seed=0))
    matrices = [at for at in before if is_matrix(at, before[at]) and "qkv" not in at and "gate_up" not in at]
    assert any("qkv" in at for at in before) == (name != "llama" and backend == "bridge")
    assert len(matrices) >= 2 * 6 + 1  # q, k, v, o and the feed-forward matrices of two layers, and the embedding
    for at in matrices:
        assert torch.equal(before[at].flatten().sort().values, after[at].flatten().sort().values), at
        assert not torch.equal(before[at], after[at]), at


@pytest.mark.parametrize("name", ["llama", "qwen2", "neox"])
def test_biases_and_gains_stay_where_they_are(family_model, backend, name):
    model = family_model(name, backend)
    before, after = weights(model), weights(shuffled_like(model, seed=0))
    vectors = [name for name in before if not is_matrix(name, before[name])]
    assert vectors
    assert all(torch.equal(before[name], after[name]) for name in vectors)


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_it_shares_nothing_with_the_model_and_can_be_analysed_alike(family_model, kind, name):
    model = family_model(name, kind)
    before = logits(model)
    null = shuffled_like(model, seed=0)
    found = logits(null)
    torch.testing.assert_close(logits(model), before)
    assert not torch.allclose(found, before, atol=1e-2)
    supported = [not isinstance(layer, UnsupportedModelError) for layer in session_of(model).found()]
    assert [not isinstance(layer, UnsupportedModelError) for layer in session_of(null).found()] == supported
    kept = weights(model)
    try:
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        torch.testing.assert_close(logits(null), found)
    finally:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(kept[name])


def test_the_seed_decides_and_no_random_state_is_touched(llama):
    before = torch.get_rng_state()
    first, again, other = (logits(shuffled_like(llama, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_hooks_of_the_model_are_not_taken_along(llama):
    fired = []
    hook = ("blocks.0.attn.hook_attn_scores", lambda value, hook: fired.append(hook))
    with llama.hooks(fwd_hooks=[hook]):
        null = shuffled_like(llama, seed=0)
        logits(null)
        assert not fired
        logits(llama)
        assert fired


def test_its_origin_says_what_was_done(llama):
    origin = session_of(shuffled_like(llama, seed=3)).origin
    assert (origin.seed, origin.name) == (3, session_of(llama).origin.name)
    assert "permuted" in origin.initialisation


def copied(model):
    session = session_of(model)
    return session.backend.copy(session.origin)


def test_it_starts_from_the_weights_in_memory(llama):
    model = copied(llama)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    assert torch.equal(*(next(m.parameters()).flatten().sort().values for m in (model, shuffled_like(model, seed=0))))


def test_a_processed_bridge_is_refused(family_model):
    bridge = copied(family_model("llama", "bridge"))
    bridge.original_model.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(InputError, match="load the model anew"):
        shuffled_like(bridge, seed=0)


def test_what_a_hook_holds_is_not_copied(llama):
    lock = threading.Lock()  # which nothing can copy

    def hook(value, hook):
        with lock:
            return value

    llama.add_hook("blocks.0.hook_resid_pre", hook)
    try:
        with tl_posgen.attach(llama, "variance") as run:
            llama(TOKENS)
            found = run.report(shuffled_seeds=(0,))
    finally:
        llama.reset_hooks()
    assert found["variance"].numbers.shuffled == ["shuffled 0"]
