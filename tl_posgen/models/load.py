"""Loading a model by name or directory, as a HookedTransformer or a TransformerBridge."""

import os
from pathlib import Path
from typing import Literal

import torch

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backend import Origin
from tl_posgen.models.config import read_config
from tl_posgen.models.convert import build, hooked_parts, load_hf_model, load_tokenizer
from tl_posgen.models.model import Model
from tl_posgen.models.quiet import quiet
from tl_posgen.models.source import Source, find_source, first_line, require_finite, require_layers
from tl_posgen.models.wrapped import wrap

BackendChoice = Literal["auto", "hooked", "bridge"]


def load_model(
    name_or_directory: str | os.PathLike,
    backend: BackendChoice | str = "auto",
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model for analysis, its weights as they are: no layer norm folded in, nothing centred.

    Args:
        name_or_directory: a name on huggingface.co, a directory that save_pretrained wrote (no network is needed then),
            or "mini", the small model that comes with this package.
        backend: "hooked" for a HookedTransformer (TransformerLens 3.9, ten architectures), "bridge" for a
            TransformerBridge, "auto" for the first that can have the same logits as the Hugging Face model.
        dtype: of the weights. Analyses take q and k to float32 at least.
        device: "cuda" where there is one, else "cpu", if left out.
        revision: branch, tag or commit on huggingface.co; a checkpoint, for instance.
        trust_remote_code: run the repository's own Python code. Only for repositories you trust.

    Returns:
        The model, in evaluation mode, with its tokenizer. `default_prepend_bos` is set to what the tokenizer does by
        itself, so that model.to_tokens(text) are the tokens the model was trained on.

    Raises:
        ModelError: nothing found under that name, missing files, no network, pickled weights only, NaN or inf weights,
            a config.json that no model can be made of or that belongs to other weights, more than memory holds.
        UnsupportedModelError: the architecture cannot be had with that backend.
        InputError: an unknown backend, a device or dtype that nothing can be computed in.

    Example:
        >>> model = load_model("mini")
        >>> model.cfg.n_layers > 0
        True
    """
    if not isinstance(name_or_directory, str | os.PathLike):
        raise InputError(f"{name_or_directory!r} is no name or directory of a model")
    if backend not in ("auto", "hooked", "bridge"):
        raise InputError(f"backend {backend!r}: choose auto, hooked or bridge")
    if backend == "hooked":
        hooked_parts()  # refuse before anything is downloaded
    source = find_source(name_or_directory, revision)
    return load_source(source, source.directory, backend, dtype, device, trust_remote_code)


def load_source(
    source: Source,
    tokenizer: Path,
    backend: BackendChoice | str,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """The model of a directory with the tokenizer of this or another one, its origin remembered."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype={dtype!r}: give a floating-point one such as torch.float32")
    device = usable("cuda" if device is None and torch.cuda.is_available() else "cpu" if device is None else device)
    with quiet():
        config = read_config(source.directory, trust_remote_code)
        require_finite(source.directory)
        require_layers(source.directory, config)
        words = load_tokenizer(tokenizer, trust_remote_code)
        hf_model = load_hf_model(source.directory, config, dtype, trust_remote_code)
        model = build(hf_model, words, source.name, device, backend)
    origin = {"revision": source.revision, "directory": source.directory, "trust_remote_code": trust_remote_code}
    wrapped = wrap(model)
    wrapped.remember_origin(Origin(source.name, wrapped.backend.name, **origin))
    if reason := wrapped.difference():
        raise UnsupportedModelError(f"{source.name}: {reason}")
    return model


def usable(device: str) -> str:
    """The device; InputError where torch does not know it or cannot compute there."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch has several kinds for one mistake
        raise InputError(
            f"device {device!r} cannot be used ({first_line(error)}); give 'cpu', or leave it out"
        ) from error
    return device


def open_model(model: Model | str | os.PathLike) -> Model:
    """A model of TransformerLens as it is, or the one of that name or directory, loaded by `load_model`.

    Raises:
        InputError: neither a HookedTransformer, nor a TransformerBridge, nor a name, nor a path.
        ModelError: as `load_model`.

    Example:
        >>> model = open_model("mini")
        >>> open_model(model) is model
        True
    """
    return load_model(model) if isinstance(model, str | os.PathLike) else wrap(model).model


def without_context_limit(model: Model) -> Model:
    """The same model as an object that takes prompts longer than `model` does, where there is one; else `model`.

    It is loaded anew from where `model` came from, in the dtype and on the device of `model`.
    """
    wrapped = wrap(model)
    backend, origin, weight = wrapped.limit.lifted_as, wrapped.origin, next(model.parameters())
    if backend is None:
        return model
    trust, name = origin.trust_remote_code, origin.directory or origin.name
    return load_model(name, backend, weight.dtype, str(weight.device), trust_remote_code=trust)
