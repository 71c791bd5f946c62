"""Refusing models whose forward passes do not give their own numbers, the same ones every time."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.model import Model


def require_evaluation(model: Model) -> None:
    """Refuse active dropout and autocast (InputError) and quantised weights (UnsupportedModelError). Any floating-point
    dtype of two bytes or more is taken."""
    if (found := next(active_dropout(model), None)) is not None:
        raise InputError(f"the model is in training mode and {found} is active; call model.eval() first")
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.element_size() < 2 or type(weight.detach()) is not torch.Tensor:
            plain = type(weight.detach()) is torch.Tensor
            dtype = str(weight.dtype).removeprefix("torch.") if plain else type(weight.detach()).__name__
            raise UnsupportedModelError(
                f"{name} is quantised ({dtype}); load the model in float32, float16 or bfloat16"
            )
    if found := [name for name, module in model.named_modules() if ".quantized." in f"{type(module).__module__}."]:
        raise UnsupportedModelError(f"{found[0]} is quantised; load the model in float32, float16 or bfloat16")
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        raise InputError(
            "autocast is on, so the model computes in another dtype than its weights have; leave its block"
        )


def require_weights(model: Model) -> None:
    """Refuse weights and buffers on the device meta, which holds no numbers: offloaded, or not loaded."""
    held = chain(model.named_parameters(), model.named_buffers())
    if name := next((name for name, one in held if one.is_meta), None):
        raise InputError(
            f"{name} is on the device meta, which holds no numbers (offloaded by accelerate, or not loaded); load the "
            "whole model onto devices that hold it, such as load_model(..., device='cpu')"
        )


def active_dropout(model: Any) -> Iterator[str]:
    """Yield modules in training mode that drop: those of torch, and those with a share such as `attention_dropout`."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        shares = {"p": getattr(module, "p", 0)} if isinstance(module, torch.nn.modules.dropout._DropoutNd) else {}
        shares |= {key: value for key, value in vars(module).items() if key.endswith("dropout")}
        if any(isinstance(share, float) and share > 0 for share in shares.values()):
            yield f"dropout in {name or type(module).__name__}"
