"""A bridge is held against the Hugging Face model that it is made of."""

import pytest
import torch
from families import GROUPED, save_config, with_sizes

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.load import load_model
from tl_posgen.models.probe import check, geometry_of
from tl_posgen.models.wrapped import wrap

TOKENS = torch.arange(2, 42)[None]


@pytest.fixture
def directory(tmp_path):
    """HunYuan: its bridge normalises queries and keys before RoPE, Hugging Face after it."""
    return save_config(with_sizes("HunYuanDenseV1Config", GROUPED, head_dim=8)(), tmp_path)


@pytest.fixture
def hunyuan(directory):
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(str(directory), device="cpu")
    bridge.eval()
    with torch.no_grad():
        if torch.allclose(bridge(TOKENS), plain(TOKENS).logits, rtol=1e-3, atol=1e-3):
            pytest.skip("this TransformerLens has put it right")
    return bridge


def test_a_bridge_that_computes_something_else_is_refused(hunyuan):
    message = "layer 0: the residual streams part here; .*logits differ by .*, the largest being"
    with pytest.raises(UnsupportedModelError, match=message):
        geometry_of(hunyuan)
    table = check(hunyuan, printed=False)
    assert not table["supported"].any()
    assert "computes something else" in table["refusal"][0]


def test_it_is_refused_when_loaded(hunyuan, directory):
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        load_model(directory, "bridge")


@pytest.mark.parametrize("name", ["llama", "neox", "qwen3", "gemma2", "gpt2", "bloom", "opt", "gptj"])
def test_the_plain_model_is_lent_and_put_back(family_directory, name):
    from transformers import AutoModelForCausalLM

    bridge = load_model(family_directory(name), "bridge")
    plain = AutoModelForCausalLM.from_pretrained(family_directory(name), attn_implementation="eager").eval()
    modules = [id(module) for module in bridge.modules()]
    with torch.no_grad():
        before = bridge(TOKENS)
        with wrap(bridge).backend.plain() as lent:
            torch.testing.assert_close(lent(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=0)
        assert torch.equal(bridge(TOKENS), before)
    assert [id(module) for module in bridge.modules()] == modules


def test_it_is_put_back_after_an_error(family_directory):
    bridge = load_model(family_directory("llama"), "bridge")
    modules = [id(module) for module in bridge.modules()]
    with pytest.raises(ZeroDivisionError), wrap(bridge).backend.plain():
        raise ZeroDivisionError
    assert [id(module) for module in bridge.modules()] == modules


def test_hooks_of_the_user_are_not_held_against_a_bridge(family_directory):
    """They are part of what is analysed; the proof of every pass looks at them."""
    bridge = load_model(family_directory("llama"), "bridge")
    calls = []
    bridge.add_hook("blocks.1.hook_resid_pre", lambda x, hook: calls.append(1) or 2 * x)
    assert wrap(bridge).difference(again=True) == ""
    assert not calls
    with torch.no_grad():
        bridge(TOKENS)
    assert calls


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_processed_weights_are_the_same_model(family_directory, name):
    bridge = load_model(family_directory(name), "bridge")
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert wrap(bridge).difference(again=True) == ""


@pytest.mark.parametrize("name", ["llama", "neox", "bloom", "falcon"])
def test_weights_changed_under_a_bridge_are_its_own(family_directory, name):
    """Where the bridge splits a joint matrix, the plain model does not see the change."""
    bridge = load_model(family_directory(name), "bridge")
    with torch.no_grad():
        bridge.blocks[0].attn.W_Q.mul_(1.5)
    assert wrap(bridge).difference(again=True) == ""


def test_compatibility_mode_hides_nothing(hunyuan):
    hunyuan.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        geometry_of(hunyuan)
