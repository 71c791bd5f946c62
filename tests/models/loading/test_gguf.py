"""GGUF files: the weights that they hold, dequantised, in a model like any other; every fault in one line."""

import shutil
import sys

import numpy as np
import pytest
import torch
import transformers
from families import GROUPED, lively, with_sizes
from packaging.version import Version
from transformers import AutoModelForCausalLM

from tl_posgen import analyze, load_model
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models.conversion.gguf_file import quantisation_of, read_once
from tl_posgen.models.conversion.hugging_face import load_hf_model, load_tokenizer, read_config, silenced
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loading.null_kinds import shuffled_like
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts

gguf = pytest.importorskip("gguf")

SIZES = {**GROUPED, "head_dim": 8, "intermediate_size": 64}
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-", "Ġ", "Ċ", "he", "th"]


def save_gguf(
    path, kind="Q4_1", *, architecture="llama", changed=lambda weight: weight, config=None, keys=(), tensors=(), **sizes
):
    """Write a lively model of two layers as llama.cpp's converter does, its matrices quantised, with more keys of the
    architecture and tensors; return transformers' model of the weights in it."""
    hf_model = lively(config or with_sizes("LlamaConfig", {**SIZES, **sizes})())
    config, quantisation = hf_model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *LETTERS])
    writer.add_token_merges(["h e", "t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in dict(keys).items():
        add[type(value)](key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    known = gguf.MODEL_ARCH_NAMES.items()
    arch = next((arch for arch, name in known if name == architecture and name != "clip"), gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in hf_model.named_parameters():
            module, part = name.rsplit(".", 1)
            stored = weight.numpy()
            heads = {"q_proj": 4, "k_proj": 2}.get(module.split(".")[-1]) if arch == gguf.MODEL_ARCH.LLAMA else None
            if heads:  # rows in the order of llama.cpp
                stored = stored.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(stored.shape)
            one = np.float32(architecture.startswith("gemma") and module.endswith("norm"))  # which Gemma adds
            own = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else quantisation
            blocks = gguf.quantize(changed(np.ascontiguousarray(stored)) + one, own)
            writer.add_tensor(f"{names.get_name(module)}.{part}", blocks, raw_dtype=own)
            held = gguf.dequantize(blocks, own) - one
            if heads:
                held = held.reshape(heads, 4, 2, -1).swapaxes(1, 2).reshape(stored.shape)
            weight.copy_(torch.from_numpy(np.ascontiguousarray(held)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hf_model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The path of a GGUF file in Q4_1, and the model of its weights."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, save_gguf(path)


TOKENS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(4))


def test_logits_are_those_of_the_dequantised_weights_on_either_backend(written, backend):
    path, original = written
    model = load_model(path, backend)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), original(TOKENS).logits, rtol=1e-4, atol=2e-5)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    origin = session_of(model).origin
    assert (origin.directory, origin.dequantised_from) == (path, "Q4_1")
    (ids,) = to_prompts(model, "the cat")
    assert model.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["t", "he", "Ġ", "c", "a", "t"]


THETA, LLAMA3_THETA = (base ** -(torch.arange(4) / 4) for base in (10_000.0, 5e5))


def llama3_divisors(theta, factor=8.0, length=8192):
    """Brute force over planes: llama.cpp's converter."""
    for frequency in theta.tolist():
        turns = length * frequency / (2 * np.pi)
        if turns > 4:
            yield 1.0
        elif turns < 1:
            yield factor
        else:
            yield 1 / ((1 - (turns - 1) / 3) / factor + (turns - 1) / 3)


def of_rope(class_name="LlamaConfig", more=(), **rope):
    rope = {"rope_theta": 10_000.0, **rope}
    rope = {"full_attention": rope, "sliding_attention": {"rope_theta": 10_000.0}} if "Gemma" in class_name else rope
    head_dim = {} if class_name in ("Qwen2Config", "Phi3Config", "Starcoder2Config") else {"head_dim": 8}
    sizes = {**GROUPED, "intermediate_size": 64, "max_position_embeddings": 512, **head_dim, **dict(more)}
    return with_sizes(class_name, sizes, rope_parameters=rope)()


DIVISORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 7.0]}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
LINEAR, YARN = (
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
)
# architecture, the config that the file was made of, what its converter writes of it beside the sizes
SCALED = {
    "llama 3.1": (
        "llama",
        of_rope(
            rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        {"vocab_size": 64},
        {"rope_freqs.weight": list(llama3_divisors(LLAMA3_THETA))},
    ),
    "a base that transformers does not read": ("starcoder2", of_rope("Starcoder2Config", rope_theta=5e5), {}, {}),
    "linear": ("llama", of_rope(rope_type="linear", factor=4.0), LINEAR, {}),
    "linear, by its old key": ("llama", of_rope(rope_type="linear", factor=4.0), {"rope.scale_linear": 4.0}, {}),
    "yarn": (
        "qwen2",
        of_rope("Qwen2Config", rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        YARN,
        {},
    ),
    "yarn, its own turns": (
        "llama",
        of_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5),
        YARN | {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5},
        {},
    ),
    "global layers": (
        "gemma3",
        of_rope("Gemma3TextConfig", WINDOWS, rope_type="linear", factor=4.0),
        LINEAR | {"attention.sliding_window": 6, "attention.sliding_window_pattern": 2, "attention.key_length": 8},
        {},
    ),
    "longrope": (
        "phi3",
        of_rope(
            "Phi3Config", {"original_max_position_embeddings": 48, "sliding_window": 30}, rope_type="longrope",
            attention_factor=1.2, **DIVISORS,
        ),
        {
            "rope.scaling.original_context_length": 48,
            "rope.scaling.attn_factor": 1.2,
            "attention.sliding_window": 30,
            "tokenizer.ggml.padding_token_id": 1,
        },
        {f"rope_factors_{name.split('_')[0]}.weight": values for name, values in DIVISORS.items()},
    ),
}  # fmt: skip


def loaded(path):
    """transformers' model and tokenizer of a file, as every model of TransformerLens is made of them."""
    with silenced(), read_once(path):
        return load_hf_model(path, read_config(path, False)), load_tokenizer(path, False)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_of_a_file_are_those_of_the_config_that_it_was_made_of(tmp_path, name):
    if name == "global layers" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this version of transformers makes no tokenizer of Gemma 3's tiny vocabulary")
    architecture, config, keys, tensors = SCALED[name]
    written = {"architecture": architecture, "config": config, "keys": keys, "tensors": tensors}
    original = save_gguf(tmp_path / "tiny.gguf", "F32", **written)
    model, _ = loaded(tmp_path / "tiny.gguf")
    for length in (40, 60):  # within the 48 tokens of longrope's training, and beyond
        tokens = torch.randint(2, 62, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, original(tokens).logits, rtol=1e-4, atol=5e-5)


def test_a_file_of_llama_3_1_is_measured_on_either_backend(tmp_path, backend):
    _, config, keys, tensors = SCALED["llama 3.1"]
    original = save_gguf(tmp_path / "tiny.gguf", "F32", config=config, keys=keys, tensors=tensors)
    model = load_model(tmp_path / "tiny.gguf", backend)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), original(TOKENS).logits, rtol=1e-4, atol=5e-5)
    (geometry,) = geometry_of(model, 0)
    divisors = torch.tensor(list(llama3_divisors(LLAMA3_THETA)))
    assert 1 < divisors[2] < divisors[3] == 8
    torch.testing.assert_close(geometry.rope.inv_freq.float(), LLAMA3_THETA / divisors)
    expected = original.config.rope_parameters
    assert session_of(model).origin.config.rope_parameters == expected


@pytest.mark.parametrize(("n_layers", "scalar"), [(46, 16), (2, 8)])
def test_scores_of_the_largest_gemma_are_scaled_by_its_width(tmp_path, n_layers, scalar):
    config = with_sizes("Gemma2Config", {**GROUPED, "hidden_size": 64, "head_dim": 8, "num_hidden_layers": n_layers})()
    keys = {"attention.key_length": 8, "attention.sliding_window": 6, "attn_logit_softcapping": 7.0}
    save_gguf(tmp_path / "tiny.gguf", "F32", architecture="gemma2", config=config, keys=keys)
    with silenced(), read_once(tmp_path / "tiny.gguf"):
        found = read_config(tmp_path / "tiny.gguf", False)
    assert (found.query_pre_attn_scalar, found.sliding_window, found.attn_logit_softcapping) == (scalar, 6, 7.0)


def test_divisors_that_no_rule_has_are_those_of_the_model_that_is_measured(tmp_path, backend):
    divisors = [1.0, 1.5, 3.0, 7.0]
    original = save_gguf(tmp_path / "tiny.gguf", "F32", tensors={"rope_freqs.weight": divisors})
    tokens = torch.randint(2, 62, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        unscaled = original(tokens).logits
        original.model.rotary_emb.inv_freq /= torch.tensor(divisors)
        expected = original(tokens).logits
    assert (expected - unscaled).abs().max() > 0.1
    if backend == "hooked":
        with pytest.raises(UnsupportedModelError, match="no 'longrope' RoPE scaling"):
            load_model(tmp_path / "tiny.gguf", backend)
        return
    model = load_model(tmp_path / "tiny.gguf", backend)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=5e-5)
    (geometry,) = geometry_of(model, 0)
    torch.testing.assert_close(geometry.rope.inv_freq.float(), THETA / torch.tensor(divisors))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        (YARN | {"rope.scaling.yarn_attn_factor": 1.0}, {}, r"llama\.rope\.scaling\.yarn_attn_factor = 1\.0 is not"),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, {}, r"llama\.rope\.scaling\.yarn_ext_factor = 0\.5 is not"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, {}, r"yarn_log_multiplier = 0\.1"),
        ({"rope.scaling.alpha": 1000.0}, {}, r"llama\.rope\.scaling\.alpha = 1000\.0"),
        ({"rope.scaling.type": "other"}, {}, r"llama\.rope\.scaling\.type = 'other'"),
        ({"rope.freq_base_swa": 5000.0}, {}, r"llama\.rope\.freq_base_swa = 5000\.0"),
        ({"attention.sliding_window": 6}, {}, r"llama\.attention\.sliding_window = 6 is not .*its safetensors"),
        ({"attention.scale": 0.5}, {}, r"llama\.attention\.scale = 0\.5"),
        ({"attention.causal": False}, {}, r"llama\.attention\.causal = False"),
        ({"attention.key_length": 16}, {}, "another size"),
        ({}, {"blk.0.attn_q.bias": [0.5] * 32}, r"the tensor blk\.0\.attn_q\.bias is not read"),
        ({}, {"blk.1.attn_sinks.weight": [0.5] * 4}, r"the tensor blk\.1\.attn_sinks\.weight is not read"),
        ({}, {"rope_freqs.weight": [2.0] * 3}, r"rope_\*\.weight has 3 divisors, and RoPE 4 planes"),
    ],
)
def test_what_attention_depends_on_and_nobody_reads_is_refused_by_name(tmp_path, keys, tensors, message):
    save_gguf(tmp_path / "tiny.gguf", "F32", keys=keys, tensors=tensors)
    with pytest.raises(ModelError, match=message) as error:
        loaded(tmp_path / "tiny.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_a_text_begins_with_a_bos_where_llama_cpp_puts_one(tmp_path, keys, begins):
    save_gguf(tmp_path / "tiny.gguf", "F32", keys=keys)
    (ids,) = to_prompts(model := load_model(tmp_path / "tiny.gguf", "bridge"), "the")
    assert model.cfg.default_prepend_bos is begins
    assert model.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<s>"] * begins + ["t", "he"]


def test_a_directory_that_holds_one_is_the_file(written, tmp_path):
    path, original = written
    shutil.copy(path, tmp_path)
    model = load_model(tmp_path, "bridge")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), original(TOKENS).logits, rtol=1e-4, atol=2e-5)
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; give one of them, .*other\.gguf for instance"):
        load_model(tmp_path)


def test_provenance_and_pages_say_what_the_weights_were(written):
    report = analyze(written[0], "the cat sat on the mat", measures="slash", nulls=0, progress=False)
    assert report.provenance["dequantised_from"] == "Q4_1"
    assert report.provenance["model"] == "tiny (dequantised from Q4_1)"
    assert "tiny (dequantised from Q4_1)" in report.html()


def test_both_nulls_are_made_of_it_without_reading_its_weights_again(written, backend, monkeypatch):
    path, original = written
    model = load_model(path, backend)
    null, shuffled = random_like(model, seed=0), shuffled_like(model, seed=0)
    with silenced(seed=0):
        expected = AutoModelForCausalLM.from_config(original.config)
    for made in (null, shuffled):
        assert type(made) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(null(TOKENS), expected(TOKENS).logits, rtol=1e-4, atol=2e-5)
    assert (session_of(null).label, session_of(shuffled).label) == ("tiny", "tiny (dequantised from Q4_1)")
    assert session_of(null).backend.n_parameters() == session_of(model).backend.n_parameters()


def test_what_transformers_saves_of_it_is_the_model(written, tmp_path):
    path, original = written
    with silenced(), session_of(load_model(path, "bridge")).backend.plain() as hf_model:
        hf_model.save_pretrained(tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(saved(TOKENS).logits, original(TOKENS).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "said"), [("F16", None), ("Q8_0", "Q8_0")])
def test_what_is_not_quantised_is_not_said_to_be_dequantised(tmp_path, kind, said):
    original = save_gguf(tmp_path / "tiny.gguf", kind)
    model = load_model(tmp_path / "tiny.gguf", "bridge")
    assert provenance_of(session_of(model), [])["dequantised_from"] == said
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), original(TOKENS).logits, rtol=1e-4, atol=2e-5)


def test_without_a_file_type_it_is_the_type_of_most_weights(written):
    reader = gguf.GGUFReader(written[0])
    del reader.fields["general.file_type"]
    assert quantisation_of(reader) == "Q4_1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[: len(whole) // 2], "a damaged GGUF file .*; download it again"),
        (lambda whole: whole[:100], "a damaged GGUF file .*; download it again"),
        (lambda whole: b"PK\3\4" + whole[4:], "not a GGUF file, by its first bytes"),
        (lambda whole: b"", "not a GGUF file"),
    ],
)
def test_a_damaged_file_is_one_line(written, tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content(written[0].read_bytes()))
    with pytest.raises(ModelError, match=message) as error:
        load_model(path)
    assert "\n" not in str(error.value)


def broken(weight):
    return np.where(weight == weight.max(), np.nan, weight) if weight.shape == (64, 32) else weight


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "clip"}, r"cannot read this model from GGUF \(.*clip.*\); give the"),
        ({"kind": "F32", "changed": broken}, r"model\.gguf: .*weight holds NaN"),
    ],
)
def test_an_architecture_that_transformers_does_not_read_and_broken_weights_are_named(tmp_path, how, message):
    save_gguf(tmp_path / "model.gguf", **how)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("held", "told", "message"),
    [
        (1, 2, r"the weights lack model\.layers\.1\..* does not belong to its metadata"),
        (2, 1, "it holds layer 1, and its metadata counts 1 layers"),
    ],
)
def test_weights_that_do_not_fit_the_metadata_are_named(tmp_path, held, told, message):
    path = tmp_path / "model.gguf"
    save_gguf(path, num_hidden_layers=held)
    whole = path.read_bytes()
    key = b"llama.block_count"
    place = whole.index(key) + len(key) + 4
    path.write_bytes(whole[:place] + told.to_bytes(4, "little") + whole[place + 4 :])
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_parts_and_absent_files_are_refused(tmp_path):
    save_gguf(tmp_path / "big-00001-of-00003.gguf")
    with pytest.raises(ModelError, match="a part of a split model; join the parts: llama-gguf-split --merge"):
        load_model(tmp_path / "big-00001-of-00003.gguf")
    with pytest.raises(ModelError, match=r"^absent\.gguf: no such file$"):
        load_model("absent.gguf")
    with pytest.raises(InputError, match="has none; leave it out"):
        load_model(tmp_path / "big-00001-of-00003.gguf", revision="main")


def test_without_the_package_the_remedy_is_named(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"package gguf, which is not installed; pip install 'gguf>=0\.17'"):
        load_model(written[0])


def test_loading_is_silent_and_reads_the_metadata_once(written, capfd, monkeypatch):
    made, own = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path, *args: made.append(path) or own(path, *args))
    counted = gguf.GGUFReader
    load_model(written[0], "bridge")
    assert len(made) == 1
    assert gguf.GGUFReader is counted
    assert capfd.readouterr() == ("", "")


def test_more_than_memory_holds_is_refused_before_it_is_read(written, monkeypatch):
    monkeypatch.setattr("tl_posgen.models.conversion.hugging_face.memory_of", lambda device: 1000)
    with pytest.raises(ModelError, match=r"weights need .* GB in torch\.float32, and this machine has"):
        load_model(written[0])
