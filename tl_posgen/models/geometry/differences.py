"""Where two models of one architecture differ in what their layers do with positions."""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posgen.models.geometry.probe import Found, Probed


def first_difference(ours: Sequence[Found], theirs: Sequence[Found]) -> str:
    """Return the first field of a layer's geometry that differs, with both values; "" where none does. Layers that one
    of the models has no description of are passed over.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.models.session import session_of
        >>> layers = session_of(load_model("mini")).found()
        >>> first_difference(layers, layers)
        ''
    """
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Probed) and isinstance(other, Probed):
            for field in fields(one.geometry):
                here, there = (getattr(each.geometry, field.name) for each in (one, other))
                if field.name != "error" and not _is_same(here, there):
                    return f"layer {one.geometry.layer} has {field.name} {there} where the model has {here}"
    return ""


def _is_same(here: Any, there: Any) -> bool:
    """Tell whether two values are the same, up to rounding."""
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return here.shape == there.shape and torch.allclose(here.cpu(), there.to("cpu", here.dtype), rtol=1e-5)
    if is_dataclass(here) and type(here) is type(there):
        return all(_is_same(getattr(here, field.name), getattr(there, field.name)) for field in fields(here))
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-5)
    return type(here) is type(there) and here == there
