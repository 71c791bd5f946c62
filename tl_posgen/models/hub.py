"""What can be known of a model before it is loaded, and its files in the Hub's cache."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from tl_posgen.errors import ModelError
from tl_posgen.models.config import read_config
from tl_posgen.models.source import first_line

LEAST = 2**30  # bytes that Python, torch and TransformerLens take themselves
MATRICES = 3  # of scores that one layer of eager attention holds at once


@dataclass(frozen=True)
class Shape:
    """How large a model is.

    Attributes:
        parameters: numbers in its weights. heads: of one layer.
    """

    parameters: int
    heads: int

    def bytes_needed(self, length: int, n_nulls: int, itemsize: int = 4) -> int:
        """(2 + nulls) copies of the weights, as there is one beside the other while it is loaded, and the scores of one
        layer: 3 n_heads length^2 numbers.

        Example:
            >>> Shape(parameters=10**9, heads=32).bytes_needed(1024, n_nulls=1) / 1e9 > 12
            True
        """
        return LEAST + itemsize * ((2 + n_nulls) * self.parameters + MATRICES * self.heads * length**2)


def shape_of(name: str | Path, revision: str | None = None) -> Shape:
    """The shape of a directory's weights, or of a model on huggingface.co, of which only headers are fetched.

    Raises:
        ModelError: no such model or revision, no safetensors, a config that cannot be read, no network.

    Example:
        >>> from tl_posgen.models.source import MINI
        >>> shape_of(MINI)
        Shape(parameters=1000576, heads=4)
    """
    from huggingface_hub import errors, get_safetensors_metadata, hf_hub_download, snapshot_download

    if isinstance(name, Path):
        return shape_of_directory(name)
    try:
        return shape_of_directory(Path(snapshot_download(name, revision=revision, local_files_only=True)))
    except (OSError, ValueError, ModelError):
        pass  # not in the cache, or only a part of it
    try:
        config = Path(hf_hub_download(name, "config.json", revision=revision)).parent
        return Shape(sum(get_safetensors_metadata(name, revision=revision).parameter_count.values()), heads_of(config))
    except errors.GatedRepoError as error:
        raise ModelError(f"{name} asks for a licence: accept it on huggingface.co and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"{name}: neither a directory here nor a model on huggingface.co") from error
    except errors.NotASafetensorsRepoError as error:
        raise ModelError(f"{name}: no safetensors at revision {revision or 'main'}; choose another") from error
    except OSError as error:
        raise ModelError(
            f"{name}: no such directory here, and huggingface.co cannot be reached ({first_line(error)})"
        ) from error


def shape_of_directory(directory: Path) -> Shape:
    """Read off the headers of its safetensors."""
    parameters = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            try:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            except (ValueError, MemoryError, OverflowError) as error:
                raise ModelError(f"{path}: not a readable safetensors file; download it again") from error
        parameters += sum(math.prod(one["shape"]) for tensor, one in header.items() if tensor != "__metadata__")
    if not parameters:
        raise ModelError(f"{directory}: no weights; save the model with save_pretrained")
    return Shape(parameters, heads_of(directory))


def heads_of(directory: Path) -> int:
    """Heads of one layer, as config.json says."""
    return int(read_config(directory, trust_remote_code=False).get_text_config().num_attention_heads)


def drop_from_cache(name: str, revision: str | None = None, cache: Path | None = None) -> int:
    """Delete a model's files at one revision from the Hub's cache, those of other revisions stay; bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        known = scan_cache_dir(cache)
    except CacheNotFound:
        return 0
    wanted = revision or "main"
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
