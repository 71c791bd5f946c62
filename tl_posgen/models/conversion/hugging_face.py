"""Reading a directory or GGUF file with transformers: config, tokenizer, model; faults are refused in one line."""

import copy
import io
import json
import math
import re
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import COMPUTED, first_line, is_gguf
from tl_posgen.models.conversion.weights import require_finite, require_usable
from tl_posgen.models.memory import memory_of

# fields of the configs of all families that must be whole numbers above 0, and numbers above 0
WHOLE = re.compile(
    r"num_hidden_layers|num_layers|n_layers?|hidden_size|n_embd|d_model|head_dim|vocab_size|max_position_embeddings|"
    r"n_positions|num(_attention|_key_value|_kv)?_heads|n_heads?"
)
POSITIVE = re.compile(r"query_pre_attn_scalar|rope_theta|rotary_emb_base|rope_local_base_freq|factor")


def _from_place(place: Path) -> tuple[Path, dict[str, str]]:
    """Return the directory, and the keyword arguments, by which transformers finds a directory or a GGUF file."""
    return (place.parent, {"gguf_file": place.name}) if is_gguf(place) else (place, {})


def read_config(place: Path, trust_remote_code: bool) -> Any:
    """Read the Hugging Face config, without the network; ModelError names the field that is wrong, or the method by
    which the weights are quantised."""
    from transformers import AutoConfig

    directory, where = _from_place(place)
    try:
        if not where:
            _require_numbers(json.loads((place / "config.json").read_text(encoding="utf-8")), f"{place}: config.json")
        return AutoConfig.from_pretrained(
            directory, **where, trust_remote_code=trust_remote_code and not where, local_files_only=True
        )
    except ModelError:
        raise
    except Exception as error:  # configs validate themselves with errors of many kinds
        if where:
            raise ModelError(
                f"{place}: transformers cannot read this model from GGUF ({first_line(error)}); give the directory of "
                "its safetensors"
            ) from error
        raise ModelError(f"{place}: config.json cannot be used: {first_line(error)}") from error


def _require_numbers(value: Any, place: str, name: str = "") -> None:
    """Refuse entries of a config, at any depth, of which no model can be made."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            _require_numbers(one, place, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for one in value:
            _require_numbers(one, place, name)
    elif name.endswith("quantization_config.quant_method"):
        raise ModelError(
            f"{place.partition(':')[0]}: quantised weights ({value}) are not measured; give the model that they were "
            "made of, in float32 or bfloat16"
        )
    elif value is not None:
        last, positive = name.rpartition(".")[2], type(value) in (int, float) and 0 < value < math.inf
        wrong = ""
        if isinstance(value, float) and math.isnan(value):
            wrong = "it must be a number"
        elif WHOLE.fullmatch(last) and not (positive and isinstance(value, int)):
            wrong = "it must be a whole number, 1 or more"
        elif POSITIVE.fullmatch(last) and not positive:
            wrong = "it must be a number above 0"
        if wrong:
            raise ModelError(f"{place} says {name} = {value!r}; {wrong}")


def load_tokenizer(place: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a directory or a GGUF file, without the network."""
    from transformers import AutoTokenizer

    directory, where = _from_place(place)
    try:
        return AutoTokenizer.from_pretrained(
            directory, **where, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise ModelError(f"{place}: its tokenizer cannot be used: {first_line(error)}") from error


def plan(directory: Path, config: Any, dtype: torch.dtype | Literal["auto"], trust_remote_code: bool) -> torch.dtype:
    """Return the dtype that a directory's model asks for, or was asked for, before weights are read; "auto" is the one
    in config.json, else that of the weights. ModelError for weights that are quantised, are not those of the model, or
    are more than memory holds."""
    require_usable(directory, config)
    planned, report = _from_pretrained(
        directory, config, dtype=dtype, device_map="meta", trust_remote_code=trust_remote_code
    )
    _require_all(directory, report, "config.json")
    require_memory(directory, sum(weight.numel() for weight in planned.parameters()), planned.dtype)
    return planned.dtype


def load_hf_model(place: Path, config: Any, **more: Any) -> Any:
    """Load the model of a directory, or of a GGUF file with its weights dequantised, in evaluation mode, with eager
    attention."""
    import transformers

    if is_gguf(place) and hasattr(transformers, "GgufConfig"):  # else a GPU may get the blocks as they are
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers silences
        hf_model, report = _from_pretrained(place, config, **more)
    if is_gguf(place):
        _require_all(place, report, "its metadata")
    require_finite(place, hf_model)
    if is_gguf(place) and (quantiser := getattr(hf_model, "hf_quantizer", None)):
        quantiser.remove_quantization_config(hf_model)  # with it save_pretrained refuses
    hf_model.config.name_or_path = str(place)
    return hf_model.eval()


def _from_pretrained(place: Path, config: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the model, and which weights it has, lacks, and did not take."""
    from transformers import AutoModelForCausalLM

    directory, where = _from_place(place)
    options |= {"attn_implementation": "eager", "local_files_only": True, "ignore_mismatched_sizes": True, **where}
    options |= {} if where else {"use_safetensors": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=copy.deepcopy(config), output_loading_info=True, **options
        )
        return loaded
    except Exception as error:  # every architecture has its own
        raise ModelError(f"{place}: transformers cannot load this model: {first_line(error)}") from error


def _require_all(place: Path, report: Mapping[str, Any], config: str) -> None:
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
