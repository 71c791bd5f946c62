"""Streaming: the same logits and the same captures as without, on every family; hooks fire; nothing is left behind."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from captures import EVERYTHING, captures_of, run
from drawn import token_ids
from families import ANALYSED, FAMILIES, GROUPED, save_config, with_sizes
from torch import Tensor

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layer_table import check
from tl_posgen.models.layers.capture import LayerCapture, StreamedCapture
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import Choices, session_of
from tl_posgen.models.streaming.stream import LONG, streaming, streaming_by_policy

N = 70
# those that are handed on show scores in no other way
STREAMED = [(name, kind) for name, kind in ANALYSED if not (FAMILIES[name].left_to_hf and kind == "bridge")]
TOKENS = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(2))


def captured(model, tokens, needs, choice) -> list[LayerCapture]:
    with session_of(model).choosing(Choices(choice)):
        return run(model, tokens, needs)


@pytest.mark.parametrize(("name", "backend"), STREAMED)
def test_streamed_captures_are_those_of_the_hook_route(name, backend, family_model):
    model = family_model(name, backend)
    tokens = torch.randint(model.cfg.d_vocab, (1, N), generator=torch.Generator().manual_seed(1))
    own, streamed = (captured(model, tokens, EVERYTHING, choice) for choice in (False, True))
    assert [one.layer for one in own] == [one.layer for one in streamed]
    for one, other in zip(own, streamed, strict=True):
        assert isinstance(other, StreamedCapture)
        for part in ("q", "k", "v", "resid", "pattern"):
            torch.testing.assert_close(getattr(other, part), getattr(one, part), atol=2e-5, rtol=1e-4)
        seen = one.attn_scores != -torch.inf
        torch.testing.assert_close(other.attn_scores[seen], one.attn_scores[seen], atol=1e-4, rtol=1e-4)
        assert torch.equal(other.pattern_rows(3, 9), other.of_heads(slice(None)).pattern_rows(3, 9))


@pytest.mark.parametrize(("name", "backend"), [("llama", "hooked"), ("llama", "bridge"), ("neox", "bridge")])
def test_hooks_on_scores_work_as_without_streaming(name, backend, family_model):
    model = family_model(name, backend)
    calls = []

    def double(scores: Tensor, hook) -> Tensor:
        calls.append(tuple(scores.shape[-2:]))
        return 2 * scores

    hooks = [("blocks.1.attn.hook_attn_scores", double)]
    own = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with streaming(model):
        streamed = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    torch.testing.assert_close(streamed, own, atol=1e-4, rtol=1e-4)
    assert calls == [(20, 20)] * 2


@pytest.mark.parametrize("name", ["llama", "neox", "bloom", "mistral"])
def test_hooks_see_hidden_keys_as_they_do_without_streaming(name, backend, family_model):
    model, seen = family_model(name, backend), []
    hooks = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: seen.append(scores.clone()))]
    for choice in (False, True):
        with streaming(model) if choice else nullcontext():
            model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    own, streamed = (torch.where(scores < -1e30, scores, 0) for scores in seen)
    assert (own < 0).any()
    assert torch.equal(own, streamed)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_capture_takes_the_edited_scores_of_a_streamed_pass(llama, by_rows):
    hooks = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: 2 * scores)]
    if by_rows:
        hooks = replace_scores(llama, RowByRow(lambda capture: 2 * capture.scores()), layers=[1])
    with streaming(llama):
        seen = captures_of(llama, TOKENS, frozenset(), hooks=hooks)
    assert [type(one).__name__ for one in seen] == ["StreamedCapture", "EditedCapture"]
    expected = 2 * captured(llama, TOKENS, frozenset(), False)[1].scores()
    torch.testing.assert_close(seen[1].scores(), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedModelError, match="hook that edits"):
        _ = seen[1].q


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("StableLmConfig", {"qk_layernorm": False}),
        ("StableLmConfig", {"qk_layernorm": True}),
        ("Glm4MoeConfig", {"use_qk_norm": False, **EXPERTS}),
        ("Glm4MoeConfig", {"use_qk_norm": True, **EXPERTS}),
    ],
)
def test_a_norm_that_only_some_models_of_an_architecture_have(config, options, tmp_path):
    model = load_model(save_config(with_sizes(config, GROUPED, **options)(), tmp_path), "bridge")
    own, streamed = (captured(model, TOKENS, EVERYTHING, choice) for choice in (False, True))
    for one, other in zip(own, streamed, strict=True):
        assert isinstance(other, StreamedCapture)
        assert one.geometry.qk_norm in options.values()
        torch.testing.assert_close(other.scores(), one.scores(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other.pattern, one.pattern, atol=2e-5, rtol=1e-4)
    with streaming(model):
        logits = model(TOKENS)
    torch.testing.assert_close(logits, model(TOKENS), atol=1e-4, rtol=1e-4)


def test_the_model_is_as_it_was(llama):
    before = llama(TOKENS)
    attributes = [copy.copy(vars(block.attn)).keys() for block in llama.blocks]
    with streaming(llama), streaming(llama):  # a second one changes nothing
        llama(TOKENS)
    with pytest.raises(ZeroDivisionError), streaming(llama):
        raise ZeroDivisionError
    assert session_of(llama).streamed.by is None
    assert [vars(block.attn).keys() for block in llama.blocks] == attributes
    assert torch.equal(llama(TOKENS), before)


def test_a_hook_that_fails_leaves_nothing_behind(llama):
    points = [getattr(block.attn, name) for block in llama.blocks for name in ("hook_attn_scores", "hook_pattern")]

    def fail(scores: Tensor, hook) -> Tensor:
        raise ZeroDivisionError

    hooks = [("blocks.0.attn.hook_attn_scores", fail)]
    edits = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: 2 * scores)]
    own = llama.run_with_hooks(TOKENS, fwd_hooks=edits)
    with streaming(llama):
        with pytest.raises(ZeroDivisionError):
            llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
        torch.testing.assert_close(llama.run_with_hooks(TOKENS, fwd_hooks=edits), own, atol=1e-4, rtol=1e-4)
        with pytest.raises(ZeroDivisionError):
            llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert [len(point._forward_hooks) for point in points] == [0] * 4


def test_tokens_are_generated_as_without_streaming(llama):
    """Queries then meet keys of earlier passes, which a cache holds."""
    found = []
    for choice in (False, True):
        with streaming(llama) if choice else nullcontext():
            found.append(llama.generate(TOKENS, max_new_tokens=4, do_sample=False, verbose=False, stop_at_eos=False))
    assert torch.equal(*found)


def test_gradients_flow(llama):
    weight = next(one for one in llama.parameters() if one.ndim > 1)
    found = []
    for choice in (False, True):
        llama.zero_grad()
        with streaming(llama) if choice else nullcontext():
            llama(TOKENS).logsumexp(-1).sum().backward()
        found.append(weight.grad.clone())
    llama.zero_grad()
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)


def test_a_pass_whose_geometry_changed_is_refused_with_the_layer(backend, family_model):
    model = family_model("mistral", backend)
    tokens = torch.arange(40)[None]
    with streaming(model):
        if backend == "hooked":
            before, model.cfg.window_size = model.cfg.window_size, 3
        else:
            held = session_of(model).streamed.by.geometries
            before = held[1]
            held[1] = replace(before, window=3)
        try:
            with pytest.raises(UnsupportedModelError, match=r"L[01]H\d, query \d+ of 40"):
                model(tokens)
        finally:
            if backend == "hooked":
                model.cfg.window_size = before


def test_a_soft_cap_that_changed_after_it_was_proved_is_refused(family_model):
    model = family_model("gemma2", "bridge")
    module = model.blocks[1].attn.original_component
    with streaming(model):
        held, module.attn_logit_softcapping = module.attn_logit_softcapping, 7.0
        try:
            with pytest.raises(UnsupportedModelError, match=r"layer 1: .* soft cap of 7.0, and 50.0 was proved"):
                model(TOKENS)
        finally:
            module.attn_logit_softcapping = held
        model(TOKENS)


def test_long_prompts_are_streamed_and_short_ones_are_not(family_model):
    session = session_of(family_model("llama", "bridge"))
    for choice, n, expected in [(None, LONG + 1, True), (None, LONG, False), (False, LONG + 1, False), (True, 8, True)]:
        with session.choosing(Choices(choice)), streaming_by_policy(session, n):
            assert (session.streamed.by is not None) == expected


def test_settings_that_change_the_steps_of_attention_are_refused(family_model):
    model = family_model("qwen2", "hooked")
    model.cfg.use_attn_result = True
    try:
        with pytest.raises(UnsupportedModelError, match="use_attn_result"), streaming(model):
            pass
    finally:
        model.cfg.use_attn_result = False
    with streaming(model):  # nothing of it is remembered
        pass


def test_losses_of_long_prompts_are_streamed_and_the_same(mini_bridge):
    tokens, forms = token_ids(1, LONG + 20, seed=6, low=0, high=mini_bridge.cfg.d_vocab), []
    edit = [("blocks.0.attn.hook_pattern", lambda pattern, hook: forms.append(pattern.shape[-1]) or pattern)]
    found = []
    for choice, hooks in ((False, []), (None, []), (None, edit)):
        with session_of(mini_bridge).choosing(Choices(choice)):
            found.append(token_losses(mini_bridge, tokens, hooks))
    for streamed in found[1:]:
        torch.testing.assert_close(streamed, found[0], atol=1e-4, rtol=1e-4)
    assert forms == [LONG + 20]


def test_a_model_is_looked_at_anew_while_it_is_streamed(llama):
    """`check`, and another dtype, inside the block; what follows is streamed again, and nothing is left behind."""
    model = copy.deepcopy(llama)
    tokens = torch.arange(9)[None]
    before = model(tokens)
    with streaming(model):
        check(model)
        assert session_of(model).streamed.by is not None
        model.to(torch.float64)
        run_capture(model, tokens, lambda capture: None)
        assert torch.allclose(model(tokens).float(), before, atol=1e-4)
    assert session_of(model).streamed.by is None
    assert torch.allclose(model.to(torch.float32)(tokens), before, atol=1e-5)


def test_first_use_inside_a_hook_of_its_own_is_one_line(backend):
    model = load_model("mini", backend=backend)

    def hook(z, hook):
        with streaming(model):
            return z

    with pytest.raises(InputError, match=r"looked at for the first time; call tl_posgen.check\(model\) before"):
        model.run_with_hooks(torch.arange(9)[None], fwd_hooks=[("blocks.1.attn.hook_z", hook)])
    check(model)
    model.run_with_hooks(torch.arange(9)[None], fwd_hooks=[("blocks.1.attn.hook_z", hook)])
