"""Tiny random models of every family, in the Hugging Face form that both backends load: fixtures for all tests.

    directory = save_family("llama", tmp_path)          # a directory that load_model, boot_transformers, ... can read
    model = load_model(directory, backend="bridge")

Every one-dimensional weight (biases, norms) is moved off its initial 0 or 1 and every matrix is enlarged, so that the
attention scores are of order one and a forgotten bias or norm shows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VOCAB = 64
CONTEXT = 128

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
GPT |= {"bos_token_id": 0, "eos_token_id": 1}


def with_sizes(class_name: str, sizes: dict[str, Any], **more: Any) -> Callable[[], Any]:
    def config():
        import transformers

        return getattr(transformers, class_name)(**{**sizes, **more})

    return config


def scaled_llama(**rope: Any) -> Callable[[], Any]:
    return with_sizes("LlamaConfig", GROUPED, rope_parameters={"rope_theta": 10_000.0, **rope})


@dataclass(frozen=True)
class Family:
    """A tiny config, and which backends can analyse it.

    Attributes:
        config: makes the Hugging Face config.
        hooked, bridge: whether the backend's attention can be described and proved.
        left_to_hf: whether the bridge leaves attention to Hugging Face.
    """

    config: Callable[[], Any]
    hooked: bool = True
    bridge: bool = True
    left_to_hf: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(with_sizes("LlamaConfig", GROUPED, head_dim=8)),
    "llama3": Family(scaled_llama(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=32)),
    "llama_linear": Family(scaled_llama(rope_type="linear", factor=4.0), hooked=False),
    "llama_yarn": Family(scaled_llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), hooked=False),
    "llama_dynamic": Family(scaled_llama(rope_type="dynamic", factor=4.0), hooked=False),
    "mistral": Family(with_sizes("MistralConfig", GROUPED, sliding_window=6)),
    "neox": Family(with_sizes("GPTNeoXConfig", SIZES, rotary_pct=0.5)),
    "gptj": Family(with_sizes("GPTJConfig", GPT, rotary_dim=4), left_to_hf=True),
    "qwen2": Family(with_sizes("Qwen2Config", GROUPED)),
    "qwen3": Family(with_sizes("Qwen3Config", GROUPED, head_dim=8)),
    "gemma2": Family(
        with_sizes("Gemma2Config", GROUPED, head_dim=8, sliding_window=6, query_pre_attn_scalar=16),
        hooked=False,
    ),
    "gemma3": Family(
        with_sizes("Gemma3TextConfig", GROUPED, head_dim=8, sliding_window=6,
                   layer_types=["sliding_attention", "full_attention"]),
        hooked=False,
    ),
    "phi": Family(with_sizes("PhiConfig", SIZES), hooked=False),
    "gpt2": Family(with_sizes("GPT2Config", GPT)),
    "bloom": Family(
        with_sizes("BloomConfig", {}, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0,
                   eos_token_id=1)
    ),
    "opt": Family(with_sizes("OPTConfig", SIZES, ffn_dim=48, word_embed_proj_dim=32), left_to_hf=True),
    "gpt_neo": Family(
        with_sizes("GPTNeoConfig", {}, vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, window_size=6,
                   attention_types=[[["global", "local"], 1]], max_position_embeddings=CONTEXT, bos_token_id=0,
                   eos_token_id=1),
        left_to_hf=True,
    ),
    "llama4": Family(
        with_sizes("Llama4TextConfig", GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=2),
        hooked=False, left_to_hf=True,
    ),
    "smollm3": Family(with_sizes("SmolLM3Config", GROUPED, no_rope_layers=[1, 0]), hooked=False),
    "olmo2": Family(with_sizes("Olmo2Config", GROUPED), hooked=False),
    "glm": Family(with_sizes("GlmConfig", GROUPED, head_dim=8), hooked=False),
    "phi3": Family(with_sizes("Phi3Config", GROUPED)),
    "falcon": Family(
        with_sizes("FalconConfig", SIZES, alibi=False, new_decoder_architecture=False, multi_query=True), hooked=False
    ),
    "mpt": Family(
        with_sizes("MptConfig", {}, vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
        hooked=False,
    ),
}  # fmt: skip
UNEVEN = ("laguna_4_8", "laguna_8_4")  # layers with different numbers of heads; their weights are not split by head
if find_spec("transformers.models.laguna"):
    FAMILIES |= {
        f"laguna_{first}_{second}": Family(
            with_sizes("LagunaConfig", GROUPED, head_dim=8, num_attention_heads_per_layer=[first, second],
                       sliding_window=6, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                       shared_expert_intermediate_size=16),
            hooked=False, left_to_hf=True,
        )
        for first, second in ((4, 8), (8, 4))
    }  # fmt: skip


# each family as every backend that can analyse it
ANALYSED = [(name, kind) for name, family in FAMILIES.items() for kind in ("hooked", "bridge") if getattr(family, kind)]
LLAMAS = ("llama3", "llama_linear", "llama_dynamic")  # Llamas of other frequencies, and of nothing else


def family_cases(*quick: str, without: Sequence[str] = ()) -> list[Any]:
    """Families as parameters (name, backend) of a test: each once, on its backends in turn; these few on both, and all
    others slow. Of Llamas that differ in their frequencies alone one is enough for what is computed with any."""
    import pytest

    cases = []
    for number, (name, family) in enumerate(FAMILIES.items()):
        if name in (*without, *LLAMAS):
            continue
        backends = [backend for backend in ("hooked", "bridge") if getattr(family, backend)]
        chosen, marks = (backends, ()) if name in quick else ([backends[number % len(backends)]], pytest.mark.slow)
        cases += [pytest.param(name, backend, marks=marks) for backend in chosen]
    return cases


def lively(config: Any, seed: int = 0):
    """The config's Hugging Face model with lively random weights, float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    config.pad_token_id = None
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


@cache
def tokenizer():
    """A byte-level tokenizer cut to 64 tokens, with <s> = 0 put in front by default and </s> = 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-", "Ġ", "Ċ"]
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def save_family(name: str, directory: str | Path, seed: int = 0) -> Path:
    """Write the family's tiny model and a tokenizer as a Hugging Face directory (safetensors)."""
    return save_config(FAMILIES[name].config(), directory, seed)


def save_config(config: Any, directory: str | Path, seed: int = 0) -> Path:
    """Write a lively model of any config and a tokenizer of 64 tokens."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    lively(config, seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return Path(directory)


def as_dtype(directory: Path, place: Path, dtype: torch.dtype) -> Path:
    """Write a copy of a model's directory with weights of another dtype, which its config.json says, too."""
    from safetensors.torch import load_file, save_file

    for file in directory.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    weights = {name: weight.to(dtype) for name, weight in load_file(directory / "model.safetensors").items()}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (place / "config.json").write_text(json.dumps(config))
    return place


def save_small(directory: str | Path, seed: int = 0) -> Path:
    """Write a lively Qwen2 (a Llama with biases of q, k and v) of 2 layers with the bundled model's tokenizer, for what
    needs words."""
    from tl_posgen.models.conversion.files import MINI

    config = with_sizes("Qwen2Config", GROUPED, vocab_size=2048, max_position_embeddings=512)()
    directory = save_config(config, directory, seed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((MINI / name).read_bytes())
    return directory
