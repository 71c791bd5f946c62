"""Attention that a bridge leaves to Hugging Face: its scores show, and can be edited, while it is streamed."""

import copy

import pytest
import torch
from captures import captures_of, run
from families import FAMILIES, SIZES, save_config, with_sizes

import tl_posgen
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import Choices, session_of
from tl_posgen.models.streaming.stream import streaming

NAMES = [name for name, family in FAMILIES.items() if family.left_to_hf]
N = 60  # beyond the probe's 48 tokens
TOKENS = torch.randint(2, 60, (2, N), generator=torch.Generator().manual_seed(3))


def double(scores, hook):
    return 2 * scores


@pytest.mark.parametrize("name", NAMES)
def test_patterns_are_those_of_hugging_face(family_model, name):
    model = family_model(name, "bridge")
    captures = run(model, TOKENS, {"attn_scores", "pattern"})
    with torch.no_grad(), session_of(model).backend.plain() as plain:
        attentions = plain(TOKENS, output_attentions=True).attentions
    assert len(captures) == 4
    for capture in captures:
        actual = attentions[capture.layer][capture.prompt]
        torch.testing.assert_close(capture.pattern, actual, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(capture.scores().softmax(-1), actual, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "scale"), [("gptj", "scale_attn"), ("opt", "scaling"), ("llama4", "scaling")])
def test_edited_scores_are_used(family_model, name, scale):
    """Doubled scores: the same as a model whose attention scales them by twice as much."""
    model = family_model(name, "bridge")
    hooks = [(f"blocks.{layer}.attn.hook_attn_scores", double) for layer in range(2)]
    own = token_losses(model, TOKENS)
    actual = token_losses(model, TOKENS, hooks)
    modules = [block.attn.original_component for block in model.blocks]
    held = [getattr(module, scale) for module in modules]
    for module, value in zip(modules, held, strict=True):
        setattr(module, scale, value / 2 if scale == "scale_attn" else value * 2)
    try:
        with torch.no_grad(), session_of(model).backend.plain() as plain:
            expected = plain(TOKENS).logits.double().log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
    finally:
        for module, value in zip(modules, held, strict=True):
            setattr(module, scale, value)
    torch.testing.assert_close(actual, -expected, atol=1e-5, rtol=1e-4)
    assert (actual - own).abs().max() > 0.01


def test_a_block_of_the_users_own_passes_is_captured(family_model):
    model = family_model("gptj", "bridge")
    captures, own = (route(model, TOKENS[:1]) for route in (captures_of, run))
    assert torch.equal(captures[1].q, own[1].q)
    assert session_of(model).streamed.by is None


def test_check_says_so(family_model, capsys):
    table = tl_posgen.check(family_model("opt", "bridge"))
    assert table["streamed"].tolist() == [True, True]
    assert "streamed" in capsys.readouterr().out


def test_layers_with_keys_of_their_own_are_measured_beside_others(tmp_path, capsys):
    """Gemma 4, whose last layers take the keys of earlier ones."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 2}
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
    embeddings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    config = with_sizes("Gemma4TextConfig", SIZES, **sizes, **windows, **embeddings)()
    model = tl_posgen.load_model(save_config(config, tmp_path), "bridge")
    assert tl_posgen.check(model)["supported"].tolist() == [True, True, False, False]
    assert "its hook_k does not fire" in capsys.readouterr().out
    captures = run(model, TOKENS, {"pattern"}, layers=[0, 1])
    with torch.no_grad(), session_of(model).backend.plain() as plain:
        attentions = plain(TOKENS, output_attentions=True).attentions
    for capture in captures:
        torch.testing.assert_close(capture.pattern, attentions[capture.layer][capture.prompt], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_passes_that_show_no_scores_are_refused(family_model, name):
    model = family_model(name, "bridge")
    hooks = replace_scores(model, lambda capture: capture.scores())
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .*with tl_posgen.streaming"):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with streaming(model), torch.no_grad():
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with (
        session_of(model).choosing(Choices(False)),
        pytest.raises(InputError, match="only while its attention is streamed"),
    ):
        run_capture(model, TOKENS, lambda _: None)


def test_a_cache_of_patterns_is_refused(family_model):
    model = copy.deepcopy(family_model("opt", "bridge"))  # transformers records attentions twice after it
    measured = {"tokens": TOKENS, "measures": ["three_axis"]}
    _, cache = model.run_with_cache(TOKENS)
    with pytest.raises(InputError, match="holds the pattern after softmax"):
        tl_posgen.analyze_cache(model, cache, **measured)
    with streaming(model):
        _, cache = model.run_with_cache(TOKENS)
    r = tl_posgen.analyze_cache(model, cache, **measured)["three_axis"].dataset["r"]
    own = tl_posgen.analyze(model, TOKENS, measures=["three_axis"], nulls=0)["three_axis"].dataset["r"]
    assert float(abs(r - own).max()) < 1e-4
