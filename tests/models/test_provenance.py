"""Fingerprints and numbers of weights."""

import hashlib
import re

import numpy as np
import pytest
import torch
from families import FAMILIES, GROUPED, save_config, with_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from tl_posgen.models import provenance
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.provenance import fingerprint, logits_digest, provenance_of
from tl_posgen.models.session import session_of


def by_definition(tensors, block) -> str:
    """The digest as its definition says it: whole numbers of Python, modulo 2^64."""
    factors = torch.randint(-(2**62), 2**62, (provenance._BLOCK,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        kind = {1: np.int8, 2: np.int16}.get(tensor.element_size(), np.int32)
        words = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), kind).tolist()
        for start in range(0, len(words) + 1, block):  # the last one is not whole, and may be empty
            total = sum(w * c for w, c in zip(words[start : start + block], factors.tolist(), strict=False))
            digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("at_once", [1, 64, 10**6])  # words
def test_a_digest_is_that_of_its_definition_in_one_transfer(monkeypatch, at_once):
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = {f"{kind} {n}": (3 * torch.randn(n)).to(kind) for kind in kinds for n in (0, 1, 15, 16, 50, 96)}
    monkeypatch.setattr(provenance, "_BLOCK", 16)
    monkeypatch.setattr(provenance, "_IN_CACHE", at_once)
    expected, transfers, to_cpu = by_definition(tensors, 16), [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(len(x)) or to_cpu(x))
    assert provenance.digest_of(tensors, torch.device("cpu")) == expected
    assert len(transfers) == 1


def digest(x) -> str:
    return provenance.digest_of({"x": x}, x.device)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.integers(1, 9), st.sampled_from([torch.float32, torch.half, torch.bfloat16]), st.data())
def test_entries_elsewhere_and_other_signs_give_another_digest(rows, columns, dtype, data):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    one, other = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    swapped = x.clone()
    swapped[[one, other]] = x[[other, one]]
    signs = torch.ones(rows, 1, dtype=dtype)
    signs[[one, other]] = -1
    other_dtype = x.half() if dtype == torch.float32 else x.float()
    some = [x, swapped, x.flip(0), x * signs, -x, x.reshape(columns, rows), other_dtype]
    some += [] if columns == 1 else [x.flip(1)]
    different = {(tensor.dtype, tensor.shape, *tensor.double().flatten().tolist()) for tensor in some}
    assert len({digest(tensor) for tensor in some}) == len(different)
    assert digest(x) == digest(x.T.contiguous().T) == digest(torch.stack([x, x])[1])  # of the values, however they lie


def test_a_fingerprint_is_of_every_byte_of_parameters_and_buffers_tied_ones_once(family_directory, backend):
    model = load_model(family_directory("llama"), backend)
    session, seen = session_of(model), set[str]()
    seen.add(first := fingerprint(session))
    weight = max(model.parameters(), key=lambda one: one.shape[0])  # an embedding
    with torch.no_grad():
        weight[[3, 7]] = weight[[7, 3]]
        seen.add(fingerprint(session))
        weight[[3, 7]] = weight[[7, 3]]
        assert fingerprint(session) == first
        table = next(x for name, x in sorted(model.named_buffers()) if re.search("inv_freq|rotary_sin", name))
        table[-1] *= 1 + 1e-6
        seen.add(fingerprint(session))
    assert len(seen) == 3
    list(model.modules())[-1].tied = weight  # the same parameter once more
    assert fingerprint(session) in seen


def test_logits_show_what_weights_do_not(family_directory, backend):
    model = load_model(family_directory("llama"), backend)
    session = session_of(model)
    before = logits_digest(session)
    assert before == logits_digest(session)
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.001)
    assert logits_digest(session) != before
    handle.remove()
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z[:, 100])]):  # for longer prompts
        assert logits_digest(session) == before
    model.forward = lambda *args, **options: torch.zeros(1)[100]
    assert logits_digest(session) is None


def test_memory_that_alibi_leaves_unused_is_no_weight(family_directory, has_hooked):
    if not has_hooked:
        pytest.skip("no HookedTransformer here")
    model = load_model(family_directory("bloom"), "hooked")
    first = fingerprint(session_of(model))
    torch.nn.init.normal_(model.pos_embed.W_pos)
    assert fingerprint(session_of(model)) == first


TIED = with_sizes("LlamaConfig", GROUPED, tie_word_embeddings=True)
COUNTED = [("tied", "hooked"), *((name, one) for name in ("llama", "neox", "phi3") for one in ("hooked", "bridge"))]


@pytest.mark.parametrize(("name", "kind"), [("tied", "bridge"), *(one for one in COUNTED if one != ("phi3", "hooked"))])
def test_parameters_are_those_of_transformers_tied_ones_once(tmp_path, has_hooked, name, kind):
    """TransformerLens copies tied embeddings, adds biases, and splits joint matrices beside them."""
    if kind == "hooked" and not has_hooked:
        pytest.skip("no HookedTransformer here")
    directory = save_config((TIED if name == "tied" else FAMILIES[name].config)(), tmp_path)
    model = load_model(directory, kind)
    expected = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(directory).parameters())
    for one in (model, random_like(model, 0)):
        assert provenance_of(session_of(one), [])["parameters"] == expected


def test_parameters_of_an_object_of_the_users_own_are_counted_too(tmp_path, has_hooked):
    directory = save_config(TIED(), tmp_path)
    expected = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(directory).parameters())
    bridge = TransformerBridge.boot_transformers(str(directory), device="cpu")
    assert session_of(bridge).backend.n_parameters() == expected
    if has_hooked:
        backend = session_of(load_model(directory, "hooked")).backend
        biases = sum(one.numel() for name, one in backend.model.named_parameters() if "b_" in name)
        assert backend.count_parameters() == expected + biases  # TransformerLens' biases, zeros here, are weights


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("llama", "transformers, LlamaForCausalLM, initializer_range 0.02"),
        ("gptoss", "transformers, GptOssForCausalLM, initializer_range 0.02, its own _init_weights"),
    ],
)
def test_a_report_says_by_which_rule_its_random_inits_were_drawn(tmp_path, family, rule, backend):
    if family == "gptoss":
        config = with_sizes("GptOssConfig", GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)()
        backend = "bridge"
    else:
        config = FAMILIES[family].config()
    session = session_of(load_model(save_config(config, tmp_path), backend))
    tokens = [torch.arange(4, 20)]
    assert provenance_of(session, tokens, {"random init": [0]})["random_init"] == rule
    assert session_of(random_like(session, 0)).origin.initialisation == rule
    assert "random_init" not in provenance_of(session, tokens, {"random init": []})
