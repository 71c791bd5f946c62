"""A Hugging Face model in memory made a HookedTransformer or a TransformerBridge, weights untouched."""

import copy
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.backend import Model
from tl_posgen.models.hooked_config import RECIPES, hooked_settings
from tl_posgen.models.source import first_line


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
        state = getattr(conversions, RECIPES[architecture].converter)(hf_model, cfg)
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
