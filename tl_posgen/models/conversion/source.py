"""Finding the directory that holds a model: config, safetensors weights and tokenizer, all of them there."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tl_posgen.errors import InputError, ModelError

MINI = Path(__file__).resolve().parents[1] / "mini"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADAPTER = "adapter_config.json"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# buffers that older versions of transformers saved and newer ones compute
COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|embed_positions|position_ids|attn\.bias|attention\.bias)$")
_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ModelFiles:
    """Directory with config.json and *.safetensors, or a GGUF file, and that of the tokenizer; `name`, `revision` as in
    `Origin`."""

    name: str
    directory: Path
    tokenizer: Path
    revision: str | None = None


def is_gguf(place: Path) -> bool:
    return place.suffix == ".gguf"


def local_directory(name: str | os.PathLike) -> Path | None:
    """Return where "mini", a directory or a GGUF file here lies: the file of a directory that holds one and no
    safetensors. None of anything else, ModelError of what can be no name."""
    words = os.fspath(name)
    path = MINI if words == "mini" else Path(words).expanduser()
    if not words.strip() or "\0" in words or max(map(len, path.parts), default=0) > 255:
        raise ModelError(f"{words!r}: neither a directory nor a name of a model")
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else [*path.glob("*.gguf")]
        path = files[0] if len(files) == 1 else path
    return path.resolve() if path.is_dir() or (is_gguf(path) and path.is_file()) else None


def find_files(
    name: str | os.PathLike, revision: str | None = None, tokenizer: str | os.PathLike | None = None
) -> ModelFiles:
    """Find the local directory, the bundled "mini", or the downloaded (or cached) Hub repository called `name`;
    `tokenizer` is a directory, or "mini", with another tokenizer than the one there."""
    other = None if tokenizer is None else tokenizer_directory(tokenizer)
    words, commit = os.fspath(name), None
    directory = local_directory(words)
    if directory is None:
        local = Path(words).expanduser()
        if local.exists():
            raise ModelError(
                f"{words} is a file; give the directory that holds config.json and the weights, or a GGUF file (*.gguf)"
            )
        if local.is_absolute() or words.startswith((".", "~")) or words.count("/") > 1 or "\\" in words:
            raise ModelError(f"{words}: no such directory")
        if is_gguf(local):
            raise ModelError(f"{words}: no such file")
        directory = download(words, revision)
        commit = directory.name
    _require_files(directory, with_tokenizer=other is None)
    return ModelFiles(words, directory, other or directory, commit)


def tokenizer_directory(tokenizer: str | os.PathLike) -> Path:
    """Return the directory of a tokenizer; InputError where there is none."""
    here = local_directory(tokenizer)
    if here is None or not (is_gguf(here) or any((here / name).is_file() for name in TOKENIZERS)):
        raise InputError(f"{os.fspath(tokenizer)}: no tokenizer there; give tokenizer=, a directory that holds one")
    return here


def _official_name(name: str) -> str:
    """Return the Hub's name of what TransformerLens calls by a short one.

    Example:
        >>> _official_name("gpt2-small"), _official_name("EleutherAI/pythia-70m")
        ('gpt2', 'EleutherAI/pythia-70m')
    """
    from transformer_lens.supported_models import MODEL_ALIASES

    return next((full for full, aliases in MODEL_ALIASES.items() if name in aliases), name)


def download(name: str, revision: str | None) -> Path:
    """Fetch config, safetensors and tokenizer of a Hub repository into the Hugging Face cache, or find them there."""
    from huggingface_hub import snapshot_download

    left_out = ["*/*", "consolidated*"]
    with hub_errors(name, revision):
        return Path(
            snapshot_download(
                _official_name(name), revision=revision, allow_patterns=_DOWNLOADED, ignore_patterns=left_out
            )
        )


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Raise errors of the Hub as a ModelError that names the model, and what to do."""
    from huggingface_hub import errors

    official = _official_name(name)
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(f"{official} asks for a licence: accept it on huggingface.co and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{official} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"{name}: neither a directory here nor a model on huggingface.co") from error
    except errors.NotASafetensorsRepoError as error:
        raise ModelError(f"{official}: no safetensors at revision {revision or 'main'}; choose another") from error
    except OSError as error:
        raise ModelError(
            f"{name}: no such directory here, and huggingface.co cannot be reached ({first_line(error)}); "
            "give a directory that save_pretrained wrote, or connect once to download the model"
        ) from error


def _require_files(here: Path, *, with_tokenizer: bool) -> None:
    """Refuse a directory without config, safetensors or tokenizer, or with an adapter; a part of a GGUF file. Pickled
    weights are not read: they can run code."""
    if is_gguf(here):
        if _SPLIT.search(here.name):
            raise ModelError(f"{here}: a part of a split model; join the parts: llama-gguf-split --merge FIRST WHOLE")
        return
    if (here / _ADAPTER).is_file():
        merged = (
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...) of the package peft"
        )
        if any((here / name).is_file() for name in WEIGHTS):
            beside = f"{here}: {_ADAPTER} beside the weights is an adapter, which is not added here"
            raise ModelError(f"{beside}; merge it ({merged}), or move it away to measure the base model")
        raise ModelError(
            f"{here}: an adapter without its base model; merge them ({merged}) and save the tokenizer there too"
        )
    if len(files := sorted(here.glob("*.gguf"))) > 1 and not any((here / name).is_file() for name in WEIGHTS):
        raise ModelError(f"{here}: holds {len(files)} GGUF files; give one of them, {files[0]} for instance")
    if not (here / "config.json").is_file():
        raise ModelError(f"{here}: no config.json; give a directory that save_pretrained wrote")
    if not any((here / name).is_file() for name in WEIGHTS):
        found = "no weights"
        if pickled := [*here.glob("*.bin"), *here.glob("*.pt"), *here.glob("*.pth")]:
            found = f"only pickled weights ({pickled[0].name}), which are not loaded because they can run code"
        raise ModelError(f"{here}: {found}; save the model with save_pretrained, which writes model.safetensors")
    if with_tokenizer and not any((here / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"{here}: no tokenizer; give tokenizer=, a directory that holds one, or save one there with save_pretrained"
        )


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line: the first, and what follows where that ends with a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def drop_from_cache(name: str, revision: str | None = None, cache: Path | None = None) -> int:
    """Delete a model's files at one revision from the Hub's cache, those of other revisions stay; bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        known = scan_cache_dir(cache)
    except CacheNotFound:
        return 0
    name, wanted = _official_name(name), revision or "main"
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
