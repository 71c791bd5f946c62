"""Finding the directory that holds a model: config, safetensors weights and tokenizer, all of them there."""

import os
import re
import runpy
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tl_posgen.errors import InputError, ModelError

MINI = Path(__file__).resolve().parents[1] / "mini"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MERGED = "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...) of the package peft"


def is_gguf(place: Path) -> bool:
    return place.suffix == ".gguf" and not place.is_dir()


def local_directory(name: str | os.PathLike) -> Path | None:
    """Return where "mini", a directory or a GGUF file here lies: the file of a directory that holds one and no
    safetensors. None of anything else, ModelError of what can be no name."""
    name_or_path = os.fspath(name)
    path = MINI if name_or_path == "mini" else Path(name_or_path).expanduser()
    if not name_or_path.strip() or "\0" in name_or_path or max(map(len, path.parts), default=0) > 255:
        raise ModelError(f"{name_or_path!r}: neither a directory nor a name of a model")
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else [*path.glob("*.gguf")]
        path = files[0] if len(files) == 1 else path
    return path.resolve() if path.is_dir() or (is_gguf(path) and path.is_file()) else None


def find_files(
    name: str | os.PathLike, revision: str | None = None, tokenizer: str | os.PathLike | None = None
) -> tuple[Path, Path, str | None]:
    """Return the directory with config.json and *.safetensors, or the GGUF file, that of the tokenizer, and the commit:
    of a local directory, the bundled "mini", or the downloaded (or cached) Hub repository called `name`; `tokenizer` is
    a directory, or "mini", with another tokenizer than the one there."""
    of_tokenizer, commit = None, None
    if tokenizer is not None:
        of_tokenizer = local_directory(tokenizer)
        if of_tokenizer is None or not (
            is_gguf(of_tokenizer) or any((of_tokenizer / name).is_file() for name in TOKENIZERS)
        ):
            raise InputError(f"{tokenizer}: no tokenizer there; give tokenizer=, a directory that holds one")
    name_or_path, directory = os.fspath(name), local_directory(name)
    if directory is None:
        local = Path(name_or_path).expanduser()
        if local.exists():
            raise ModelError(
                f"{name_or_path} is a file; give the directory that holds config.json and the weights, or a GGUF file "
                "(*.gguf)"
            )
        if local.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1 or is_gguf(local):
            raise ModelError(f"{name_or_path}: no such {'file' if is_gguf(local) else 'directory'}")
        directory = _download(name_or_path, revision)
        commit = directory.name
    _require_files(directory, with_tokenizer=of_tokenizer is None)
    return directory, of_tokenizer or directory, commit


def _official_name(name: str) -> str:
    """Return the Hub's name of what TransformerLens calls by a short one: "gpt2" of "gpt2-small"."""
    place: Any = find_spec("transformer_lens")  # which takes ten seconds to import
    aliases_by_name = runpy.run_path(str(Path(place.origin).with_name("supported_models.py")))["MODEL_ALIASES"]
    return next((full for full, aliases in aliases_by_name.items() if name in aliases), name)


def _download(name: str, revision: str | None) -> Path:
    """Fetch config, safetensors and tokenizer of a Hub repository into the Hugging Face cache, or find them there."""
    from huggingface_hub import errors, snapshot_download

    wanted, left_out = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"], ["*/*", "consolidated*"]
    place = _official_name(name)
    try:
        return Path(snapshot_download(place, revision=revision, allow_patterns=wanted, ignore_patterns=left_out))
    except errors.GatedRepoError as error:
        raise ModelError(f"{place} asks for a licence: accept it on huggingface.co and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{place} has no revision {revision!r}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"{name}: neither a directory here nor a model on huggingface.co") from error
    except OSError as error:
        meant = " (did you mean mini, the bundled model?)" if get_close_matches(name, ["mini"]) else ""
        raise ModelError(
            f"{name}{meant}: no such directory here, and huggingface.co cannot be reached ({first_line(error)}); "
            "give a directory that save_pretrained wrote, or connect once to download the model"
        ) from error


def _require_files(here: Path, *, with_tokenizer: bool) -> None:
    """Refuse a directory without config, safetensors or tokenizer, or with an adapter; a part of a GGUF file. Pickled
    weights are not read: they can run code."""
    reason, has_weights = "", any((here / name).is_file() for name in WEIGHTS)
    if is_gguf(here):
        if re.search(r"-\d{5}-of-\d{5}\.gguf$", here.name):
            reason = "a part of a split model; join the parts: llama-gguf-split --merge FIRST WHOLE"
    elif (here / "adapter_config.json").is_file():
        reason = f"an adapter without its base model; merge them ({_MERGED}) and save the tokenizer there too"
        if has_weights:
            reason = (
                "adapter_config.json beside the weights is an adapter, which is not added here; merge it "
                f"({_MERGED}), or move it away to measure the base model"
            )
    elif not has_weights and len(files := sorted(here.glob("*.gguf"))) > 1:
        reason = f"holds {len(files)} GGUF files; give one of them, {files[0]} for instance"
    elif not (here / "config.json").is_file():
        reason = "no config.json; give a directory that save_pretrained wrote"
    elif not has_weights:
        pickled = [*here.glob("*.bin"), *here.glob("*.pt"), *here.glob("*.pth")]
        fault = "no weights"
        if pickled:
            fault = f"only pickled weights ({pickled[0].name}), which are not loaded because they can run code"
        reason = f"{fault}; save the model with save_pretrained, which writes model.safetensors"
    elif with_tokenizer and not any((here / name).is_file() for name in TOKENIZERS):
        reason = "no tokenizer; give tokenizer=, a directory that holds one, or save one there with save_pretrained"
    if reason:
        raise ModelError(f"{here}: {reason}")


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line: the first, and what follows where that ends with a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def drop_from_cache(name: str, revision: str | None = None, cache: Path | None = None) -> int:
    """Delete a model's files at one revision from the Hub's cache, those of other revisions stay; bytes freed."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = scan_cache_dir(cache)
    except CacheNotFound:
        return 0
    name, wanted = _official_name(name), revision or "main"
    revisions = [
        commit
        for repo in cached.repos
        if (repo.repo_id, repo.repo_type) == (name, "model")
        for commit in repo.revisions
        if wanted in commit.refs or commit.commit_hash == wanted
    ]
    plan = cached.delete_revisions(*(commit.commit_hash for commit in revisions))
    plan.execute()
    return plan.expected_freed_size
