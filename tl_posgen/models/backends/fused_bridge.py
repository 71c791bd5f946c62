"""Fused attention in a TransformerBridge, which computes attention itself, score by score. For the time of a pass,

- components that keep Hugging Face's projections apart run Hugging Face's own attention module, whose projections and
  norms go on firing the bridge's hooks, with an implementation of attention that is registered here;
- components that split a joint projection keep all but the step from queries, keys and values to what heads make.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.layers.fused import Attention, Mask, as_mask, finish_of, scale_of
from tl_posgen.models.layers.geometry import LayerGeometry

_IMPLEMENTATION = "tl_posgen_streaming"  # its name in transformers' registries

# by Hugging Face's attention module: the bridge's component, what stands in for its attention, its geometry if known
_at_work: WeakKeyDictionary[torch.nn.Module, tuple[Any, Attention, LayerGeometry | None]] = WeakKeyDictionary()


@contextmanager
def fused_bridge(
    model: Any, geometries: Mapping[int, LayerGeometry], attention_of: Callable[[int], Attention]
) -> Iterator[None]:
    """While the block runs, the attention of every layer is computed by `attention_of(layer)`; a joint projection's
    only where its geometry is known."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(_IMPLEMENTATION, _mask_of_pass)
    name, modules = "_attn_implementation_internal", model.original_model.modules()
    configs = {
        id(hf_config): hf_config for module in modules if hasattr(hf_config := getattr(module, "config", None), name)
    }
    with ExitStack() as stack:
        for config in configs.values():
            stack.callback(setattr, config, name, getattr(config, name))
            setattr(config, name, _IMPLEMENTATION)
        for layer, block in enumerate(model.blocks):
            component = getattr(block, "attn", None)
            if component is None or not hasattr(component, "hook_attn_scores"):
                continue
            attention, geometry = attention_of(layer), geometries.get(layer)
            if hasattr(component, "_reconstruct_attention") and hasattr(component, "split_qkv_matrix"):
                if geometry is not None:
                    replacement = partial(_from_joint, component, geometry, attention)
                    stack.enter_context(replaced(component, "_reconstruct_attention", replacement))
            else:
                for module in component.original_component.modules():
                    if hasattr(module, "_attn"):  # a method of its own, where others look up an implementation
                        replacement = partial(_from_heads, module, geometry, attention)
                        stack.enter_context(replaced(module, "_attn", replacement))
                _at_work[component.original_component] = component, attention, geometry
                stack.callback(_at_work.pop, component.original_component, None)
                stack.enter_context(replaced(component, "forward", partial(_run_original, component)))
        yield


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, this one object's method is another function."""
    if name in vars(owner):
        raise InputError(f"{type(owner).__name__}.{name} was replaced on this model; streaming cannot stand in for it")
    vars(owner)[name] = function
    try:
        yield
    finally:
        del vars(owner)[name]


def _run_original(component: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Hugging Face's attention module with the hooks that the component itself fires."""
    name = next((argument for argument in ("hidden_states", "query_input") if argument in kwargs), None)
    x = component.hook_in(args[0] if name is None else kwargs[name])
    args, kwargs = ((x, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: x})
    if kwargs.get("position_embeddings") is not None and hasattr(component, "_apply_position_embedding_hooks"):
        kwargs["position_embeddings"] = component._apply_position_embedding_hooks(kwargs["position_embeddings"])
    with ExitStack() as stack:
        for part in ("q", "k"):
            point, norm = (getattr(component, name, None) for name in (f"hook_{part}_normed", f"{part}_norm"))
            if point is not None and norm is not None:  # StableLM and GLM-4-MoE have the norm in some models only
                fire = partial(fire_normed, point, x.shape[1])
                stack.callback(norm.register_forward_hook(fire).remove)
        output = component.original_component(*args, **kwargs)
    return (component.hook_out(output[0]), *output[1:]) if isinstance(output, tuple) else component.hook_out(output)


def fire_normed(point: Any, n: int, _norm: Any, _args: tuple, out: Tensor) -> Tensor:
    """Fire hook_q_normed or hook_k_normed: with [batch, head, pos, d] where the norm is per head, else its output."""
    if out.ndim < 4 or out.shape[2] == n != out.shape[1]:
        return point(out)
    if out.shape[1] == out.shape[2]:
        raise InputError(
            f"a prompt of as many tokens as heads ({n}): which is which cannot be told; stream longer prompts"
        )
    return point(out.transpose(1, 2)).transpose(1, 2)


def _from_joint(
    component: Any, geometry: LayerGeometry, attention: Attention, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Do what `_reconstruct_attention` of a component with a joint projection does, without forming scores."""
    if clip := getattr(component, "_clip_qkv", None):
        q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
    n_heads = geometry.n_heads
    q, k, v, batch, n, _ = component._reshape_qkv_to_heads(q, k, v, n_heads, geometry.n_key_value_heads)
    if isinstance(kwargs.get("position_embeddings"), tuple):
        cos, sin = component._apply_position_embedding_hooks(kwargs["position_embeddings"])
        q, k = component._apply_rotary_pos_emb(q, k, cos, sin)
    k, v = component._update_kv_cache(k, v, **kwargs)
    z = attention(q, k, v, kwargs.get("attention_mask"), geometry.scale, finish_of(geometry))
    z = component._reshape_attn_output(z, batch, n, n_heads, v.shape[-1])
    return component._apply_output_projection(z), None


def _from_heads(
    module: Any,
    geometry: LayerGeometry | None,
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
) -> tuple[Tensor, None]:
    """Do what `_attn` of GPT-J and GPT-Neo does, whose local layers keep their window in a buffer."""
    pass_mask, n, n_keys = as_mask(mask, q, k), q.shape[2], k.shape[2]
    layer_mask, bias = pass_mask, getattr(module, "bias", None)
    if bias is not None and not bool(bias[0, 0, n_keys - 1, :n_keys].all()):
        local = bias[:, :, n_keys - n : n_keys, :n_keys]
        layer_mask = Mask(
            lambda start, stop: pass_mask.rows(start, stop).to(local.device) & local[:, :, start:stop],
            padding=pass_mask.padding,
        )
    finish = None if geometry is None else finish_of(geometry)
    return attention(q, k, v, layer_mask, attention_scale(module, q.shape[-1]), finish), None


def attention_scale(hf_attn: Any, d_head: int) -> float:
    """Return what an attention module multiplies its scores by."""
    if hasattr(hf_attn, "_attn"):  # GPT-J divides, GPT-Neo does neither
        return 1 / float(getattr(hf_attn, "scale_attn", 1.0))
    for name in ("scaling", "softmax_scale", "inv_norm_factor"):
        if isinstance(value := getattr(hf_attn, name, None), float):
            return value
    return d_head**-0.5


# What transformers calls


def _mask_of_pass(
    *, batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, mask_function: Any, **options: Any
) -> Mask:
    """Return transformers' mask, whose rows are made when they are needed."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    padding = options.get("attention_mask")
    padding = None if padding is None or bool(padding.all()) else padding[:, :kv_length].bool()
    options = {
        name: value for name, value in options.items() if name not in ("allow_is_causal_skip", "dtype", "config")
    }

    def rows(start: int, stop: int) -> Tensor:
        mask_rows: Any = sdpa_mask(
            batch_size=batch_size,
            q_length=stop - start,
            kv_length=kv_length,
            q_offset=q_offset + start,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            **options,
        )
        return mask_rows

    causal = mask_function is causal_mask_function and padding is None and q_length == kv_length
    return Mask(rows, causal, padding)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls an implementation: [batch, pos, head, d_value]."""
    if module not in _at_work:  # a vision tower, say
        if isinstance(attention_mask, Mask):
            attention_mask = attention_mask.rows(0, query.shape[2]).to(query.device)
        gqa = query.shape[1] != key.shape[1]
        z = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=gqa)
        return z.transpose(1, 2).contiguous(), None
    if position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a position bias to its scores, which is not streamed"
        )
    component, attention, geometry = _at_work[module]
    if geometry is None:  # not proved, or not yet
        sizes = query.shape[1], key.shape[1], query.shape[-1]
        geometry = LayerGeometry(0, "none", *sizes, scale_of(query, scaling), soft_cap=softcap)
    elif softcap != geometry.soft_cap:
        raise UnsupportedModelError(
            f"layer {geometry.layer}: transformers gives a soft cap of {softcap}, and {geometry.soft_cap} was proved; "
            "if the attention module was changed, tl_posgen.check(model) probes it again"
        )
    if hasattr(component, "hook_rot_q"):
        query, key = component.hook_rot_q(query), component.hook_rot_k(key)
    z = attention(query, key, value, attention_mask, scaling, finish_of(geometry), s_aux)
    return z.transpose(1, 2).contiguous(), None
