"""A bridge is held against the Hugging Face model that it is made of."""

import pytest
import torch
from families import GROUPED, save_config, with_sizes
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layer_table import check, geometry_of
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of

TOKENS = torch.arange(2, 42)[None]


def test_a_bridge_that_computes_something_else_is_refused_wherever_it_is_met(tmp_path):
    """HunYuan: its bridge normalises queries and keys before RoPE, Hugging Face after it."""
    directory = save_config(with_sizes("HunYuanDenseV1Config", GROUPED, head_dim=8)(), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(str(directory), device="cpu")
    bridge.eval()
    with torch.no_grad():
        if torch.allclose(bridge(TOKENS), plain(TOKENS).logits, rtol=1e-3, atol=1e-3):
            pytest.skip("this TransformerLens has put it right")
    message = "this TransformerBridge computes something else .*logits differ by .*, the largest being"
    with pytest.raises(UnsupportedModelError, match=message):
        geometry_of(bridge)
    table = check(bridge, printed=False)
    assert not table["supported"].any()
    assert "computes something else" in table["refusal"][0]
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        load_model(directory, "bridge")
    processed = TransformerBridge.boot_transformers(str(directory), device="cpu")
    processed.enable_compatibility_mode(disable_warnings=True)  # which hides nothing
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        geometry_of(processed.eval())


@pytest.mark.parametrize("name", ["llama", "neox", "qwen3", "gemma2", "gpt2", "bloom", "opt", "gptj"])
def test_the_plain_model_is_lent_and_put_back_after_an_error_too(family_directory, name):
    bridge = load_model(family_directory(name), "bridge")
    plain = AutoModelForCausalLM.from_pretrained(family_directory(name), attn_implementation="eager").eval()
    modules = [id(module) for module in bridge.modules()]
    with torch.no_grad():
        before = bridge(TOKENS)
        with session_of(bridge).backend.plain() as lent:
            torch.testing.assert_close(lent(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=0)
        assert torch.equal(bridge(TOKENS), before)
    assert [id(module) for module in bridge.modules()] == modules
    with pytest.raises(ZeroDivisionError), session_of(bridge).backend.plain():
        raise ZeroDivisionError
    assert [id(module) for module in bridge.modules()] == modules


def test_hooks_of_the_user_are_not_held_against_a_bridge(family_directory):
    """They are part of what is analysed; the proof of every pass looks at them."""
    bridge = load_model(family_directory("llama"), "bridge")
    calls = []
    bridge.add_hook("blocks.1.hook_resid_pre", lambda x, hook: calls.append(1) or 2 * x)
    assert session_of(bridge).difference(again=True) == ""
    assert not calls
    with torch.no_grad():
        bridge(TOKENS)
    assert calls


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_processed_weights_are_the_same_model(family_directory, name):
    bridge = load_model(family_directory(name), "bridge")
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert session_of(bridge).difference(again=True) == ""


@pytest.mark.parametrize("name", ["llama", "neox", "bloom", "falcon"])
def test_weights_changed_under_a_bridge_are_its_own(family_directory, name):
    """Where the bridge splits a joint matrix, the plain model does not see the change."""
    bridge = load_model(family_directory(name), "bridge")
    with torch.no_grad():
        bridge.blocks[0].attn.W_Q.mul_(1.5)
    assert session_of(bridge).difference(again=True) == ""


@pytest.fixture
def llama(family_directory):
    """A bridge of its own, and what adds to the logits of the bridge alone: the plain model does not call its parts."""
    bridge = load_model(family_directory("llama"), "bridge")
    return bridge, lambda change: bridge.unembed.register_forward_hook(lambda module, args, out: out + change)


def test_a_bridge_that_is_right_is_compared_with_nothing_else(llama, monkeypatch):
    backend = session_of(llama[0]).backend
    monkeypatch.setattr(type(backend), "random_init", None)
    assert session_of(llama[0]).difference(again=True) == ""


def test_logits_may_differ_by_a_thousandth_of_the_largest_and_by_constants(llama):
    bridge, add = llama
    with torch.no_grad():
        logits = bridge(torch.randint(bridge.cfg.d_vocab, (1, 48), generator=torch.Generator().manual_seed(0)))
    largest = float((logits - logits.mean(-1, keepdim=True)).abs().max())
    n = bridge.cfg.d_vocab
    for share, differs in [(0.9, False), (1.1, True)]:
        change = torch.arange(48.0)[:, None].expand(48, n).clone()  # softmax cannot tell a constant per token
        change[40, 7] += share * 1e-3 * largest * n / (n - 1)  # of which the mean over the vocabulary takes its part
        handle = add(change)
        found = session_of(bridge).backend.compare_with_hf()
        handle.remove()
        assert bool(found) == differs
    assert f"logits differ by {1.1e-3 * largest:.2g}, the largest being {largest:.2g}" in found


def test_a_plain_model_that_cannot_run_is_a_difference(llama):
    bridge, _ = llama

    def fail(module, args):
        raise RuntimeError("no kernel\nfor this")

    bridge.original_model.register_forward_pre_hook(fail)
    found = session_of(bridge).backend.compare_with_hf()
    assert found == "the Hugging Face model that it wraps cannot run (no kernel)"


def test_a_processed_bridge_and_a_model_made_of_none_have_no_plain_model(llama, mini):
    bridge, _ = llama
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert session_of(bridge).backend.compare_with_hf() is None
    assert session_of(mini).difference() == ""
