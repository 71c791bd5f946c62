"""Loading: the same logits as Hugging Face for every family, and one clear line for everything that can be wrong."""

import json
import logging
import shutil
import subprocess
import sys
import warnings

import huggingface_hub.constants
import numpy as np
import pandas as pd
import pytest
import torch
from families import FAMILIES, GROUPED, SIZES, VOCAB, save_config, with_sizes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import tl_posgen
from tl_posgen.coupling import coupling_scores
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models.conversion.files import MINI, TOKENIZERS
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import Pretrained, load_model
from tl_posgen.models.loss import run_prompts
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import bundled_text

TOKENS = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(4))
LOADABLE = [(n, b) for n, f in FAMILIES.items() for b in ("hooked", "bridge") if b == "bridge" or f.hooked]


@pytest.mark.parametrize(("name", "backend"), LOADABLE)
def test_logits_are_those_of_hugging_face(family_directory, family_model, name, backend):
    model = family_model(name, backend)
    original = AutoModelForCausalLM.from_pretrained(family_directory(name), attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), original(TOKENS).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "backend"), LOADABLE)
def test_the_last_logits_alone_are_those_of_the_whole_pass(family_model, name, backend):
    model = family_model(name, backend)
    (of_last,), (of_all,) = (run_prompts(model, TOKENS, lambda logits, _: logits, first=first) for first in (37, 0))
    torch.testing.assert_close(of_last, of_all[:, 37:])


def test_a_hooked_transformer_is_saved_as_safetensors(family_model, has_hooked, tmp_path):
    if not has_hooked:
        pytest.skip("this TransformerLens has none")
    weights = family_model("llama", "hooked").state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == weights.keys()


def test_auto_takes_a_hooked_transformer_where_it_can(family_directory, has_hooked):
    expected = "HookedTransformer" if has_hooked else "TransformerBridge"
    assert type(load_model(family_directory("llama"))).__name__ == expected
    assert type(load_model(family_directory("gemma3"))).__name__ == "TransformerBridge"
    assert type(load_model(family_directory("llama_dynamic"))).__name__ == "TransformerBridge"


def test_loading_is_silent_and_leaves_no_trace(family_directory, backend, capfd, caplog):
    def state():
        random = torch.get_rng_state().tolist()
        return hf_logging.get_verbosity(), logging.root.manager.disable, torch.is_grad_enabled(), random

    before = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(family_directory("llama"), backend)
    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert state() == before


@pytest.mark.slow
def test_importing_the_models_loads_no_engine():
    code = "import sys, tl_posgen.models; print([m for m in ('transformers', 'transformer_lens') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.fixture
def copied(family_directory, tmp_path):
    """A Llama directory to damage."""
    return shutil.copytree(family_directory("llama"), tmp_path / "model")


def with_weight(directory, name, changed):
    """Replace one weight by `changed` of it; None for none."""
    weights = load_file(directory / "model.safetensors")
    weights[name] = changed(weights.get(name))
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def with_config(directory, **change):
    """Replace fields of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    return directory


def test_a_missing_file_is_named_and_pickled_weights_are_never_read(copied):
    with pytest.raises(ModelError, match=r"config\.json is a file"):
        load_model(copied / "config.json")
    (copied / "tokenizer.json").rename(copied / "kept")
    with pytest.raises(ModelError, match="no tokenizer"):
        load_model(copied)
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be used"):
        load_model(copied)
    (copied / "model.safetensors").rename(copied / "kept")
    with pytest.raises(ModelError, match="no weights"):
        load_model(copied)
    (copied / "kept").rename(copied / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_model(copied)
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(copied)


def test_an_adapter_is_refused_beside_its_base_model_and_alone(copied):
    """transformers adds it where peft is installed, and ignores it elsewhere."""
    (copied / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    merged = r"merge .*\(AutoPeftModelForCausalLM.*merge_and_unload"
    with pytest.raises(ModelError, match=f"beside the weights is an adapter, .*{merged}.*or move it away"):
        load_model(copied)
    (copied / "model.safetensors").rename(copied / "adapter_model.safetensors")
    for missing in ("config.json", "tokenizer.json"):
        (copied / missing).unlink()
        with pytest.raises(ModelError, match=f"an adapter without its base model; {merged}"):
            load_model(copied)


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "awq", "gptq", "compressed-tensors", "mxfp4", "nonesuch"])
def test_quantised_checkpoints_are_refused_by_their_method(copied, method):
    with_config(copied, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    with pytest.raises(
        ModelError, match=rf"quantised weights \({method}\) are not measured; give the model that"
    ) as error:
        load_model(copied)
    assert "\n" not in str(error.value)


UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "inf")])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_broken_weights_are_named_converted_or_not(copied, backend, dtype, value, kind):
    with_weight(copied, UP, lambda weight: weight.index_put_((torch.tensor(3), torch.tensor(4)), torch.tensor(value)))
    message = rf"model: model\.layers\.1\.mlp\.up_proj\.weight holds {kind}"
    with pytest.raises(ModelError, match=message):
        load_model(copied, backend, dtype)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (UP, lambda weight: None, r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ("v_head.bias", lambda weight: torch.zeros(1), r"the weights hold v_head\.bias, which the model does not have"),
        *(
            (Q, lambda weight, dtype=dtype: weight.to(dtype), r"q_proj\.weight is quantised \(")
            for dtype in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
        ),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_named(copied, name, changed, message):
    with pytest.raises(ModelError, match=message):
        load_model(with_weight(copied, name, changed))


def test_a_truncated_file_is_refused(copied):
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_model(copied)


UNUSABLE = {
    "llama": [
        ({"model_type": "nonesuch"}, "config.json cannot be used"),
        ({"num_hidden_layers": 3}, r"the weights lack model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"the weights hold model\.layers\.1.*, which the model does not have \(9 tensors\)"),
        ({"num_hidden_layers": 0}, r"the weights hold model\.layers\.0.*, which the model does not have"),
        ({"num_hidden_layers": "2"}, "config.json cannot be used.*num_hidden_layers"),
        ({"hidden_size": 0}, r"the weights hold lm_head\.weight in another size"),
        ({"hidden_size": 10**12}, r"the weights hold lm_head\.weight in another size \(21 tensors"),
        ({"vocab_size": 10**11}, r"the weights hold lm_head\.weight in another size"),
        ({"vocab_size": 2**70}, "transformers cannot load this model"),
        ({"num_attention_heads": 0}, "config.json cannot be used"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 0}, "transformers cannot load this model"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}}, "logits .* are not finite"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "logits .* are not finite"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "logits .* are not finite"),
        ({"rms_norm_eps": -1.0}, "logits of random tokens are not finite"),
    ],
    "gemma2": [
        ({"sliding_window": 0}, "does not run on 24 random tokens"),
        ({"query_pre_attn_scalar": 0}, "transformers cannot load this model"),
    ],
}


@pytest.mark.parametrize(
    ("family", "change", "message"), [(family, *case) for family, cases in UNUSABLE.items() for case in cases]
)
def test_an_unusable_config_is_refused(family_directory, tmp_path, family, change, message):
    directory = shutil.copytree(family_directory(family), tmp_path / "model")
    with pytest.raises(ModelError, match=message) as error:
        load_model(with_config(directory, **change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 5000, b'{"n_layer": NaN}', b'"llama"', b'{"model_type": 3}']
)
def test_a_config_that_is_none_is_refused(copied, content):
    (copied / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json") as error:
        load_model(copied)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
    ],
)
def test_buffers_that_older_versions_saved_are_passed_over(family_directory, family_model, tmp_path, family, names):
    directory = shutil.copytree(family_directory(family), tmp_path / "model")
    for name in names:
        with_weight(directory, name, lambda _: torch.ones(4))
    with torch.no_grad():
        torch.testing.assert_close(load_model(directory)(TOKENS), family_model(family)(TOKENS))


def test_more_weights_than_memory_holds_are_refused_with_their_number(copied, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(ModelError, match=r"billion weights need .* GB in torch\.float32, and this machine has 0 GB"):
        load_model(copied)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "gpu", "", "mps:7", "vulkan"])
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_looked_for(device):
    message = rf"device '{device}' cannot be used \(\w.+\); give 'cpu'.*, or leave it out"
    with pytest.raises(InputError, match=message) as error:
        load_model("nobody/has-this-model", device=device)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_missing_directory_is_refused_without_asking_the_network(name):
    with pytest.raises(ModelError, match="no such directory"):
        load_model(name)


def test_a_hub_name_without_network_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"nobody/nothing: no such directory here, and huggingface\.co cannot be reached"
    ):
        load_model("nobody/nothing")


def test_a_hub_model_in_the_cache_loads_offline_and_remembers_its_commit(family_directory, monkeypatch, tmp_path):
    repository = tmp_path / "models--tiny--llama"
    shutil.copytree(family_directory("llama"), repository / "snapshots/abc123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    origin = session_of(load_model("tiny/llama")).origin
    assert (origin.name, origin.revision) == ("tiny/llama", "abc123")


@pytest.mark.usefixtures("needs_hooked")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma3", "Gemma3ForCausalLM is not currently supported"),
        ("phi", "no attribute 'partial_rotary_factor'"),
        ("llama_linear", "it has no 'linear' RoPE scaling"),
        ("llama_dynamic", "it has no 'dynamic' RoPE scaling"),
    ],
)
def test_what_transformer_lens_does_not_convert_is_refused_as_hooked(family_directory, name, why):
    with pytest.raises(UnsupportedModelError, match=rf"{why}.*; use backend='bridge'$"):
        load_model(family_directory(name), "hooked")


@pytest.mark.usefixtures("needs_hooked")
def test_a_window_that_a_conversion_loses_is_refused_though_short_prompts_do_not_show_it(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    directory = save_config(with_sizes("Qwen2Config", GROUPED, **window)(), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"its window of 100 tokens is lost\); use backend='bridge'$"):
        load_model(directory, "hooked")


@pytest.mark.usefixtures("needs_hooked")
def test_a_conversion_that_changes_the_logits_is_refused(tmp_path):
    """TransformerLens drops the biases of a Llama that has them."""
    directory = save_config(with_sizes("LlamaConfig", GROUPED, attention_bias=True)(), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"its logits differ by .*something else; use backend='bridge'$"):
        load_model(directory, "hooked")
    fallback = load_model(directory)
    assert type(fallback).__name__ == "TransformerBridge"
    with torch.no_grad():
        torch.testing.assert_close(fallback(TOKENS), load_model(directory, "bridge")(TOKENS))


def test_hooked_is_refused_on_transformer_lens_4(family_directory, has_hooked):
    if has_hooked:
        pytest.skip("this TransformerLens has HookedTransformer")
    with pytest.raises(ModelError, match=r"no HookedTransformer .*transformer-lens==3\.9\.0"):
        load_model(family_directory("llama"), "hooked")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("backend", ["eager", None, ["hooked"], np.array(["hooked", "bridge"])])
def test_an_unknown_backend_is_refused(family_directory, backend):
    with pytest.raises(InputError, match="choose auto, hooked or bridge"):
        load_model(family_directory("llama"), backend)


def test_remote_code_is_off_unless_asked(copied):
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    with_config(copied, model_type="mine", auto_map=code)
    (copied / "code.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load_model(copied)


def test_another_default_device_of_torch_changes_nothing_of_what_is_loaded(backend):
    expected = load_model("mini", backend, device="cpu").state_dict()
    torch.set_default_device("meta")  # stands for an accelerator, which may not be here
    try:
        model = load_model("mini", backend, device="cpu")
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.usefixtures("needs_hooked")
@pytest.mark.parametrize("name", ["PhiConfig", "BioGptConfig"])
def test_the_other_backend_is_a_remedy_only_where_it_works(tmp_path, name):
    """TransformerLens has no bridge for Phi with norms of q and k, nor for BioGPT."""
    directory = save_config(
        with_sizes(name, SIZES, **({"qk_layernorm": True} if name == "PhiConfig" else {}))(), tmp_path
    )
    for backend in ("hooked", "auto"):
        with pytest.raises(UnsupportedModelError) as error:
            load_model(directory, backend)
        assert "use backend" not in str(error.value)
        assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [([], "give one at least"), ("step1", r"give a list of them"), (["a/step1", "b/step1"], "two have one name")],
)
def test_checkpoints_that_are_no_sequence_of_them_are_refused(checkpoints, message):
    with pytest.raises(InputError, match=message):
        Checkpoints(checkpoints)


@pytest.mark.parametrize("name", ["mini", MINI])
def test_a_revision_of_what_is_here_is_refused(name):
    with pytest.raises(InputError, match=r"revision 'step0': .*mini is here and has none; leave it out"):
        tl_posgen.load_model(name, revision="step0")


def test_revisions_on_the_hub_take_another_tokenizer_too(monkeypatch, tmp_path):
    for file in MINI.iterdir():
        if file.name not in TOKENIZERS:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("tl_posgen.models.conversion.files._download", lambda name, revision: tmp_path)
    run = Checkpoints(["step1", "step2"], model="someone/model", tokenizer="mini")
    assert run.models[1].load().to_tokens("Alice").shape[1] > 1
    with pytest.raises(ModelError, match="no tokenizer"):
        Checkpoints(["step1"], model="someone/model").models[0].load()


def test_a_table_of_scores_may_name_models_of_the_hub_beside_a_tokenizer(monkeypatch, alice):
    def asked(name, revision):
        raise ModelError("the Hub was asked")

    monkeypatch.setattr("tl_posgen.models.conversion.files._download", asked)
    table = pd.DataFrame({"model": ["someone/model"], "score": [0.5]})
    with pytest.raises(ModelError, match="the Hub was asked"):
        coupling_scores(table, alice, tokenizer="mini", widths=(64,), progress=False)


def test_a_name_stands_in_titles_tables_and_sentences_and_provenance_keeps_the_file(tmp_path):
    how = {"measures": ["variance"], "length": 12, "n_prompts": 1, "nulls": 1, "progress": False}
    for name in ("A small one", "Mini"):  # the second takes up what the first has kept
        report = tl_posgen.analyze(Pretrained("mini", name=name), bundled_text(), keep=tmp_path, **how)
        assert (report.provenance["model"], report.provenance["file"]) == (name, "mini")
        assert report["variance"].dataset["init_label"].values.tolist()[0] == name
        assert name in report.html()
    session = session_of(load_model("mini", name="A small one"))
    assert (session.label, session.file) == ("A small one", "mini")
    assert "file" not in provenance_of(session_of(load_model("mini")), [])
    for wrong in ("", " ", "two\nlines"):
        with pytest.raises(InputError, match="name="):
            load_model("mini", name=wrong)
