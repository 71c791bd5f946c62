"""TransformerLens hook names of a layer, how to read what these hooks carry, and which models are not read.

Read is [batch, head, pos, d] on either backend: queries and keys before RoPE, after qk-norm, in the model's dtype.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.model import Model
from tl_posgen.rope.rotation import at_least_float32

FORMED = ("attn_scores", "pattern")  # [query, key], which a streamed pass does not form
PARTS = ("resid", "q", "k", "v", *FORMED)


def checked_needs(needs: Iterable[str], known: Sequence[str]) -> frozenset[str]:
    """Return the parts of a capture that are asked for; InputError for one that is not among `known`."""
    if isinstance(needs, str):
        raise InputError(f"needs={needs!r}: give a set of names, such as needs={{{needs!r}}}")
    if unknown := sorted(map(str, set(needs) - set(known))):
        raise InputError(f"cannot capture {', '.join(unknown)}; choose from {', '.join(known)}")
    return frozenset(needs)


def hook_names(layer: int) -> dict[str, str]:
    """Return part of a capture -> hook name."""
    block = f"blocks.{layer}"
    return {"resid": f"{block}.hook_resid_pre", **{part: f"{block}.attn.hook_{part}" for part in PARTS[1:]}}


@dataclass(frozen=True)
class Sites:
    """Hooks of one layer.

    Attributes:
        names: part of a capture ("q", "attn_scores", ...) -> hook name.
        reads: part -> what turns the hook's tensor into [batch, head, pos, d]; parts without one are as they should be.
    """

    names: Mapping[str, str]
    reads: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def read(self, part: str, value: Tensor) -> Tensor:
        return self.reads[part](value) if part in self.reads else value


def hook_points(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """Return hook points by name; UnsupportedModelError where the model lacks one."""
    points = model.hook_dict
    if missing := [name for name in names if name not in points]:
        raise UnsupportedModelError(f"this model has no {missing[0]}, so its attention cannot be captured")
    return {name: points[name] for name in names}


_ROW_EDITS = "_tl_posgen_row_edits"  # attribute of an attention module between its queries and its scores


_SPANS = "_tl_posgen_spans"  # attribute of an attention module from its first edit on


def offer_row_edit(attn: Any, edit: Any) -> None:
    """Let a hook on the scores of this streamed module be replaced, in this pass, by an edit of blocks of rows."""
    vars(attn).setdefault(_ROW_EDITS, {})[edit] = None


def take_row_edits(attn: Any) -> list[Any]:
    """Return the edits offered in this pass, in order, and forget them."""
    return list(vars(attn).pop(_ROW_EDITS, ()))


def spans_of_first_edit(attn: Any, find: Callable[[], list[slice]]) -> list[slice]:
    """Return the text of every prompt in this pass as it was found before the first edit of this module's scores, as
    keys that an edit hides look like padding; `begin_pass` forgets it."""
    known = vars(attn)
    if _SPANS not in known:
        known[_SPANS] = find()
    return known[_SPANS]


def begin_pass(attn: Any) -> None:
    """Forget what was found of this module's scores in an earlier pass."""
    vars(attn).pop(_SPANS, None)


def is_hooked(attn: Any) -> bool:
    """Tell whether any hook sees or edits the scores or the pattern of this attention module, other than row edits."""
    scores, pattern = attn.hook_attn_scores, attn.hook_pattern
    if len(scores._forward_hooks) != len(vars(attn).get(_ROW_EDITS, ())) or pattern._forward_hooks:
        return True
    return any(point._forward_pre_hooks or point._backward_hooks for point in (scores, pattern))


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """[batch, pos, ...] of any layout whose flattened rest is heads x d_head -> [batch, head, pos, d_head]."""
    return x.flatten(2).unflatten(-1, (-1, d_head)).transpose(1, 2)


def plain_scores(attn_scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scores in float32 at least, -inf where they are masked with the most negative number of their dtype, or
    of the model's (that of q), in which a mask may have been made although the scores are wider."""
    most_negative = max(torch.finfo(attn_scores.dtype).min, torch.finfo(dtype).min)
    return at_least_float32(attn_scores).masked_fill(attn_scores <= most_negative / 2, -torch.inf)


def require_evaluation(model: Model) -> None:
    """Refuse active dropout and autocast (InputError) and quantised weights (UnsupportedModelError). Any floating-point
    dtype of two bytes or more is taken."""
    for name, module in model.named_modules():
        shares = {key: value for key, value in vars(module).items() if key.endswith("dropout")}
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            shares["p"] = module.p
        if module.training and any(isinstance(share, float) and share > 0 for share in shares.values()):
            dropout = f"dropout in {name or type(module).__name__}"
            raise InputError(f"the model is in training mode and {dropout} is active; call model.eval() first")
        if ".quantized." in f"{type(module).__module__}.":
            raise UnsupportedModelError(f"{name} is quantised; load the model in float32, float16 or bfloat16")
    for name, weight in model.named_parameters():
        if type(weight.detach()) is not torch.Tensor or not weight.is_floating_point() or weight.element_size() < 2:
            plain = type(weight.detach()) is torch.Tensor
            kind = str(weight.dtype).removeprefix("torch.") if plain else type(weight.detach()).__name__
            raise UnsupportedModelError(f"{name} is quantised ({kind}); load the model in float32, float16 or bfloat16")
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
