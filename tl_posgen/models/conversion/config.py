"""Reading the Hugging Face config of a directory; refusing numbers that no model can be made of."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import first_line

# what they are called in the configs of different families
LAYERS = r"num_hidden_layers|num_layers|n_layers?"
SIZES = rf"{LAYERS}|hidden_size|n_embd|d_model|head_dim|vocab_size|max_position_embeddings|n_positions"
HEADS = r"num(_attention|_key_value|_kv)?_heads|n_heads?"
POSITIVE = (
    r"query_pre_attn_scalar|rope_theta|rotary_emb_base|rope_local_base_freq|rope_(scaling|parameters)\.(.*\.)?factor"
)


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    """Read the Hugging Face config of a directory, without the network.

    Raises:
        ModelError: an unknown architecture, a size that is not a whole number above 0, a base of RoPE or a scale
            that is not a number above 0, NaN anywhere; with the field.
    """
    from transformers import AutoConfig

    try:
        written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for name, value in entries(written):
            if wrong := what_is_wrong(name, value):
                raise ModelError(f"{directory}: config.json says {name} = {value!r}; {wrong}")
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, float) and math.isnan(value):
        return "it must be a number"
    if value is None:
        return None
    if re.search(rf"(^|\.)({SIZES}|{HEADS})$", name) and not (is_number and isinstance(value, int) and value > 0):
        return "it must be a whole number, 1 or more"
    if re.search(rf"(^|\.)({POSITIVE})$", name) and not (is_number and 0 < value < math.inf):
        return "it must be a number above 0"
    return None
