"""Fingerprints and numbers of weights."""

import hashlib
import math

import pytest
import torch
from families import FAMILIES, GROUPED, save_config, with_sizes
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from tl_posgen.models import provenance
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.provenance import fingerprint, provenance_of
from tl_posgen.models.session import session_of


def one_by_one(model) -> str:
    """The fingerprint as its definition says it, a transfer a number."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // 4096)].double().numpy()
        parts = [part.double() for part in flat.split(provenance.PART)]
        total, norm = (
            sum(float(p.sum()) for p in parts),
            math.hypot(*(float(torch.linalg.vector_norm(p)) for p in parts)),
        )
        digest.update(f"{name} {tuple(weight.shape)} {total} {norm}".encode() + some.tobytes())
    return digest.hexdigest()[:16]


def test_a_fingerprint_takes_few_transfers_and_is_that_of_each_weight_alone(llama, monkeypatch):
    transfers, to_cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(provenance, "PART", 100)  # several parts
    expected = one_by_one(llama)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(len(x)) or to_cpu(x))
    assert fingerprint(session_of(llama)) == expected
    assert len(transfers) == 1


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
