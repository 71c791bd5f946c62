"""Sizes of a model before it is loaded, and its files in the Hub's cache."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.gguf_file import gguf_reader
from tl_posgen.models.conversion.hugging_face import read_config
from tl_posgen.models.conversion.source import WEIGHTS, hub_errors, is_gguf, official_name
from tl_posgen.models.conversion.weights import headers
from tl_posgen.models.memory import IMPORTS, PEAK, need_of_pass

DTYPES = {"F64": DOUBLE, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Size of a model: numbers in its weights, the dtype of most, heads of one layer, and d_vocab + d_model as
    width."""

    parameters: int
    dtype: torch.dtype
    heads: int
    width: int

    def bytes_needed(
        self, length: int, itemsize: int, *, copies: int = 1, is_streamed: bool = False, matrices: int = 0
    ) -> int:
        """1.12 times the copies of the weights that are held beside each other, and the largest need of a pass.

        Args:
            itemsize: bytes of a number, as loaded.
            is_streamed, matrices: as in `need_of_pass`.

        Example:
            >>> shape = Shape(parameters=10**9, dtype=torch.bfloat16, heads=32, width=60_000)
            >>> [round(shape.bytes_needed(2**n, 2, is_streamed=n > 10) / 1e9, 1) for n in (6, 10, 15)]
            [3.0, 3.2, 7.0]
        """
        _, each, power = need_of_pass(self.heads, self.width, itemsize, is_streamed=is_streamed, matrices=matrices)
        return int(IMPORTS + PEAK * copies * itemsize * self.parameters + each * length**power)


def shape_of(name: str | Path, revision: str | None = None) -> Shape:
    """Return the shape of a directory's weights, or of a model on huggingface.co, of which only headers are fetched.

    Example:
        >>> from tl_posgen.models.conversion.source import MINI
        >>> shape_of(MINI)
        Shape(parameters=1000576, dtype=torch.float16, heads=4, width=2176)
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download

    if isinstance(name, Path):
        return _shape_of_directory(name)
    official = official_name(name)
    try:
        return _shape_of_directory(Path(snapshot_download(official, revision=revision, local_files_only=True)))
    except (OSError, ValueError, ModelError):
        pass  # not in the cache, or not all of its files
    with hub_errors(name, revision):
        config = Path(hf_hub_download(official, "config.json", revision=revision)).parent
        return _shape_from(config, get_safetensors_metadata(official, revision=revision).parameter_count)


def _shape_of_directory(directory: Path) -> Shape:
    """Return the shape that the headers of its safetensors, or of a GGUF file, give."""
    if is_gguf(directory):
        n_weights = sum(int(tensor.n_elements) for tensor in gguf_reader(directory).tensors)
        return _shape_from(directory, {"F32": n_weights})  # as they are loaded
    if not any((directory / name).is_file() for name in WEIGHTS):
        raise ModelError(f"{directory}: no weights; save the model with save_pretrained")
    counts: Counter[str] = Counter()
    for header in headers(directory).values():
        counts[header.dtype] += math.prod(header.shape)
    return _shape_from(directory, counts)


def _shape_from(directory: Path, counts: Mapping[Any, int]) -> Shape:
    """Return the shape of a model, by its config.json and the number of parameters of each dtype of safetensors."""
    config = read_config(directory, trust_remote_code=False).get_text_config()
    heads, *width = (int(getattr(config, name, 0)) for name in ("num_attention_heads", "vocab_size", "hidden_size"))
    most = max(counts, key=lambda name: counts[name], default="")
    return Shape(sum(counts.values()), DTYPES.get(most, torch.float32), heads, sum(width))


def drop_from_cache(name: str, revision: str | None = None, cache: Path | None = None) -> int:
    """Delete a model's files at one revision from the Hub's cache, those of other revisions stay; bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        known = scan_cache_dir(cache)
    except CacheNotFound:
        return 0
    name, wanted = official_name(name), revision or "main"
    found = [
        one.commit_hash
        for repo in known.repos
        if repo.repo_id == name and repo.repo_type == "model"
        for one in repo.revisions
        if wanted in one.refs or one.commit_hash == wanted
    ]
    plan = known.delete_revisions(*found)
    plan.execute()
    return plan.expected_freed_size
