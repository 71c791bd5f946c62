"""The probe describes every family, on every backend that has it, and its description reproduces the model's scores."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from captures import run
from families import ANALYSED, CONTEXT, FAMILIES, GROUPED, SIZES, VOCAB, lively, save_config, scaled_llama, with_sizes
from transformers import AutoModelForCausalLM

from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models.backends.bridge import window_of
from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.layer_table import check, geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming
from tl_posgen.rope.rotation import Rope, inverse_frequencies

BOTH = [name for name, family in FAMILIES.items() if family.hooked and family.bridge]


@pytest.mark.parametrize(("name", "backend"), ANALYSED)
def test_recomputed_scores_equal_the_models_own(family_model, name, backend):
    errors = [layer.error for layer in geometry_of(family_model(name, backend))]
    assert len(errors) == 2
    assert max(errors) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.005, 0.5])
def test_sinks_are_found_however_little_they_take(tmp_path, share):
    config = with_sizes("GptOssConfig", GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)()
    model = load_model(save_config(config, tmp_path), backend="bridge")
    with torch.no_grad():
        for layer in model.original_model.model.layers:
            layer.self_attn.sinks.fill_(float(torch.tensor(share).logit()))  # of the one key that the first query sees
    assert [geometry.sinks for geometry in geometry_of(model)] == [True, True]
    result = analyze(model, torch.arange(2, 26)[None], measures="slash", nulls=0, progress=False)["slash"]
    assert result.warnings == []


@pytest.mark.usefixtures("needs_hooked")
def test_weights_of_another_dtype_than_the_config_says_are_refused_where_they_cannot_run():
    HookedTransformer, HookedTransformerConfig, _ = hooked_parts()
    sizes = {"n_layers": 1, "d_model": 16, "n_ctx": 32, "d_head": 8, "d_vocab": VOCAB, "act_fn": "gelu"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, normalization_type="LNPre", device="cpu")).double()
    with pytest.raises(ModelError, match=r"^this model cannot run: its weights are torch.float64, .*model\.to\("):
        geometry_of(model)
    assert len(geometry_of(model.to(torch.float64))) == 1


@pytest.mark.parametrize("name", BOTH)
def test_both_backends_are_described_alike(family_model, name):
    for hooked, bridge in zip(*(geometry_of(family_model(name, b)) for b in ("hooked", "bridge")), strict=True):
        torch.testing.assert_close(hooked.rope.inv_freq, bridge.rope.inv_freq, rtol=1e-6, atol=0)
        assert hooked.rope.scaling == pytest.approx(bridge.rope.scaling, rel=1e-6)
        assert hooked.rope.pairing == bridge.rope.pairing
        assert hooked.scale == pytest.approx(bridge.scale, rel=1e-6)
        if hooked.alibi_slopes is not None:
            torch.testing.assert_close(hooked.alibi_slopes, bridge.alibi_slopes)
        measured = {"rope": Rope(), "scale": 1.0, "alibi_slopes": None, "error": None}
        assert replace(hooked, **measured) == replace(bridge, **measured)


@pytest.mark.parametrize(
    ("name", "layer", "facts"),
    [
        ("llama", 0, {"encoding": "rotary", "n_heads": 4, "n_key_value_heads": 2, "d_head": 8, "scale": 8**-0.5}),
        ("mistral", 0, {"window": 6}),
        ("gemma2", 1, {"window": None}),
        ("gemma3", 0, {"window": 6}),
        ("gemma3", 1, {"window": None}),
        ("gemma2", 0, {"window": 6, "soft_cap": 50.0, "scale": 0.25}),
        ("gpt2", 0, {"encoding": "absolute"}),
        ("bloom", 0, {"encoding": "alibi"}),
        ("qwen3", 0, {"qk_norm": True}),
        ("olmo2", 0, {"qk_norm": True}),
        ("falcon", 0, {"n_key_value_heads": 1}),
        ("smollm3", 0, {"encoding": "rotary"}),
        ("smollm3", 1, {"encoding": "none"}),
    ],
)
def test_layers_are_described_as_the_config_says(family_model, name, layer, facts):
    geometry = geometry_of(family_model(name, "bridge"))[layer]
    for field, value in facts.items():
        assert getattr(geometry, field) == pytest.approx(value), field


@pytest.mark.parametrize(
    ("name", "layer", "backend", "pairing", "inv_freq"),
    [
        ("llama", 0, "bridge", "half", inverse_frequencies(8)),
        ("llama_linear", 0, "bridge", "half", inverse_frequencies(8) / 4),
        ("neox", 0, "bridge", "half", inverse_frequencies(4)),
        ("glm", 0, "bridge", "adjacent", inverse_frequencies(4)),
        ("gptj", 0, "hooked", "adjacent", inverse_frequencies(4)),
        ("gemma3", 0, "bridge", "half", inverse_frequencies(8, 10_000.0)),
        ("gemma3", 1, "bridge", "half", inverse_frequencies(8, 1_000_000.0)),
    ],
)
def test_frequencies_and_pairing_are_those_of_the_formula(family_model, name, layer, backend, pairing, inv_freq):
    rope = geometry_of(family_model(name, backend))[layer].rope
    assert rope.pairing == pairing
    torch.testing.assert_close(rope.inv_freq, inv_freq, rtol=1e-6, atol=0)


def test_yarn_scales_the_rotated_vectors(family_model):
    rope = geometry_of(family_model("llama_yarn", "bridge"))[0].rope
    assert rope.scaling == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)


@pytest.mark.usefixtures("needs_hooked")
def test_a_hooked_transformer_of_its_own_config_is_described_by_it():
    """Soft cap, windows in some layers, and scaled RoPE, which no conversion here has."""
    HookedTransformer, HookedTransformerConfig, _ = hooked_parts()
    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_vocab": VOCAB, "act_fn": "gelu"}
    rope = {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_scaling_factor": 4.0}
    windows = {"use_local_attn": True, "window_size": 6, "attn_types": ["local", "global"]}
    cfg = HookedTransformerConfig(**sizes, **rope, **windows, attn_scores_soft_cap=0.5, device="cpu", seed=0)
    window, full = geometry_of(HookedTransformer(cfg))
    assert (window.window, full.window) == (6, None)
    assert (window.soft_cap, full.soft_cap) == (0.5, 0.5)
    torch.testing.assert_close(full.rope.inv_freq, inverse_frequencies(8) / 4, rtol=1e-6, atol=0)


def test_longrope_beyond_its_length_is_measured_once_its_short_factors_are_the_long_ones(tmp_path):
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 3.0, 6.0]}
    original = load_model(save_config(scaled_llama(**rope, **factors)(), tmp_path / "original"), "bridge")
    tokens = torch.arange(2, 62)[None]
    with pytest.raises(InputError, match=r"takes 32, .*longrope: set short_factor to long_factor"):
        run(original, tokens)
    long = save_config(scaled_llama(**rope, **factors | {"short_factor": factors["long_factor"]})(), tmp_path / "long")
    model = load_model(long, "bridge")
    torch.testing.assert_close(model(tokens), original(tokens), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens[:, :20]), original(tokens[:, :20]), atol=1e-2)
    expected = inverse_frequencies(8) / torch.tensor(factors["long_factor"])
    for capture in run(model, tokens):
        torch.testing.assert_close(capture.geometry.rope.inv_freq, expected, rtol=1e-6, atol=0)
        assert type(capture) is LayerCapture  # its scores are those of the pass


def test_dynamic_ntk_at_one_length_is_a_model_of_another_base(tmp_path):
    n, factor, base = 200, 4.0, 10_000.0
    rope = {"rope_type": "dynamic", "factor": factor}
    original = load_model(save_config(scaled_llama(**rope)(), tmp_path / "original"), "bridge")
    tokens = (torch.arange(n) % 62)[None]
    with pytest.raises(InputError, match=r"takes 128, .*dynamic NTK: docs/models.md says how to fix them"):
        run(original, tokens)
    theta = base * (factor * n / CONTEXT - factor + 1) ** (8 / 6)
    model = load_model(save_config(scaled_llama(rope_theta=theta)(), tmp_path / "fixed"), "bridge")
    torch.testing.assert_close(model(tokens), original(tokens), atol=1e-4, rtol=1e-4)
    assert all(type(capture) is LayerCapture for capture in run(model, tokens))


TYPES = ["sliding_attention", "full_attention"]


def test_a_full_layer_of_exaone_4_has_no_window(tmp_path):
    config = with_sizes("Exaone4Config", GROUPED, head_dim=8, sliding_window=6, layer_types=TYPES)()
    model = load_model(save_config(config, tmp_path), "bridge")
    window, full = geometry_of(model)
    assert [(one.window, one.encoding) for one in (window, full)] == [(6, "rotary"), (None, "none")]
    first, second = run(model, torch.arange(2, 22)[None])  # beyond the window, and proved by the scores of the pass
    assert [one.scores()[0, 19].isfinite().sum() for one in (first, second)] == [6, 20]
    assert not second.q.isnan().any()


@pytest.mark.parametrize("name", ["Exaone4Config", "ExaoneMoeConfig", "Kolibri1Config", "Gemma2Config", "Qwen3Config"])
def test_the_window_is_that_of_the_layers_own_type(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
    more = experts if "Moe" in name else {"use_sliding_window": True} if name.startswith("Qwen") else {}
    model = lively(with_sizes(name, GROUPED, head_dim=8, sliding_window=6, layer_types=TYPES, **more)())
    assert [window_of(block.self_attn, layer) for layer, block in enumerate(model.model.layers)] == [6, None]


def test_falcon_with_alibi_is_refused_while_transformers_adds_it_twice(tmp_path):
    config = with_sizes("FalconConfig", SIZES, alibi=True, new_decoder_architecture=False)()
    directory, tokens = save_config(config, tmp_path), torch.arange(2, 22)[None]
    kinds = ("eager", "sdpa")
    eager, sdpa = (AutoModelForCausalLM.from_pretrained(directory, attn_implementation=kind) for kind in kinds)
    with torch.no_grad():
        assert (eager(tokens).logits - sdpa(tokens).logits).abs().max() > 0.1  # once they agree, it can be measured
    model = load_model(directory, "bridge")
    with pytest.raises(UnsupportedModelError, match="its scores cannot be recomputed"):
        geometry_of(model)
    with pytest.raises(UnsupportedModelError, match="its scores cannot be recomputed"), streaming(model):
        pass


def test_latent_attention_is_refused(tmp_path):
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "moe_intermediate_size": 16}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    one_group = {"num_key_value_heads": SIZES["num_attention_heads"], "n_group": 1, "topk_group": 1}
    config = with_sizes("DeepseekV3Config", SIZES, **sizes, **ranks, **one_group)()
    with pytest.raises(UnsupportedModelError, match="layer 0: multi-head latent attention"):
        geometry_of(load_model(save_config(config, tmp_path), "bridge"))


def test_check_reports_an_unsupported_model_without_raising(tmp_path, capsys):
    """NanoChat, whose RoPE turns the other way round, and whose attention a bridge leaves to Hugging Face."""
    config = with_sizes("NanoChatConfig", {**SIZES, "num_key_value_heads": 2})()
    table = check(load_model(save_config(config, tmp_path), "bridge"))
    assert table["supported"].tolist() == [False, False]
    assert "cannot be recomputed" in capsys.readouterr().out


def test_attention_that_cannot_be_replaced_is_refused_with_the_way_out(family_model, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such function")

    monkeypatch.setattr("tl_posgen.models.backends.bridge.fused_bridge", refuse)
    table = check(copy.deepcopy(family_model("opt", "bridge")), printed=False)
    assert table["refusal"].str.contains(r"layer \d: .* after softmax.*HookedTransformer").all()


def test_check_has_a_row_per_layer_and_prints_it(family_model, backend, capsys):
    table = check(family_model("gemma2", backend))
    assert table["layer"].tolist() == [0, 1]
    assert table["supported"].all()
    assert table["window"][0] == 6
    assert table["shortest_wavelength"][0] == pytest.approx(2 * torch.pi)
    assert (table["proof_error"] < 1e-5).all()
    assert "proof" in capsys.readouterr().out


def test_frequencies_changed_by_hand_are_read_anew_when_asked(family_directory):
    model = load_model(family_directory("llama"), "bridge")
    before = geometry_of(model)[0].rope.inv_freq
    model.rotary_emb.original_component.inv_freq *= 0.5
    assert torch.equal(geometry_of(model)[0].rope.inv_freq, before)
    session_of(model).layers(again=True)
    torch.testing.assert_close(geometry_of(model)[0].rope.inv_freq, before / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_proved_within_their_rounding(family_directory, backend, dtype):
    for layer in geometry_of(load_model(family_directory("llama"), backend, dtype)):
        assert layer.error < 0.1


@pytest.mark.parametrize(
    ("name", "backend", "limit"),
    [
        ("llama", "hooked", CONTEXT),
        ("llama", "bridge", None),
        ("llama_dynamic", "bridge", CONTEXT),
        ("gpt2", "bridge", CONTEXT),
        ("gpt2", "hooked", CONTEXT),
        ("bloom", "hooked", None),
    ],
)
def test_the_longest_prompt_is_known_beforehand(family_model, name, backend, limit):
    assert session_of(family_model(name, backend)).limit.tokens == limit
