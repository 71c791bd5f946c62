"""Where two models of one architecture differ in what their layers do with positions."""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posgen.models.geometry.probe import Probed, ProbedOrReason

_OF_VALUES = ("error", "sinks")  # fields that are seen in the scores of one pass
_ROUNDING = 1e-2  # more than bfloat16 rounds: a model that is cast has its tables cast too


def first_difference(ours: Sequence[ProbedOrReason], theirs: Sequence[ProbedOrReason]) -> str:
    """Return the first field of a layer's geometry that differs, with both values; "" where none does. Layers that one
    of the models has no description of are passed over.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.models.session import session_of
        >>> model = load_model("mini")
        >>> here, model.blocks[0].attn.attn_scale = session_of(model).layers(), 1.0
        >>> first_difference(here, session_of(model).layers(again=True))
        'layer 0 has scale 1 where the model has 0.177'
    """
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        if isinstance(our_layer, Probed) and isinstance(their_layer, Probed):
            for field in fields(our_layer.geometry):
                here, there = (getattr(probed.geometry, field.name) for probed in (our_layer, their_layer))
                if field.name not in _OF_VALUES and (difference := _difference(here, there)):
                    return f"layer {our_layer.geometry.layer} has {field.name} {difference}"
    return ""


def _difference(here: Any, there: Any) -> str:
    """Return "0.35 where the model has 1.0"; of tensors the first entries that differ, of dataclasses the first field;
    "" of what is the same up to rounding."""
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        if here.shape != there.shape:
            return f"of {len(there)} entries where the model has {len(here)}"
        here, there = here.cpu(), there.to("cpu", here.dtype)
        apart = ~torch.isclose(here, there, rtol=_ROUNDING, atol=0)
        return f"{there[apart][0].item():g} where the model has {here[apart][0].item():g}" if apart.any() else ""
    if is_dataclass(here) and type(here) is type(there):
        differences = (_difference(getattr(here, field.name), getattr(there, field.name)) for field in fields(here))
        return next(filter(None, differences), "")
    if isinstance(here, float) and isinstance(there, float):
        return "" if math.isclose(here, there, rel_tol=_ROUNDING) else f"{there:.3g} where the model has {here:.3g}"
    return "" if type(here) is type(there) and here == there else f"{there} where the model has {here}"
