"""Loading the Hugging Face model of a directory: planned from its config, then filled with its weights."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import COMPUTED, first_line
from tl_posgen.models.conversion.weights import StoredWeights
from tl_posgen.models.memory import memory_of


def load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a directory, without the network."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise ModelError(f"{directory}: its tokenizer cannot be used: {first_line(error)}") from error


class Planned(NamedTuple):
    """Class of a directory's model, and the dtype that it asks for or was asked for."""

    kind: type
    dtype: torch.dtype


def plan(directory: Path, config: Any, dtype: torch.dtype | Literal["auto"], trust_remote_code: bool) -> Planned:
    """Plan the model of a directory before weights are read; "auto" is the dtype in config.json, else of the weights.

    Raises:
        ModelError: an unknown architecture, weights that are not those of the model, or more than memory holds.
    """
    from transformers import AutoModelForCausalLM

    meta = {"dtype": dtype, "device_map": "meta", "use_safetensors": True, "trust_remote_code": trust_remote_code}
    planned, report = from_pretrained(AutoModelForCausalLM, directory, config, directory, **meta)
    require_fitting(directory, report)
    require_memory(directory, sum(weight.numel() for weight in planned.parameters()), planned.dtype)
    return Planned(type(planned), planned.dtype)


def load_hf_model(
    directory: Path, config: Any, planned: Planned, dtype: torch.dtype, weights: StoredWeights, **more: Any
) -> Any:
    """Load the Hugging Face model of a directory, in evaluation mode, with eager attention; each tensor is read once.

    Raises:
        ModelError: NaN or inf in a tensor, which is named.
    """
    hf_model, _ = from_pretrained(
        planned.kind, directory, config, None, dtype=dtype, state_dict=dict(weights.tensors), **more
    )
    weights.require_finite()
    hf_model.config.name_or_path = str(directory)
    return hf_model.eval()


def from_pretrained(
    kind: Any, directory: Path, config: Any, place: Path | None, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Return the model, and which weights it has, lacks, and did not take."""
    try:
        loaded: Any = kind.from_pretrained(
            place,
            config=copy.deepcopy(config),
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        return loaded
    except Exception as error:  # every architecture has its own
        raise ModelError(f"{directory}: transformers cannot load this model: {first_line(error)}") from error


def require_fitting(directory: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that the model lacks, has in another size, or does not take."""
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
            raise ModelError(f"{directory}: the weights {found}; the checkpoint does not belong to config.json")


def require_memory(directory: Path, n_weights: int, dtype: torch.dtype) -> None:
    """Refuse a model that is larger than this machine's memory, where that is known."""
    needed, held = n_weights * dtype.itemsize, memory_of(torch.device("cpu"))
    if held is not None and needed > held:
        sizes = f"{n_weights / 1e9:.1f} billion weights need {needed / 1e9:.0f} GB in {dtype}"
        raise ModelError(
            f"{directory}: {sizes}, and this machine has {held / 1e9:.0f} GB; load a smaller model or dtype"
        )
