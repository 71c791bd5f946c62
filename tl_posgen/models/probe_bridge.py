"""What a TransformerBridge layer does with positions, read from the Hugging Face modules and from one forward pass.

The bridge's cfg does not know (its rotary_base is 10000 whatever the model's), so nothing is read from it but sizes.
Where modules leave a choice open (which frequencies, which pairing, how ALiBi is scaled) every possibility becomes a
draft, and the proof takes the one that reproduces the model's scores.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.maths.rope import Pairing, Rope
from tl_posgen.models.backend import Model
from tl_posgen.models.geometry import LayerGeometry

PAIRINGS: tuple[Pairing, ...] = ("half", "adjacent")


def bridge_drafts(
    model: Model,
    layer: int,
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "key_head pos d_head"],
    fired: Mapping[str, Tensor],
    rotates: bool,
) -> list[LayerGeometry]:
    """The possible descriptions of this layer, not yet proved.

    Args:
        q, k: as captured in the probe's forward pass; only their shapes matter here.
        fired: what the layer's hooks carried then, by hook: "cos" and "sin" among them where the layer is rotated.
        rotates: whether any layer of the model is rotated by cos and sin that hooks see.

    Raises:
        UnsupportedModelError: multi-head latent attention, or a rotation whose frequencies cannot be found.
    """
    hf_attn = model.blocks[layer].attn.original_component
    if hasattr(hf_attn, "kv_lora_rank"):
        raise UnsupportedModelError(
            f"layer {layer}: multi-head latent attention, whose hooks carry queries and keys only after RoPE"
        )
    draft = LayerGeometry(
        layer=layer,
        encoding="none",
        n_heads=len(q),
        n_key_value_heads=len(k),
        d_head=q.shape[-1],
        scale=attention_scale(hf_attn, q.shape[-1]),
        soft_cap=getattr(hf_attn, "attn_logit_softcapping", None),
        window=window_of(hf_attn, layer),
        qk_norm="q_normed" in fired,
    )
    positions = model.cfg.positional_embedding_type
    if "cos" in fired:
        ropes = list(possible_ropes(model, layer, fired["sin"], fired["cos"]))
        return [replace(draft, encoding="rotary", rope=rope) for rope in ropes]
    if positions == "rotary" and not rotates:
        raise UnsupportedModelError(
            f"layer {layer}: a rotary model none of whose layers is given a rotation that hooks can see, "
            "so its queries and keys may be captured after RoPE"
        )
    if positions == "alibi":
        slopes = alibi_slopes(draft.n_heads)
        # Falcon scales the bias together with the scores, everyone else adds it afterwards
        return [replace(draft, encoding="alibi", alibi_slopes=factor * slopes) for factor in (1.0, draft.scale)]
    return [replace(draft, encoding="absolute" if positions == "standard" else "none")]


def attention_scale(hf_attn: Any, d_head: int) -> float:
    for name in ("scaling", "softmax_scale", "inv_norm_factor"):
        if isinstance(value := getattr(hf_attn, name, None), float):
            return value
    return d_head**-0.5


def window_of(hf_attn: Any, layer: int) -> int | None:
    """The sliding window: the module's own where it has one, else the config's, in the layers of that type."""
    if hasattr(hf_attn, "sliding_window"):
        return hf_attn.sliding_window
    config = getattr(hf_attn, "config", None)
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def possible_ropes(model: Model, layer: int, sin: Tensor, cos: Tensor) -> Iterator[Rope]:
    """The model's frequency buffers that turn one token as this layer's hook_sin and hook_cos say, in both pairings.

    A model may hold several buffers (Gemma 3 one for window layers and one for the others); the hooks tell which.
    """
    tolerance = 4 * max(torch.finfo(cos.dtype).eps, torch.finfo(torch.float32).eps)  # made in float32, then cast
    found = False
    for inv_freq, scaling in frequency_buffers(model, layer):
        # (c0, c1, .., c0, c1, ..) in most models, (c0, c0, c1, c1, ..) in Cohere, (c0, c1, ..) in GPT-OSS
        for layout in (lambda x: x.repeat(2), lambda x: x.repeat_interleave(2), lambda x: x):
            expected = (scaling * layout(torch.sin(inv_freq)), scaling * layout(torch.cos(inv_freq)))
            actual = (sin[0, 1].double().cpu(), cos[0, 1].double().cpu())
            if all(
                a.shape == e.shape and (a - e).abs().max() <= tolerance for a, e in zip(actual, expected, strict=True)
            ):
                found = True
                yield from (Rope(inv_freq, pairing, scaling) for pairing in PAIRINGS)
                break
    if not found:
        raise UnsupportedModelError(
            f"layer {layer}: it is rotated, but no inv_freq buffer of the model gives that rotation"
        )


def frequency_buffers(model: Model, layer: int) -> Iterator[tuple[Float[Tensor, " plane"], float]]:
    """Every inv_freq in use by the rotary modules, in float64, with the attention scaling that belongs to it."""
    for module in (getattr(model, "rotary_emb", None), model.blocks[layer].attn):
        for child in module.modules() if module is not None else ():
            for name, buffer in child.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                    scaling = getattr(child, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0)
                    yield buffer.detach().double().cpu(), float(scaling)


def alibi_slopes(n_heads: int) -> Float[Tensor, " n_heads"]:
    """2^(-8 h / n) for h = 1 .. n; for n that is no power of two, those of the power below, then every other one of
    the power above.

    Source: Press et al. 2022, "Train Short, Test Long", and its published code.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / power * torch.arange(1, power + 1))
    between = 2.0 ** (-4 / power * (2 * torch.arange(n_heads - power) + 1))
    return torch.cat([slopes, between])


def bridge_limit(model: Model) -> tuple[int | None, str]:
    """The longest prompt this description holds for, or None, and why."""
    if model.cfg.positional_embedding_type == "standard":
        return model.cfg.n_ctx, "its table of position embeddings"
    rotary: Any = getattr(getattr(model, "rotary_emb", None), "original_component", None)
    types = getattr(rotary, "rope_type", None)
    kinds = set(types.values()) if isinstance(types, dict) else {types}
    if "longrope" in kinds:
        limit = rotary.config.rope_parameters["original_max_position_embeddings"]
        return limit, "beyond it the model takes other frequencies (longrope)"
    if "dynamic" in kinds:
        return rotary.original_max_seq_len, "beyond it the frequencies depend on the length (dynamic NTK)"
    return None, ""
