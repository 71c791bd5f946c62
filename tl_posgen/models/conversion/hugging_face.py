"""Reading a directory or GGUF file with transformers: config, tokenizer, model; faults are refused in one line."""

import copy
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.gguf_file import from_place, gguf_config
from tl_posgen.models.conversion.source import COMPUTED, first_line, is_gguf
from tl_posgen.models.conversion.weights import StoredWeights, fault_of
from tl_posgen.models.memory import memory_of

# fields of the configs of all families that must be whole numbers above 0, and numbers above 0
WHOLE = re.compile(
    r"(^|\.)(num_hidden_layers|num_layers|n_layers?|hidden_size|n_embd|d_model|head_dim|vocab_size|"
    r"max_position_embeddings|n_positions|num(_attention|_key_value|_kv)?_heads|n_heads?)$"
)
POSITIVE = re.compile(
    r"(^|\.)(query_pre_attn_scalar|rope_theta|rotary_emb_base|rope_local_base_freq|"
    r"rope_(scaling|parameters)\.(.*\.)?factor)$"
)


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    """Read the Hugging Face config of a directory, without the network; ModelError names the field that is wrong, or
    the method by which the weights are quantised."""
    from transformers import AutoConfig

    if is_gguf(directory):
        return copy.deepcopy(gguf_config(directory, directory.stat().st_mtime_ns))
    try:
        written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for name, value in entries(written):
            if wrong := what_is_wrong(name, value):
                raise ModelError(f"{directory}: config.json says {name} = {value!r}; {wrong}")
            if name.endswith("quantization_config.quant_method"):
                raise ModelError(
                    f"{directory}: quantised weights ({value}) are not measured; give the model that they were made "
                    "of, in float32 or bfloat16"
                )
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except ModelError:
        raise
    except Exception as error:  # configs validate themselves with errors of many kinds
        raise ModelError(f"{directory}: config.json cannot be used: {first_line(error)}") from error


def entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything inside that is no list or mapping; names of nested ones are joined by dots."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from entries(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for one in value:
            yield from entries(one, name)
    else:
        yield name, value


def what_is_wrong(name: str, value: Any) -> str | None:
    """Say why no model can be made of this entry; None where nothing is known against it."""
    if isinstance(value, float) and math.isnan(value):
        return "it must be a number"
    if value is None:
        return None
    positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if WHOLE.search(name) and not (positive and isinstance(value, int)):
        return "it must be a whole number, 1 or more"
    return "it must be a number above 0" if POSITIVE.search(name) and not positive else None


def load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a directory, without the network."""
    from transformers import AutoTokenizer

    try:
        place, where = from_place(directory)
        return AutoTokenizer.from_pretrained(place, **where, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise ModelError(f"{directory}: its tokenizer cannot be used: {first_line(error)}") from error


class Planned(NamedTuple):
    """Class of a directory's model, and the dtype that it asks for or was asked for."""

    kind: type
    dtype: torch.dtype


def plan(directory: Path, config: Any, dtype: torch.dtype | Literal["auto"], trust_remote_code: bool) -> Planned:
    """Plan the model of a directory before weights are read; "auto" is the dtype in config.json, else of the weights.
    ModelError for weights that are not those of the model, or more than memory holds."""
    from transformers import AutoModelForCausalLM

    meta = {"dtype": dtype, "device_map": "meta", "use_safetensors": True, "trust_remote_code": trust_remote_code}
    planned, report = from_pretrained(AutoModelForCausalLM, directory, config, directory, **meta)
    require_all(directory, report, "config.json")
    require_memory(directory, sum(weight.numel() for weight in planned.parameters()), planned.dtype)
    return Planned(type(planned), planned.dtype)


def require_all(place: Path, report: Mapping[str, Any], config: str) -> None:
    """Refuse weights that are not those of the model of this config."""
    wrong = {
        "lack {} ({} tensors are missing)": sorted(report["missing_keys"]),
        "hold {} in another size ({} tensors do)": sorted(name for name, *_ in report["mismatched_keys"]),
        "hold {}, which the model does not have ({} tensors)": sorted(
            name for name in report["unexpected_keys"] if not COMPUTED.search(name)
        ),
    }
    for words, names in wrong.items():
        if names:
            found = words.format(names[0], len(names))
            raise ModelError(f"{place}: the weights {found}; the checkpoint does not belong to {config}")


def require_memory(place: Path, n_weights: int, dtype: torch.dtype) -> None:
    """Refuse more weights than the memory of this machine holds."""
    held = memory_of(torch.device("cpu"))
    if held is not None and (needed := n_weights * dtype.itemsize) > held:
        raise ModelError(
            f"{place}: {n_weights / 1e9:.1f} billion weights need {needed / 1e9:.0f} GB in {dtype}, and "
            f"this machine has {held / 1e9:.0f} GB; load a smaller model or dtype"
        )


def load_gguf(path: Path, config: Any, dtype: torch.dtype, **more: Any) -> Any:
    """Load the model of a GGUF file, its weights dequantised, in evaluation mode, with eager attention."""
    import transformers

    if hasattr(transformers, "GgufConfig"):  # else a GPU may get the blocks as they are
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options = {"gguf_file": path.name, "dtype": dtype, **more}
    with redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers silences
        hf_model, report = from_pretrained(transformers.AutoModelForCausalLM, path, config, path.parent, **options)
    require_all(path, report, "its metadata")
    for name, weight in hf_model.named_parameters():
        if fault := fault_of(name, weight):
            raise ModelError(f"{path}: {name} {fault}")
    if quantiser := getattr(hf_model, "hf_quantizer", None):
        quantiser.remove_quantization_config(hf_model)  # with it save_pretrained refuses
    hf_model.config.name_or_path = str(path)
    return hf_model.eval()


def load_hf_model(
    directory: Path, config: Any, kind: type, dtype: torch.dtype, weights: StoredWeights, **more: Any
) -> Any:
    """Load the model of a directory in evaluation mode, with eager attention; each tensor is read once and looked
    at."""
    options = {"dtype": dtype, "state_dict": dict(weights.tensors), **more}
    hf_model, _ = from_pretrained(kind, directory, config, None, **options)
    weights.require_finite()
    hf_model.config.name_or_path = str(directory)
    return hf_model.eval()


def from_pretrained(
    kind: Any, directory: Path, config: Any, place: Path | None, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Return the model, and which weights it has, lacks, and did not take."""
    options |= {"attn_implementation": "eager", "local_files_only": True, "ignore_mismatched_sizes": True}
    try:
        loaded: Any = kind.from_pretrained(place, config=copy.deepcopy(config), output_loading_info=True, **options)
        return loaded
    except Exception as error:  # every architecture has its own
        raise ModelError(f"{directory}: transformers cannot load this model: {first_line(error)}") from error
