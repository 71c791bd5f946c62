"""Where a layer's attention shows itself: TransformerLens hook names, and how to read what they carry.

Whatever the backend and the layout of its hooks, what is read is [batch, head, pos, d]: queries and keys before RoPE
and after qk-norm, in the dtype of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backend import Model

PARTS = ("resid", "q", "k", "v", "attn_scores", "pattern")
HOOK_OF_PART = {"resid": "hook_resid_pre", **{part: f"attn.hook_{part}" for part in PARTS[1:]}}


@dataclass(frozen=True)
class Sites:
    """The hooks of one layer.

    Attributes:
        names: part of a capture ("q", "attn_scores", ...) -> hook name.
        reads: part -> what turns the hook's tensor into [batch, head, pos, d]; parts without one are as they should be.
    """

    names: Mapping[str, str]
    reads: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def read(self, part: str, value: Tensor) -> Tensor:
        return self.reads[part](value) if part in self.reads else value


def dispatch(model: Model, takes: Mapping[str, Callable[[Tensor], None]]) -> list[tuple[Callable[[str], bool], Any]]:
    """One TransformerLens hook for many names, each with its own function of the hook's tensor.

    A TransformerBridge works out its thousands of names anew for every entry of a list of hooks, so one entry is much
    faster than many. The points are told apart as objects, because a bridge's hook.name can be an alias.

    Raises:
        UnsupportedModelError: the model lacks one of the hooks.
    """
    points = model.hook_dict
    if missing := [name for name in takes if name not in points]:
        raise UnsupportedModelError(f"this model has no {missing[0]}, so its attention cannot be captured")
    by_point = {id(points[name]): take for name, take in takes.items()}

    def hook(value: Tensor, hook: Any) -> None:
        by_point[id(hook)](value)

    return [(takes.__contains__, hook)]


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """[batch, pos, ...] of any layout whose flattened rest is heads x d_head -> [batch, head, pos, d_head]."""
    return x.flatten(2).unflatten(-1, (-1, d_head)).transpose(1, 2)


def hooked_sites(model: Model, layer: int) -> Sites:
    """The hooks of a HookedTransformer layer. hook_q and hook_k fire before qk-norm, so the norm is applied here."""
    attn, d_head, clip = model.blocks[layer].attn, model.cfg.d_head, model.cfg.clip_qkv

    def reader(norm: Any) -> Callable[[Tensor], Tensor]:
        def read(x: Tensor) -> Tensor:
            x = _normed(x, norm)
            return split_heads(x if clip is None else x.clamp(-clip, clip), d_head)

        return read

    names = {part: f"blocks.{layer}.{hook}" for part, hook in HOOK_OF_PART.items()}
    return Sites(names, {"q": reader(attn.q_norm), "k": reader(attn.k_norm), "v": lambda x: split_heads(x, d_head)})


def _normed(x: Tensor, norm: Any) -> Tensor:
    """The RMSNorm of TransformerLens, computed here so that its own hooks do not fire a second time.

    The norm is over d_head (Qwen3, Gemma 3) or over all heads together (OLMo 2), as its weight's length says.
    """
    if norm is None:
        return x
    heads_together = norm.w.numel() != x.shape[-1]
    y = (x.flatten(2) if heads_together else x).float()
    y = (y / (y.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()).to(x.dtype) * norm.w.detach().to(x.device)
    return y.view_as(x)


def bridge_sites(model: Model, layer: int, d_head: int, normed: bool) -> Sites:
    """The hooks of a TransformerBridge layer; `normed` where its hook_q_normed and hook_k_normed fire."""
    clip = getattr(getattr(model.blocks[layer].attn.original_component, "config", None), "clip_qkv", None)

    def read(x: Tensor) -> Tensor:
        # hook_q_normed is [batch, head, pos, d] where the norm is per head, flat where it is over all heads
        x = x if normed and x.ndim == 4 else split_heads(x, d_head)
        return x if clip is None else x.clamp(-clip, clip)

    names = {part: f"blocks.{layer}.{hook}" for part, hook in HOOK_OF_PART.items()}
    if normed:
        names |= {part: f"blocks.{layer}.attn.hook_{part}_normed" for part in ("q", "k")}
    return Sites(names, {"q": read, "k": read, "v": lambda x: split_heads(x, d_head)})


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def plain_scores(attn_scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores in float32 at least, -inf where masked, whatever number the backend masks with.

    Args:
        attn_scores: as hook_attn_scores carries them: masked with -inf, or with the most negative number of a dtype.
        dtype: the model's (that of q); the mask may have been made in it although the scores are wider.
    """
    most_negative = max(torch.finfo(attn_scores.dtype).min, torch.finfo(dtype).min)
    return at_least_float32(attn_scores).masked_fill(attn_scores <= most_negative / 2, -torch.inf)
