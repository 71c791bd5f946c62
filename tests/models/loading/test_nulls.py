"""Null models: random init is the architecture's own, shuffled weights are the trained ones in another order; both are
models of their own and disturb nothing."""

import copy
import random
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import VOCAB
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tl_posgen
from tl_posgen.core.null_models import NullModels
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.geometry.differences import first_difference
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.null_kinds import shuffled_like
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.loading.shuffle import entries_together, head_width, is_matrix, shuffle
from tl_posgen.models.loading.snapshot import snapshot
from tl_posgen.models.provenance import fingerprint
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


@pytest.mark.parametrize("at_once", [1000, 2**24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_entries_stand_in_the_order_that_the_seed_draws_and_come_back(dtype, at_once, monkeypatch):
    monkeypatch.setattr("tl_posgen.models.loading.shuffle._AT_ONCE", at_once)
    model = load_model("mini", "bridge", dtype)
    before = weights(model)
    for vectors in (True, False):
        of_matrices, of_vectors = (torch.Generator().manual_seed(3) for _ in range(2))
        shuffle(model, 3, vectors=vectors)
        for name, weight in model.named_parameters():
            generator = of_matrices if is_matrix(name, weight) else of_vectors if vectors else None
            order = slice(None) if generator is None else torch.randperm(weight.numel(), generator=generator)
            assert torch.equal(weight.flatten(), before[name].flatten()[order]), name
        shuffle(model, 3, vectors=vectors, undo=True)
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


# biases of queries and keys, joint ones, gains of qk-norm a head and over all heads
FAMILIES = ["llama", "falcon", "phi3", "qwen2", "neox", "qwen3", "olmo2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_keeps_its_entries_and_loses_their_order_vectors_within_each_head(family_model, backend, name):
    if name in ("falcon", "phi3", "olmo2") and backend == "hooked":
        pytest.skip("analysed as a bridge only")
    model = family_model(name, backend)
    before, after = weights(model), weights(shuffled_like(model, seed=0))
    only_matrices, d_head = weights(shuffled_like(model, 0, "shuffled matrices")), model.cfg.d_head
    assert any("qkv" in at for at in before) == (backend == "bridge" and name in ("falcon", "phi3", "neox"))
    matrices = [at for at in before if is_matrix(at, before[at])]
    assert len(matrices) >= 2 * 6 + 1  # q, k, v, o and the feed-forward matrices of two layers, and the embedding
    of_heads = []
    for at, weight in before.items():
        length = entries_together(at, weight, d_head)
        rows = (1, -1) if at in matrices or length == weight.numel() else (-1, length)
        of_heads += [at] if rows[0] == -1 else []
        if ("qkv" not in at and "gate_up" not in at) or at in of_heads:  # joint ones move by their parts
            one, other = (x[at].reshape(rows).sort().values for x in (before, after))
            assert torch.equal(one, other), at
        assert torch.equal(before[at], after[at]) <= (weight.unique().numel() == 1), at
        assert torch.equal(only_matrices[at], after[at] if at in matrices else before[at]), at
    expected = {"qwen2": 2 * 3, "neox": 2 * (3 if backend == "hooked" else 4), "olmo2": 2 * 2}
    moved = [at for at in of_heads if before[at].unique().numel() > 1]
    assert len(moved) == expected.get(name, 0), moved


def test_heads_of_each_layer_are_as_wide_as_its_own_attention_says(family_model, monkeypatch):
    model = family_model("qwen3", "bridge")
    names = [name for name, _ in model.named_parameters() if "q_norm" in name]
    attention = model.get_submodule(names[1].split("self_attn")[0] + "self_attn._original_component")
    monkeypatch.setattr(attention, "head_dim", 4)  # of 8 entries
    assert [head_width(model, name) for name in names] == [8, 4]


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_it_shares_nothing_with_the_model_and_can_be_analysed_alike(family_model, kind, name):
    model = family_model(name, kind)
    before = logits(model)
    null = shuffled_like(model, seed=0)
    found = logits(null)
    torch.testing.assert_close(logits(model), before)
    assert not torch.allclose(found, before, atol=1e-2)
    supported = [not isinstance(layer, UnsupportedModelError) for layer in session_of(model).layers()]
    assert [not isinstance(layer, UnsupportedModelError) for layer in session_of(null).layers()] == supported
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


def test_hooks_of_the_model_are_not_taken_along(llama):
    fired = []
    hook = ("blocks.0.attn.hook_attn_scores", lambda value, hook: fired.append(hook))
    with llama.hooks(fwd_hooks=[hook]):
        null = shuffled_like(llama, seed=0)
        logits(null)
        assert not fired
        logits(llama)
        assert fired


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
            found = run.report(nulls={"shuffled": (0,)})
    finally:
        llama.reset_hooks()
    assert found["variance"].numbers.nulls == ["shuffled 0"]


@pytest.mark.parametrize("null", [random_like, shuffled_like])
def test_the_seed_decides_and_no_random_state_is_touched(llama, unchecked, null):  # the type checker draws numbers
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first, again, other = (null(llama, seed) for seed in (0, 0, 1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()
    assert torch.equal(logits(first), logits(again))
    assert not torch.allclose(logits(first), logits(other))
    assert session_of(other).origin.seed == 1
    for seed in (-1, 2**32, True, 0.5):
        with pytest.raises(InputError, match=r"seed = .*give a whole number, 0 or more, below"):
            null(llama, seed)


@pytest.mark.parametrize("device", ["cuda", "meta", "cpu:x", ""])
def test_devices_that_cannot_draw_are_refused(llama, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (
        lambda: random_like(llama, 0, device),
        lambda: tl_posgen.analyze(llama, TOKENS, null_device=device, progress=False),
    ):
        with pytest.raises(InputError, match=f"null_device={re.escape(repr(device))}: random weights are drawn on cpu"):
            call()


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_weights_are_those_transformers_makes_from_the_seed(family_directory, family_model, backend, name):
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
    assert (origin.seed, origin.initialisation) == (5, "transformers, LlamaForCausalLM, initializer_range 0.02")
    assert origin.name == session_of(llama).origin.name


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
    assert session_of(null).origin.initialisation == "HookedTransformer, init_mode gpt2, initializer_range 0.141421"
    assert model.cfg.seed == 1


def test_a_bridge_that_load_model_did_not_make_has_a_null_from_its_config(family_directory):
    model = TransformerBridge.boot_transformers(str(family_directory("llama")), device="cpu")
    ours = random_like(load_model(family_directory("llama"), "bridge"), seed=4)
    assert torch.equal(logits(random_like(model, seed=4)), logits(ours))


@pytest.mark.usefixtures("needs_hooked")
def test_a_null_model_that_does_something_else_with_positions_is_refused(family_directory):
    model = load_model(family_directory("llama"), "hooked")
    for block in model.blocks:
        block.attn.attn_scale = 1.0  # which its cfg does not say
    assert session_of(model).layers()[0].geometry.scale == pytest.approx(1)
    with pytest.raises(
        InputError,
        match=r"random init \(seed 3\) of .* is no null model .*: its layer 0 has scale 0\.354 where the model has 1",
    ):
        tl_posgen.analyze(model, TOKENS, measures="variance", nulls={"random init": (3,)}, progress=False)


def test_a_model_that_was_cast_has_null_models(family_directory):
    model = load_model(family_directory("llama"), "bridge").to(torch.bfloat16)  # with the frequencies of its RoPE
    assert len(list(NullModels(model).models())) == 2


def test_other_frequencies_are_another_geometry(llama):
    here = session_of(llama).layers()
    rope = here[0].geometry.rope
    slow = replace(rope, inv_freq=torch.cat([rope.inv_freq[:-1], rope.inv_freq[-1:] * 1.1]))
    there = [replace(one, geometry=replace(one.geometry, rope=slow, error=1.0, sinks=True)) for one in here]
    assert re.fullmatch(r"layer 0 has rope \S+ where the model has \S+", first_difference(here, there))
    alike = [replace(one, geometry=replace(one.geometry, error=1.0, sinks=True)) for one in here]
    assert first_difference(here, alike) == ""


def test_kinds_of_null_models_are_these_alone(llama):
    assert list(NullModels(llama, {"shuffled": (0,), "random init": (1,)})) == ["shuffled 0", "1"]


@pytest.mark.parametrize("backend", ["auto", "bridge"])
def test_a_deep_copy_has_the_null_of_its_original(backend):
    model = load_model("mini", backend)
    same = copy.deepcopy(model)
    assert session_of(same).origin == session_of(model).origin
    assert fingerprint(session_of(random_like(same, 0))) == fingerprint(session_of(random_like(model, 0)))


@pytest.mark.parametrize("make", [random_like, shuffled_like])
def test_null_models_of_narrow_weights_turn_by_the_same_frequencies(family_directory, make):
    model = load_model(family_directory("llama"), "bridge", "bfloat16")
    null = make(model, seed=0)
    assert next(null.parameters()).dtype == torch.bfloat16
    own, other = (dict(one.named_buffers()) for one in (model, null))
    assert any("inv_freq" in name for name in own)
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_model_in_training_of_narrow_weights_is_copied_with_its_frequencies(family_directory):
    place = family_directory("llama")
    training = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    copied = snapshot(training, AutoTokenizer.from_pretrained(place), "bridge")
    assert torch.equal(session_of(copied).layer(0).geometry.rope.inv_freq.float(), training.model.rotary_emb.inv_freq)


def test_a_model_in_memory_has_the_random_inits_of_the_same_model_from_its_directory(family_directory, backend):
    """Whatever object it becomes; its name says that its weights are not those of the directory."""
    place = family_directory("llama")
    in_memory = snapshot(AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place), backend)
    nulls = [random_like(model, seed=0) for model in (in_memory, load_model(place, backend))]
    assert len({fingerprint(session_of(null)) for null in nulls}) == 1
    assert session_of(in_memory).label == f"{place.name}, weights in memory"
    assert session_of(in_memory).origin.initialisation is None
    assert session_of(nulls[0]).origin.initialisation == "transformers, LlamaForCausalLM, initializer_range 0.02"


def test_a_tokenizer_made_in_memory_will_do(family_directory, backend):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a", pad_token="a")
    training = AutoModelForCausalLM.from_pretrained(family_directory("llama"))
    assert snapshot(training, tokenizer, backend).to_tokens("b", prepend_bos=True).tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_model_read_twice_has_the_same_weights_throughout(family_directory, family_model, backend, name):
    first = fingerprint(session_of(family_model(name, backend)))
    junk = torch.full((2048, 32), 7.0)  # memory that weights left as they are found would have
    del junk
    assert fingerprint(session_of(load_model(family_directory(name), backend))) == first
