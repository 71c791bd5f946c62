"""GGUF files: the weights that they hold, dequantised, in a model like any other; every fault in one line."""

import shutil
import sys

import numpy as np
import pytest
import torch
from families import GROUPED, lively, with_sizes
from transformers import AutoModelForCausalLM

from tl_posgen import analyze, load_model
from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.conversion.hugging_face import quantisation_of, quiet
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.loading.shuffle import shuffled_like
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts

gguf = pytest.importorskip("gguf")

SIZES = {**GROUPED, "head_dim": 8, "intermediate_size": 64}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-", "Ġ", "Ċ", "he", "th"]


def gguf_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight"""
    *layer, rest = name.removeprefix("model.").removesuffix(".weight").removeprefix("layers.").partition(".")[::2]
    if not layer[0].isdigit():
        return f"{NAMES[name.removeprefix('model.').removesuffix('.weight')]}.weight"
    return f"blk.{layer[0]}.{NAMES[rest]}.weight"


def save_gguf(path, kind="Q4_1", *, architecture="llama", changed=lambda weight: weight, **sizes):
    """Write a lively Llama of two layers, its matrices quantised; return transformers' model of the weights in it."""
    hf_model = lively(with_sizes("LlamaConfig", {**SIZES, **sizes})())
    config, quantisation = hf_model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *LETTERS])
    writer.add_token_merges(["h e", "t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    with torch.no_grad():
        for name, weight in hf_model.named_parameters():
            stored = weight.numpy()
            if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):  # rows in the order of llama.cpp
                stored = stored.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(stored.shape)
            own = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else quantisation
            blocks = gguf.quantize(changed(np.ascontiguousarray(stored)), own)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=own)
            held = gguf.dequantize(blocks, own)
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
    report = analyze(written[0], "the cat sat on the mat", measures="slash", null_seeds=(), progress=False)
    assert report.provenance["dequantised_from"] == "Q4_1"
    assert report.provenance["model"] == "tiny (dequantised from Q4_1)"
    assert "tiny (dequantised from Q4_1)" in report.html()


def test_both_nulls_are_made_of_it_without_reading_its_weights_again(written, backend, monkeypatch):
    path, original = written
    model = load_model(path, backend)
    null, shuffled = random_like(model, seed=0), shuffled_like(model, seed=0)
    with quiet(seed=0):
        expected = AutoModelForCausalLM.from_config(original.config)
    for made in (null, shuffled):
        assert type(made) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(null(TOKENS), expected(TOKENS).logits, rtol=1e-4, atol=2e-5)
    assert (session_of(null).label, session_of(shuffled).label) == ("tiny", "tiny (dequantised from Q4_1)")
    assert session_of(null).backend.n_parameters() == session_of(model).backend.n_parameters()


def test_what_transformers_saves_of_it_is_the_model(written, tmp_path):
    path, original = written
    with quiet(), session_of(load_model(path, "bridge")).backend.plain() as hf_model:
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
