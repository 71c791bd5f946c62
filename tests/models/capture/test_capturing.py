"""Capture hands every layer of every prompt to the consumer, and leaves the model as it was."""

import pytest
import torch
from captures import EVERYTHING, assert_same_parts, captures_of, run
from families import FAMILIES, GROUPED, VOCAB, save_config, with_sizes

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of


def some_tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def captured(model, tokens=None, needs=frozenset(), **options):
    return run(model, some_tokens() if tokens is None else tokens, needs, **options)


def processed(model, backend):
    model.process_weights_() if backend == "hooked" else model.enable_compatibility_mode(disable_warnings=True)


SETTINGS = {
    "processed": processed,
    "split inputs": lambda model, backend: model.set_use_split_qkv_input(True),
    "ungrouped": lambda model, backend: backend == "hooked" and model.set_ungroup_grouped_query_attention(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_capture_works_in_the_other_modes_of_a_model(family_directory, backend, name, setting):
    model = load_model(family_directory(name), backend)
    SETTINGS[setting](model, backend)
    captures = captures_of(model, some_tokens())
    assert [(c.layer, c.prompt) for c in captures] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for capture in captures:
        torch.testing.assert_close(capture.scores(), capture.attn_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "bloom", "gptj"])
def test_both_backends_hand_over_the_same(family_model, name):
    both = [captured(family_model(name, backend), needs=EVERYTHING) for backend in ("hooked", "bridge")]
    for hooked, bridge in zip(*both, strict=True):
        assert_same_parts(hooked, bridge, rtol=1e-3, atol=2e-5)


def test_captures_come_layer_by_layer_with_the_prompts_numbered(llama):
    for _ in range(2):  # each counts its prompts anew
        assert [(c.layer, c.prompt) for c in captured(llama)] == [(0, 0), (0, 1), (1, 0), (1, 1)]

    captures = []
    with capturing(llama, captures.append), torch.no_grad():
        llama(some_tokens(2))
        llama(some_tokens(1))
    assert [(c.layer, c.prompt) for c in captures] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


def test_grouped_heads_share_keys_values_and_one_matrix(llama):
    capture = captured(llama, needs=frozenset({"v"}))[0]
    assert capture.k.shape == capture.v.shape == capture.q.shape == (4, 20, 8)
    torch.testing.assert_close(capture.k[0], capture.k[1])
    assert not torch.equal(capture.k[1], capture.k[2])
    projections = session_of(llama).projections(0)
    assert (len(projections.w_q), len(projections.w_k)) == (4, 2)
    keys = projections.keys(torch.ones(3, 32))
    torch.testing.assert_close(keys[0], keys[1])


def test_logits_are_bit_equal_with_and_without_capture_and_captures_need_no_gradient(llama):
    tokens, captures = some_tokens(), []
    before = llama(tokens)
    with capturing(llama, captures.append, needs=EVERYTHING):
        during = llama(tokens)
    assert torch.equal(before, during)
    assert not any(getattr(c, name).requires_grad for c in captures for name in ("q", "k", *EVERYTHING))


def test_hooks_are_removed_when_the_consumer_fails(llama):
    def fail(capture):
        raise RuntimeError("stop here")

    def hooks_on_it() -> list[int]:
        return [
            len(hooks) for module in llama.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    geometry_of(llama)
    before = hooks_on_it()
    with pytest.raises(RuntimeError, match="stop here"):
        run_capture(llama, some_tokens(), fail, {"inputs"})
    with pytest.raises(RuntimeError, match="stop here"), capturing(llama, fail, {"inputs"}):
        llama(some_tokens())
    assert hooks_on_it() == before


@pytest.mark.parametrize(("dtype", "captured_as"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_activations_are_captured_in_float32_at_least(family_directory, backend, dtype, captured_as):
    model = load_model(family_directory("llama"), backend, dtype)
    capture = captured(model, needs=EVERYTHING | {"inputs"})[0]
    for name in ("q", "k", "v", "attn_scores", "pattern", "resid", "inputs"):
        assert getattr(capture, name).dtype == captured_as, name
    assert capture.projections.w_q.dtype == captured_as
    assert (capture.scores() - capture.attn_scores).nan_to_num().abs().max() < 0.1


def test_a_pass_that_broke_off_leaves_nothing_for_the_next(llama):
    captures = []
    with torch.no_grad(), capturing(llama, captures.append):
        with pytest.raises(ZeroDivisionError):
            llama.run_with_hooks(some_tokens(), fwd_hooks=[("blocks.0.attn.hook_k", lambda k, hook: 1 / 0)])
        llama(some_tokens(1, 9))
    assert [c.q.shape[1] for c in captures] == [9, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "layer 2 does not exist: this model has layers 0 to 1"),
        ({"needs": frozenset({"logits"})}, "cannot capture logits; choose from"),
        ({"needs": "pattern"}, r"needs='pattern': give a set of names, such as needs=\{'pattern'\}"),
    ],
)
def test_what_does_not_exist_is_refused_before_the_model_runs(llama, unchecked, options, message):
    with pytest.raises(InputError, match=message), capturing(llama, print, **options):
        pass


def test_rope_beyond_the_context_is_captured_where_the_model_allows_it(family_model):
    capture = captured(family_model("llama", "bridge"), some_tokens(1, 200), needs=EVERYTHING)[-1]
    torch.testing.assert_close(capture.scores(), capture.attn_scores, rtol=1e-3, atol=1e-4)


def test_a_window_longer_than_the_probe_is_checked_when_it_is_crossed(tmp_path):
    """The probe reads 48 tokens; a window of 60 that the model does not really have shows only on longer prompts."""
    directory = save_config(with_sizes("MistralConfig", GROUPED, sliding_window=60)(), tmp_path)
    model = load_model(directory, "bridge")
    capture = captured(model, some_tokens(1, 100), needs=EVERYTHING)[0]
    torch.testing.assert_close(capture.scores(), capture.attn_scores, rtol=1e-3, atol=1e-4)

    def unmask(scores, hook):
        return scores.clamp(min=-10.0).tril() + torch.full_like(scores, -torch.inf).triu(1)

    hooks = [("blocks.0.attn.hook_attn_scores", unmask)]
    with pytest.raises(UnsupportedModelError, match=r"L0H0, query 60 sees other keys than its mask gives"):
        captures_of(model, some_tokens(1, 100), hooks=hooks)[0].scores()


def test_capture_stops_at_the_last_chosen_layer(llama):
    seen = []
    with llama.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda q, hook: seen.append(q))]):
        captured(llama, layers=[0])
    assert seen == []


def test_heads_may_differ_from_layer_to_layer(llama):
    heads = [(1, 3), (0, 2), (1, 0)]
    whole = captured(llama, needs=EVERYTHING)
    for route in (run, captures_of):
        captures = route(llama, some_tokens(), heads=heads)
        chosen = [(c.layer, c.prompt, list(c.heads)) for c in captures]
        assert chosen == [(0, 0, [2]), (0, 1, [2]), (1, 0, [0, 3]), (1, 1, [0, 3])], route
        for capture, everything in zip(captures, whole, strict=True):
            for name in ("q", "k", "v", "attn_scores", "pattern"):
                assert torch.equal(getattr(capture, name), getattr(everything, name)[capture.heads]), (route, name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3", "gemma3", "olmo2", "phi3", "llama4"])
@pytest.mark.parametrize("route", [run, captures_of])
def test_one_pass_gives_the_inputs_of_queries_and_keys_beside_the_rest(family_model, backend, name, route):
    if backend == "hooked" and not FAMILIES[name].hooked:
        pytest.skip("this family is a bridge's only")
    model, passes = family_model(name, backend), []
    handle = model.embed.register_forward_hook(lambda *_: passes.append(1))
    route(model, some_tokens())  # looked at for the first time, and streamed where it must be
    passes.clear()
    with torch.no_grad():
        captures = route(model, some_tokens(), EVERYTHING | {"inputs"})
    handle.remove()
    assert len(passes) == 1
    assert [(c.layer, c.prompt) for c in captures] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for capture, plain in zip(captures, captured(model, needs=EVERYTHING), strict=True):
        assert capture.inputs.shape == (20, 32)
        torch.testing.assert_close(capture.projections.queries(capture.inputs), capture.q, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(capture.projections.keys(capture.inputs), capture.k, atol=1e-4, rtol=1e-4)
        assert_same_parts(capture, plain)


def test_queries_that_do_not_come_from_the_inputs_are_refused_while_capturing(llama):
    def double_one_prompt(q, hook):
        return torch.cat([q[:1], 2 * q[1:]])

    hooks = [("blocks.1.attn.hook_q", double_one_prompt)]
    with llama.hooks(fwd_hooks=hooks), torch.no_grad(), capturing(llama, lambda capture: None, {"inputs"}):
        llama(some_tokens()[:1])
        with pytest.raises(UnsupportedModelError, match="layer 1: its q differs"):
            llama(some_tokens())


@pytest.mark.parametrize("layers", [None, [0]])
def test_logits_are_those_of_the_model_whatever_the_layers(llama, layers):
    captures = []
    found = run_capture(llama, some_tokens(), captures.append, {"logits", "pattern"}, layers=layers)
    with torch.no_grad():
        assert torch.equal(found, llama(some_tokens()))
    assert [c.layer for c in captures] == ([0, 0, 1, 1] if layers is None else [0, 0])
    assert run_capture(llama, some_tokens(), lambda capture: None, layers=layers) is None  # not asked for
    assert captures[0].pattern is not None


def test_a_bias_is_found_where_the_model_has_one(family_model, backend):
    biased, plain = (session_of(family_model(name, backend)).projections(0) for name in ("qwen2", "llama"))
    assert biased.b_q.abs().max() > 0.1
    assert plain.b_q is None or not plain.b_q.any()


def test_an_input_split_by_head_is_refused(family_model):
    model = family_model("gpt2", "hooked")
    model.set_use_split_qkv_input(True)
    try:
        with pytest.raises(InputError, match="set_use_split_qkv_input"):
            run_capture(model, some_tokens(), lambda capture: None, {"inputs"})
    finally:
        model.set_use_split_qkv_input(False)
