"""Loading a model by name or directory, as a HookedTransformer or a TransformerBridge."""

import os
from pathlib import Path
from typing import Any, Literal

import torch

from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.convert import as_bridge, as_hooked, hooked_parts
from tl_posgen.models.origin import Origin, remember_origin
from tl_posgen.models.quiet import quiet
from tl_posgen.models.source import find_source, first_line, read_config, require_finite

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
        ModelError: nothing found under that name, missing files, no network, pickled weights only, NaN or inf weights.
        UnsupportedModelError: the architecture cannot be had with that backend.
        InputError: an unknown backend.

    Example:
        >>> model = load_model("mini")
        >>> model.cfg.n_layers > 0
        True
    """
    if backend not in ("auto", "hooked", "bridge"):
        raise InputError(f"backend {backend!r}: choose auto, hooked or bridge")
    if backend == "hooked":
        hooked_parts()  # refuse before anything is downloaded
    source = find_source(name_or_directory, revision)
    require_finite(source.directory)
    with quiet(), torch.random.fork_rng(devices=[]):
        tokenizer = load_tokenizer(source.directory, trust_remote_code)
        hf_model = load_hf_model(source.directory, dtype, trust_remote_code)
        model = build(hf_model, tokenizer, source.name, device or default_device(), backend)
    origin = Origin(
        source.name, backend_of(model), source.revision, source.directory, trust_remote_code=trust_remote_code
    )
    remember_origin(model, origin)
    return model


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def build(hf_model: Any, tokenizer: Any, name: str, device: str, backend: str) -> Model:
    """The Hugging Face model as the asked backend; "auto" is a HookedTransformer where that has the same logits."""
    model = None
    if backend != "bridge":
        try:
            model = as_hooked(hf_model, tokenizer, name, device)
        except ModelError:
            if backend == "hooked":
                raise
    if model is None:
        model = as_bridge(hf_model, tokenizer, name, device)
    model.cfg.default_prepend_bos = prepends_bos(tokenizer)
    return model


def prepends_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS token in front of a text by default."""
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    return len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id


def load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception on a broken tokenizer.json
        raise ModelError(f"{directory}: its tokenizer cannot be used: {first_line(error)}") from error


def load_hf_model(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The Hugging Face model of a directory, on the CPU, in evaluation mode, with eager attention.

    Raises:
        ModelError: an unknown architecture, or weights that do not fill the model.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(directory, trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{directory}: transformers cannot load this model: {first_line(error)}") from error
    model, report = loaded
    if report["missing_keys"]:
        raise ModelError(
            f"{directory}: the weights lack {sorted(report['missing_keys'])[0]} "
            f"({len(report['missing_keys'])} tensors are missing); the checkpoint does not belong to config.json"
        )
    return model.eval()
