"""A Hugging Face model, of a directory or with random weights, made the kind of object asked for, weights untouched."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.hooked_config import RECIPES, hooked_settings
from tl_posgen.models.model import Model
from tl_posgen.models.source import first_line, read_config


def as_hooked(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
    """A HookedTransformer with the same weights, none folded or centred; its logits are compared with the original's.

    Raises:
        ModelError: TransformerLens 4, which has no HookedTransformer.
        UnsupportedModelError: an architecture without a recipe, or a model that the recipe does not reproduce.
    """
    HookedTransformer, HookedTransformerConfig, conversions = hooked_parts()
    architecture = type(hf_model).__name__
    settings = hooked_settings(hf_model.config, architecture)
    dtype = next(hf_model.parameters()).dtype
    try:
        cfg = HookedTransformerConfig(**settings, model_name=name, dtype=dtype, device=device)
        model = HookedTransformer(cfg, tokenizer=tokenizer)
        state = getattr(conversions, f"convert_{RECIPES[architecture][0]}_weights")(hf_model, cfg)
        model.load_and_process_state_dict(
            state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
        )
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name}: TransformerLens cannot make this {architecture} a HookedTransformer ({first_line(error)}); "
            "use backend='bridge'"
        ) from error
    model.eval()
    require_same_logits(model, hf_model, name)
    return model


def hooked_parts() -> tuple[Any, Any, Any]:
    """HookedTransformer, its config class and the weight converters."""
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig  # pyright: ignore
        from transformer_lens.pretrained import weight_conversions  # pyright: ignore
    except ImportError as error:
        raise ModelError(
            "the installed TransformerLens has no HookedTransformer (it was removed in version 4); "
            'use backend="bridge", or install transformer-lens==3.9.0'
        ) from error
    return HookedTransformer, HookedTransformerConfig, weight_conversions


def require_same_logits(model: Model, hf_model: Any, name: str) -> None:
    """Refuse a conversion that changes the model: logits of a few random tokens, to 1e-3 of the largest in float32."""
    n = min(24, model.cfg.n_ctx)
    tokens = torch.randint(model.cfg.d_vocab, (1, n), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        original: Tensor = hf_model(tokens.to(hf_model.device)).logits.cpu().float()
        converted: Tensor = model(tokens.to(model.cfg.device)).cpu().float()
    allowed = max(1e-3, 32 * torch.finfo(model.cfg.dtype).eps) * float(original.abs().max())
    error = float((converted - original).abs().max())
    if not error <= allowed:
        raise UnsupportedModelError(
            f"{name}: as a HookedTransformer its logits differ by {error:.2g} ({allowed:.2g} is allowed), "
            "so TransformerLens computes something else; use backend='bridge'"
        )


def as_bridge(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
    """A TransformerBridge around the model, which becomes part of it.

    Raises:
        UnsupportedModelError: TransformerLens has no adapter for the architecture.
    """
    from transformer_lens.model_bridge import TransformerBridge

    hf_model.config.architectures = hf_model.config.architectures or [type(hf_model).__name__]
    dtype = next(hf_model.parameters()).dtype
    try:
        bridge = TransformerBridge.boot_transformers(
            name, hf_model=hf_model.to(device), tokenizer=copy.deepcopy(tokenizer), device=device, dtype=dtype
        )
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name}: TransformerLens has no bridge for {type(hf_model).__name__} ({first_line(error)})"
        ) from error
    if tokenizer.eos_token is None:
        # the bridge has given its copy an end-of-text token that the model has no embedding for, and texts can hold it
        bridge._tokenizer = tokenizer
    bridge.eval()
    return bridge


def build(hf_model: Any, tokenizer: Any, name: str, device: str, backend: str) -> Model:
    """The Hugging Face model as the asked backend; "auto" is a HookedTransformer where that has the same logits."""
    try:
        model = (as_bridge if backend == "bridge" else as_hooked)(hf_model, tokenizer, name, device)
    except ModelError:
        if backend != "auto":
            raise
        model = as_bridge(hf_model, tokenizer, name, device)
    # whether the tokenizer puts its BOS token in front of a text by default
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    model.cfg.default_prepend_bos = len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id
    return model


def build_random(
    config: Any, tokenizer: Any, name: str, like: Model, backend: str, trust_remote_code: bool
) -> tuple[Model, str]:
    """A model of a Hugging Face config, initialised by transformers, in the dtype and on the device of `like`; and the
    rule that made its weights."""
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
    hf_model = AutoModelForCausalLM.from_config(config, **options).eval()
    weight = next(like.parameters())
    made = build(hf_model.to(weight.dtype), tokenizer, name, str(weight.device), backend)
    return made, f"transformers, {type(hf_model).__name__}"


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
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{directory}: the weights lack {missing[0]} ({len(missing)} tensors are missing); "
            "the checkpoint does not belong to config.json"
        )
    return model.eval()
