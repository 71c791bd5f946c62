"""What transformers does: config, tokenizer and model of a directory or GGUF file, its faults refused in one line; and
frequencies by its rules of scaling RoPE."""

import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.files import first_line, is_gguf
from tl_posgen.models.conversion.gguf_file import adds_bos, require_applied, with_metadata
from tl_posgen.models.memory import memory_of

# buffers that older versions of transformers saved and newer ones compute
_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|embed_positions|position_ids|attn\.bias|attention\.bias)$")
_FLOATING = ("F64", "F32", "F16", "BF16")  # as safetensors and GGUF name them
_PROCESS = RLock()  # what is silenced belongs to all threads
TransformersRule = Literal["linear", "ntk", "yarn", "longrope", "llama3"]


@contextmanager
def silenced(seed: int | None = None, device: str = "cpu") -> Iterator[None]:
    """Suppress prints, warnings, log lines and progress bars; make new tensors on this device, whatever torch's default
    is. Afterwards everything is as before, the random states of the CPU and of this device too, which begin as after
    torch.manual_seed(seed). One thread at a time: all of this belongs to the process."""
    silent, place = io.StringIO(), torch.device(device)
    extra_devices = [] if place.type == "cpu" else [place]
    with _PROCESS:
        disabled = logging.root.manager.disable
        try:
            logging.disable(logging.WARNING)
            silencers = redirect_stdout(silent), redirect_stderr(silent), warnings.catch_warnings()
            with torch.random.fork_rng(devices=extra_devices), place, silencers[0], silencers[1], silencers[2]:
                warnings.simplefilter("ignore")
                if seed is not None:
                    torch.default_generator.manual_seed(seed)
                    if extra_devices:
                        with torch.cuda.device(place):
                            torch.cuda.manual_seed(seed)
                yield
        finally:
            logging.disable(disabled)


def _from_place(place: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory, and the keyword arguments, by which transformers finds a directory or a GGUF file."""
    if is_gguf(place):
        return place.parent, {"gguf_file": place.name, "local_files_only": True}
    return place, {"local_files_only": True}


def _reader_of(place: Path) -> Any:
    import gguf

    return gguf.GGUFReader(place)


def read_config(place: Path, trust_remote_code: bool) -> Any:
    """Read the Hugging Face config, without the network; ModelError for one that transformers does not take, or that
    says by which method the weights are quantised."""
    from transformers import AutoConfig

    directory, where = _from_place(place)
    try:
        written = {} if is_gguf(place) else json.loads((place / "config.json").read_text(encoding="utf-8"))
        method = (written.get("quantization_config") or {}).get("quant_method")
        config = None if method else AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **where)
    except Exception as error:  # configs validate themselves with errors of many kinds
        reason = first_line(error)
        if is_gguf(place):
            what, remedy = "transformers cannot read this model from GGUF", "give the directory of its safetensors"
            raise ModelError(f"{place}: {what} ({reason}); {remedy}") from error
        raise ModelError(f"{place}: config.json cannot be used: {reason}") from error
    if method:
        raise ModelError(
            f"{place}: quantised weights ({method}) are not measured; give the model that they were made of, in "
            "float32 or bfloat16"
        )
    return with_metadata(place, _reader_of(place), config) if is_gguf(place) else config


def load_tokenizer(place: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a directory or a GGUF file, without the network; of a file it puts a BOS in front of a text
    where llama.cpp does."""
    from transformers import AutoTokenizer

    directory, where = _from_place(place)
    try:
        wanted = is_gguf(place) and adds_bos(_reader_of(place))
        where |= {"add_bos_token": wanted} if is_gguf(place) else {}
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, **where)
    except Exception as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise ModelError(f"{place}: its tokenizer cannot be used: {first_line(error)}") from error
    if wanted and tokenizer("").input_ids[:1] != [tokenizer.bos_token_id]:
        raise ModelError(
            f"{place}: a text begins with a BOS by this file, and transformers' tokenizer puts none there (its "
            f"tokenizer.ggml.bos_token_id is {tokenizer.bos_token_id}); give tokenizer=, a directory that holds one"
        )
    return tokenizer


def plan(directory: Path, config: Any, dtype: torch.dtype | Literal["auto"], trust_remote_code: bool) -> torch.dtype:
    """Return the dtype that a directory's model asks for, or was asked for, before weights are read; "auto" is the one
    in config.json, else that of the weights. ModelError for weights that are quantised, are not those of the model, or
    are more than memory holds."""
    from safetensors import safe_open

    paths, index = [directory / "model.safetensors"], directory / "model.safetensors.index.json"
    if not paths[0].is_file() and index.is_file():
        try:
            named = json.loads(index.read_text("utf-8"))["weight_map"].values()
            paths = [directory / name for name in sorted(set(named))]
        except Exception as error:  # no JSON, or of another form
            raise ModelError(f"{index}: not a readable index of weights ({error}); download it again") from error
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # its own, and those of the system
            raise ModelError(f"{path}: not a readable safetensors file ({error}); download it again") from error
        for name, held in stored.items():
            if held not in _FLOATING and not _COMPUTED.search(name):
                raise ModelError(f"{directory}: {name} is quantised ({held}); save the model in float32 or bfloat16")
    planned = _from_pretrained(directory, config, dtype=dtype, device_map="meta", trust_remote_code=trust_remote_code)
    require_memory(directory, sum(weight.numel() for weight in planned.parameters()), planned.dtype)
    return planned.dtype


def load_hf_model(place: Path, config: Any, **options: Any) -> Any:
    """Load the model of a directory, or of a GGUF file with its weights dequantised, in evaluation mode, with eager
    attention; ModelError for weights with NaN or inf, which names the tensor."""
    import transformers

    if is_gguf(place) and hasattr(transformers, "GgufConfig"):  # else a GPU may get the blocks as they are
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    hf_model = _from_pretrained(place, config, **options)
    for name, weight in hf_model.named_parameters():
        if not weight.is_meta and weight.numel():
            low, high = weight.detach().aminmax()  # NaN is the least and the largest
            if not (low.isfinite() and high.isfinite()):
                kind = "NaN" if low.isnan() else "inf"
                raise ModelError(f"{place}: {name} holds {kind}; the weights are broken, load another checkpoint")
    if is_gguf(place):
        require_applied(place, _reader_of(place), hf_model)
        if quantiser := getattr(hf_model, "hf_quantizer", None):
            quantiser.remove_quantization_config(hf_model)  # with it save_pretrained refuses
    hf_model.config.name_or_path = str(place)
    return hf_model.eval()


def _from_pretrained(place: Path, config: Any, **options: Any) -> Any:
    """Return the model; ModelError where the weights are not those of the model of this config."""
    from transformers import AutoModelForCausalLM

    directory, where = _from_place(place)
    options |= {"attn_implementation": "eager", "ignore_mismatched_sizes": True, "output_loading_info": True, **where}
    options |= {} if is_gguf(place) else {"use_safetensors": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, config=copy.deepcopy(config), **options)
    except Exception as error:  # every architecture has its own
        raise ModelError(f"{place}: transformers cannot load this model: {first_line(error)}") from error
    hf_model, report = loaded
    unknown = [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)]
    wrong: Mapping[str, list[str]] = {
        "lack {} ({} tensors are missing)": sorted(report["missing_keys"]),
        "hold {} in another size ({} tensors do)": sorted(name for name, *_ in report["mismatched_keys"]),
        "hold {}, which the model does not have ({} tensors)": sorted(unknown),
    }
    for template, names in wrong.items():
        if names:
            source = "its metadata" if is_gguf(place) else "config.json"
            fault = template.format(names[0], len(names))
            raise ModelError(f"{place}: the weights {fault}; the checkpoint does not belong to {source}")
    return hf_model


def require_memory(place: Path, n_weights: int, dtype: torch.dtype) -> None:
    """Refuse more weights than the memory of this machine holds."""
    memory = memory_of(torch.device("cpu"))
    if memory is not None and (needed := n_weights * dtype.itemsize) > memory:
        raise ModelError(
            f"{place}: {n_weights / 1e9:.1f} billion weights need {needed / 1e9:.0f} GB in {dtype}, and "
            f"this machine has {memory / 1e9:.0f} GB; load a smaller model or dtype"
        )


@lru_cache(maxsize=256)
def scaled_frequencies(
    rule: TransformersRule,
    factor: int | float,
    rotary_dim: int,
    base: float,
    training_length: int,
    long_factors: tuple[float, ...] = (),
) -> tuple[Float[Tensor, " plane"], float]:
    """Return theta'_m and the factor on rotated q and k, of `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`.

    "ntk" is theirs called "dynamic" with its own factor at 1 and a text of factor x training_length tokens: the base
    becomes base * factor^(rotary_dim / (rotary_dim - 2)). "longrope" has the same divisors for texts of any length;
    "llama3" has the low_freq_factor 1 and high_freq_factor 4 of Llama 3.1. All of it is float32 there, and returned as
    float64; do not change it in place, it is kept.

    Args:
        rotary_dim: twice the number of planes; 4 at least for "ntk".
        training_length: tokens of the training context.
        long_factors: what "longrope" divides the frequencies by, one a plane.

    Source: transformers; Chen et al. 2023 (arXiv 2306.15595) for linear, Peng et al. 2023 (arXiv 2309.00071) for YaRN,
    Ding et al. 2024 (arXiv 2402.13753) for LongRoPE.

    Example:
        >>> theta, scaling = scaled_frequencies("linear", 2, rotary_dim=4, base=100.0, training_length=64)
        >>> theta.round(decimals=6).tolist(), scaling
        ([0.5, 0.05], 1.0)
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = {name: list(long_factors) for name in ("short_factor", "long_factor")}  # for texts of any length
    rules: dict[str, dict[str, Any]] = {
        "linear": {"rope_type": "linear", "factor": factor},
        "ntk": {"rope_type": "dynamic", "factor": 1.0},
        "yarn": {"rope_type": "yarn", "factor": factor},
        "longrope": {"rope_type": "longrope", "factor": factor, **divisors},
        "llama3": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    rope = {"rope_theta": base, "original_max_position_embeddings": training_length, **rules[rule]}
    sizes: dict[str, Any] = {"hidden_size": rotary_dim, "num_attention_heads": 1, "head_dim": rotary_dim}
    with silenced():
        config = LlamaConfig(max_position_embeddings=training_length, rope_parameters=rope, **sizes)
        make = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        theta, scaling = make(config, torch.device("cpu"), seq_len=round(factor * training_length))
    return double(theta), float(scaling)
