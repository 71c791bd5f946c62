"""GGUF files: reading one once; what it says of attention, positions and BOS beyond what transformers' reader takes of
it, applied to the config or refused by name, and proved on the loaded model."""

import copy
import math
import re
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.files import first_line, is_gguf

_FLOATING = ("F64", "F32", "F16", "BF16")  # as GGUF names them
_reading = threading.Lock()
# what attention and positions depend on: keys, without the architecture (epsilons are those of norms), and tensors
_KEYS = re.compile(r"(attention\.|rope\.|.*(alibi|attn|final_logit))(?!.*epsilon)")
_TENSORS = re.compile(r"attn|rope|position")
_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_NOT_READ = "{}: {} is not read where transformers reads a GGUF file, and attention depends on it; {}"
_REMEDY = "give the directory of its safetensors"
_TOKENIZER = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.model", "tokenizer.ggml.pre")
# values of the last for which llama.cpp puts a BOS in front of a text where the file does not say
_PRE_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                 "jina-v5-nano", "tekken", "chameleon")  # fmt: skip


def require_layers(place: Path, reader: Any, config: Any) -> None:
    """Refuse a GGUF file with tensors of other layers than its metadata counts: transformers leaves them out."""
    layers = {int(match[1]) for tensor in reader.tensors if (match := re.match(r"blk\.(\d+)\.", tensor.name))}
    n = getattr(config.get_text_config(), "num_hidden_layers", None)
    if n is not None and layers and max(layers) >= n:
        raise ModelError(
            f"{place}: it holds layer {max(layers)}, and its metadata counts {n} layers; download it again"
        )


@contextmanager
def read_once(place: Path) -> Iterator[Any]:
    """Yield the reader of a GGUF file, None of a directory. While the block runs transformers gets the same reader for
    config, tokenizer and weights, as parsing a vocabulary takes 3 to 16 seconds each time, and one table of names of
    tensors, which it makes anew for every module of the model: 8 seconds of a model of 30 layers.

    Raises:
        ModelError: it is no GGUF file, is damaged, or the package gguf is missing.
    """
    if not is_gguf(place):
        yield None
        return
    try:
        import gguf
    except ImportError as error:
        missing = "a GGUF file is read by the package gguf, which is not installed"
        raise ModelError(f"{place}: {missing}; pip install 'gguf>=0.17'") from error
    with place.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{place}: not a GGUF file, by its first bytes; give one, or a directory of safetensors")
    try:
        reader = gguf.GGUFReader(place)
    except Exception as error:  # whatever numpy says of bytes that are not there
        raise ModelError(f"{place}: a damaged GGUF file ({first_line(error)}); download it again") from error
    with _reading:
        reader_class, names_of = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = lambda path, *args: reader if Path(path) == place else reader_class(path, *args)  # pyright: ignore
        gguf.get_tensor_name_map = lru_cache(names_of)
        try:
            yield reader
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader_class, names_of


def quantisation_of(reader: Any) -> str | None:
    """Return what the file says it is quantised to, such as "Q4_K_M", else the type of most weights; None for none."""
    import gguf

    type_names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    field = reader.get_field("general.file_type")
    name = None if field is None else type_names.get(field.contents())
    if name is None or name == "GUESSED":
        sizes: Counter[str] = Counter()
        for tensor in reader.tensors:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        name = sizes.most_common(1)[0][0]
    return None if name in _FLOATING else name


def with_metadata(place: Path, reader: Any, config: Any) -> Any:
    """Return a copy of the config with what the file says of attention and positions, where transformers has it.

    Scaled RoPE becomes that rule of transformers which has the file's frequencies: "linear", "yarn", "llama3" where
    rope_freqs.weight holds the divisors of Llama 3.1 to 3.3, else "longrope", which takes any divisors.

    Raises:
        ModelError: a key that attention or positions depend on, with a value for which the config has no entry.
    """
    config, metadata = copy.deepcopy(config), _metadata_of(reader)
    _apply_attention(metadata, config)
    ropes = _ropes(place, metadata, reader, config)
    if "" in ropes:
        axes = {name: value for name, value in config.rope_parameters.items() if name.startswith("mrope")}
        config.rope_parameters = ropes[""].parameters | axes
        if [n for n in metadata.get("rope.dimension_sections", ()) if n] == axes.get("mrope_section"):
            metadata.pop("rope.dimension_sections", None)  # several axes of positions, which are one for text
        if hasattr(config, "original_max_position_embeddings"):  # of Phi 3, beside the rule
            before = config.original_max_position_embeddings
            config.original_max_position_embeddings = ropes[""].parameters.get(
                "original_max_position_embeddings", before
            )
    elif ropes:
        config.rope_parameters = {kind: rope.parameters for kind, rope in ropes.items()}
    for key, value in metadata.items():
        if _KEYS.match(key) and (value or key == "attention.causal"):  # 0 says nothing, and False this one
            named = f"{_architecture(reader)}.{key} = {textwrap.shorten(repr(value), 60, placeholder=' ...')}"
            raise ModelError(_NOT_READ.format(place, named, _REMEDY))
    return config


def require_applied(place: Path, reader: Any, hf_model: Any) -> None:
    """Refuse a model that turns by other frequencies than the file's, or that has no place for a tensor of the file
    which attention or positions depend on."""
    for kind, rope in _ropes(place, _metadata_of(reader), reader, hf_model.config.get_text_config()).items():
        names = [f"{kind and kind + '_'}{name}" for name in ("inv_freq", "attention_scaling")]
        used = [[getattr(module, name) for name in names] for module in hf_model.modules() if hasattr(module, names[0])]
        if not used or not all(rope.is_used(*attributes) for attributes in used):
            raise ModelError(
                f"{place}: transformers' {type(hf_model).__name__} does not turn by the frequencies that the file says "
                f"(rope.* and rope_*, by the rule {rope.parameters['rope_type']!r}); {_REMEDY}"
            )
    if _reports_what_it_leaves_out(_architecture(reader)):
        return
    taken = {*_DIVISORS, *_taken_by(hf_model, _architecture(reader))}
    for tensor in reader.tensors:
        if _TENSORS.search(tensor.name) and tensor.name not in taken:
            raise ModelError(_NOT_READ.format(place, f"the tensor {tensor.name}", _REMEDY))


def adds_bos(reader: Any) -> bool:
    """Tell whether llama.cpp puts a BOS in front of a text: as the file says, else by the kind of its tokenizer."""
    metadata = {key: field.contents() for key, field in reader.fields.items() if key in _TOKENIZER}
    add_bos, kind, pre = (metadata.get(key) for key in _TOKENIZER)
    return bool(kind in ("llama", "bert") or (kind == "gpt2" and pre in _PRE_WITH_BOS) if add_bos is None else add_bos)


def _architecture(reader: Any) -> str:
    return reader.get_field("general.architecture").contents()


def _metadata_of(reader: Any) -> dict[str, Any]:
    """Return what the file says of its architecture: keys without its name. Whoever reads one takes it out."""
    prefix = f"{_architecture(reader)}."
    return {k.removeprefix(prefix): field.contents() for k, field in reader.fields.items() if k.startswith(prefix)}


def _apply_attention(metadata: dict[str, Any], config: Any) -> None:
    """Give the config heads' widths, windows and caps; take out of `metadata` what it has of them."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # Mamba
        return
    counts = {"head_count": heads, "head_count_kv": getattr(config, "num_key_value_heads", None) or heads}
    for name, n in counts.items():
        value = metadata.get(f"attention.{name}")
        if ({*value} - {0} if isinstance(value, list) else {value}) == {n}:  # 0: a layer without attention
            del metadata[f"attention.{name}"]
    if hasattr(config, "head_dim"):
        config.head_dim = metadata.get("attention.key_length", config.head_dim)
    for key in ("attention.key_length", "attention.value_length"):
        if metadata.get(key) == _head_dim(config):
            del metadata[key]
    kinds, key = getattr(config, "layer_types", None), "attention.sliding_window_pattern"
    if kinds and (pattern := metadata.get(key)):  # every n-th layer sees all, or one value a layer
        windowed = pattern if isinstance(pattern, list) else [(at + 1) % pattern != 0 for at in range(len(kinds))]
        if len(windowed) == len(kinds):
            kinds = ["sliding_attention" if window else "full_attention" for window in windowed]
            config.layer_types = kinds
            del metadata[key]
    if hasattr(config, "sliding_window") and (kinds is None or "sliding_attention" in kinds):
        config.sliding_window = metadata.pop("attention.sliding_window", 0) or config.sliding_window
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hasattr(config, name):
            setattr(config, name, metadata.pop(name, getattr(config, name)))
    if hasattr(config, "query_pre_attn_scalar"):  # no key says it: Gemma 2 and 3 of 27 B have the width a head
        widest = (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62))
        config.query_pre_attn_scalar = config.hidden_size // heads if widest else _head_dim(config)
    if metadata.get("attention.causal"):
        del metadata["attention.causal"]


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class _Rope:
    """RoPE of a file, by llama.cpp's definition: theta_m in radians a token, the factor on rotated q and k, and what
    says both to transformers."""

    theta: Float[Tensor, " plane"]
    scaling: float
    parameters: dict[str, Any]

    def is_used(self, inv_freq: Tensor, scaling: float) -> bool:
        """Tell whether a module of transformers, in float32, turns by this."""
        theta = inv_freq.detach().cpu().to(DOUBLE)
        same = theta.shape == self.theta.shape and torch.allclose(theta, self.theta, rtol=1e-5, atol=0)
        return same and math.isclose(scaling, self.scaling, rel_tol=1e-5)


def _ropes(place: Path, metadata: dict[str, Any], reader: Any, config: Any) -> dict[str, _Rope]:
    """Return the file's RoPE by kind of layer, "" where all layers have one; {} of a file without."""
    divisors = _divisors(reader)
    rope_parameters = getattr(config, "rope_parameters", None)
    if not rope_parameters or not (divisors or any(key.startswith("rope.") for key in metadata)):
        return {}
    n = metadata.get("rope.dimension_count", _head_dim(config)) // 2
    if wrong := {len(values) for values in divisors.values()} - {n}:
        raise ModelError(f"{place}: rope_*.weight has {wrong.pop()} divisors, and RoPE {n} planes; download it again")
    scaled = _scaled_rope(metadata, divisors, config)
    if "full_attention" not in rope_parameters:
        if metadata.get("rope.freq_base_swa") == scaled.parameters["rope_theta"]:
            del metadata["rope.freq_base_swa"]
        return {"": scaled}
    base = metadata.pop("rope.freq_base_swa", 10_000.0)  # windowed layers have no scaling
    plain = _plain(base, 2 * len(scaled.theta))
    return {
        "full_attention": scaled,
        "sliding_attention": _Rope(plain, 1.0, {"rope_type": "default", "rope_theta": base}),
    }


def _scaled_rope(metadata: dict[str, Any], divisors: Mapping[str, Tensor], config: Any) -> _Rope:
    """Return RoPE with the file's scaling: frequencies are divided plane by plane, then scaled by a rule."""
    width, key = _head_dim(config), "rope.scaling."
    base, dim = metadata.pop("rope.freq_base", 10_000.0), metadata.pop("rope.dimension_count", width)
    factor = metadata.pop(f"{key}factor", 0) or metadata.pop("rope.scale_linear", 0) or 1.0
    length = metadata.pop(f"{key}original_context_length", 0) or config.max_position_embeddings
    scaling = metadata.pop(f"{key}attn_factor", 0) or 1.0
    metadata.pop(f"{key}finetuned", None)  # says something of the training alone
    rule = metadata.pop(f"{key}type", "linear")
    plain = theta = _plain(base, dim)
    parameters: dict[str, Any] = {"rope_type": "default"}
    if rule == "yarn" and factor != 1:
        magnitude = 1 + 0.1 * math.log(factor)
        slow, fast = (
            metadata.pop(f"{key}yarn_beta_{speed}", 0) or turns for speed, turns in (("slow", 1.0), ("fast", 32.0))
        )
        theta = _yarn(plain, base, factor, length, fast, slow)
        # both readers agree on the factor on q and k only where the key repeats what YaRN itself has
        if math.isclose(metadata.get(f"{key}yarn_attn_factor", magnitude), magnitude, rel_tol=1e-4):
            metadata.pop(f"{key}yarn_attn_factor", None)
        if metadata.get(f"{key}yarn_ext_factor", 1.0) in (1.0, -1.0):  # -1: not set
            metadata.pop(f"{key}yarn_ext_factor", None)
        scaling *= magnitude
        parameters = {"rope_type": "yarn", "factor": factor, "attention_factor": scaling, "beta_slow": slow,
                      "beta_fast": fast, "original_max_position_embeddings": length}  # fmt: skip
    elif rule in ("linear", "longrope") and factor != 1:
        theta, parameters = plain / factor, {"rope_type": "linear", "factor": factor}
    elif rule not in ("linear", "longrope", "yarn", "none"):
        metadata[f"{key}type"] = rule
    if divisors or (scaling != 1 and rule != "yarn"):
        short, long = (plain / theta * divisors.get(name, 1.0) for name in ("short", "long"))
        theta = plain / short
        if scaling == 1 and torch.equal(short, long) and _is_llama3(plain, short):
            parameters = {"rope_type": "llama3", "factor": float(short.max()), "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
        else:
            parameters = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
                          "attention_factor": scaling, "original_max_position_embeddings": length}  # fmt: skip
    if dim != width or "partial_rotary_factor" in config.rope_parameters:
        parameters["partial_rotary_factor"] = dim / width
    return _Rope(theta, scaling, {"rope_theta": base, **parameters})


def _plain(base: float, dim: int) -> Float[Tensor, " plane"]:
    return base ** -(torch.arange(0, dim, 2, dtype=DOUBLE) / dim)


def _yarn(
    plain: Float[Tensor, " plane"], base: float, factor: float, length: int, fast: float, slow: float
) -> Float[Tensor, " plane"]:
    """theta_m (1 - s_m + s_m / factor), s_m rising from 0 at the plane that turns `fast` times in the length to 1 at
    that of `slow` times."""
    n = len(plain)
    low, high = (n * math.log(length / (2 * math.pi * turns)) / math.log(base) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * n - 1)
    share = ((torch.arange(n, dtype=DOUBLE) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - share + share / factor)


def _is_llama3(plain: Float[Tensor, " plane"], divisors: Float[Tensor, " plane"]) -> bool:
    """Tell divisors of Llama 3.1 to 3.3: the largest up to one turn in 8,192 tokens, 1 from four turns on."""
    share = ((8192 * plain / (2 * math.pi) - 1) / 3).clamp(0, 1)
    return torch.allclose(1 / ((1 - share) / divisors.max() + share), divisors, rtol=1e-5)


def _divisors(reader: Any) -> dict[str, Float[Tensor, " plane"]]:
    """Return what the file divides frequencies by in texts within the training length, "short", and beyond, "long"."""
    import gguf

    divisors = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).flatten().to(DOUBLE)
        for tensor in reader.tensors
        if tensor.name in _DIVISORS
    }
    always, *by_length = (divisors.get(name) for name in _DIVISORS)
    pair = by_length if always is None else (always, always)
    return {name: values for name, values in zip(("short", "long"), pair, strict=True) if values is not None}


def _reports_what_it_leaves_out(architecture: str) -> bool:
    """Tell whether transformers reads this architecture as it reads safetensors: an unexpected tensor is refused there.
    Its older reader, of most architectures, passes over what the model has no place for."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # an older transformers
        return False
    return is_gguf_arch_supported(architecture)


def _taken_by(hf_model: Any, architecture: str) -> set[str]:
    """Return the names that tensors of a file have if transformers' reader has a place for them in the model."""
    from transformers import modeling_gguf_pytorch_utils as reading

    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=hf_model.config.to_dict())
    return {*reading.get_gguf_hf_weights_map(hf_model, processor)}
