"""Backend of TransformerBridge (TransformerLens 3.9 and 4).

The bridge's cfg does not know what a layer does with positions (its rotary_base is 10000 whatever the model's), so
nothing is read from it but sizes. Where the Hugging Face modules leave a choice open (which frequencies, which pairing,
how ALiBi is scaled) every possibility becomes a draft, and the proof takes the one that reproduces the model's scores.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backends.backend import Backend, KeyValueContext, Origin, Read, rule_of_draws, split_heads
from tl_posgen.models.backends.fused_bridge import attention_scale, fused_bridge
from tl_posgen.models.conversion.convert import copy_tables
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.conversion.hugging_face import silenced
from tl_posgen.models.layers.fused import Attention
from tl_posgen.models.layers.geometry import ContextLimit, LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import centred, how_they_differ, rounding_remedy, without_hooks
from tl_posgen.rope.rotation import Pairing, Rope

PAIRINGS: tuple[Pairing, ...] = ("half", "adjacent")


class Bridge(Backend):
    """Backend of a TransformerBridge."""

    name = "bridge"
    attention_input = "hidden_states"

    def count_parameters(self) -> int:
        # the model inside holds joint matrices and their parts, and a bias of the unembedding
        hf_model = self.model.original_model
        with torch.device("meta"):
            plain = type(hf_model)(copy.deepcopy(hf_model.config))
        return sum(weight.numel() for weight in plain.parameters())

    def limit(self) -> ContextLimit:
        if self.model.cfg.positional_embedding_type == "standard":
            return ContextLimit(self.model.cfg.n_ctx, "its table of position embeddings")
        rotary: Any = getattr(getattr(self.model, "rotary_emb", None), "original_component", None)
        types = getattr(rotary, "rope_type", None)
        kinds = set(types.values()) if isinstance(types, dict) else {types}
        if "longrope" in kinds and (rules := rotary.config.rope_parameters)["short_factor"] != rules["long_factor"]:
            why = "beyond it the frequencies are others (longrope: set short_factor to long_factor to measure those)"
            return ContextLimit(rules["original_max_position_embeddings"], why)
        if "dynamic" in kinds:
            why = "beyond it the frequencies depend on the length (dynamic NTK: docs/models.md says how to fix them)"
            return ContextLimit(rotary.original_max_seq_len, why)
        return ContextLimit()

    def start_of_pass(self) -> int | None:
        # TransformerLens 4 marks its blocks, and runs those before with tokens in the place of the residual stream
        starts = (vars(block).get("_start_at_layer_idx") for block in self.model.blocks)
        return next((start for start in starts if start is not None), None)

    @contextmanager
    def ending_behind(self, layer: int | None) -> Iterator[None]:
        from transformer_lens.model_bridge.exceptions import StopAtLayerException

        def end(_block: Any, _args: Any, output: Any) -> None:
            raise StopAtLayerException(output[0] if isinstance(output, tuple) else output)

        with ExitStack() as stack:
            if layer == len(self.model.blocks):
                stack.callback(self.model.blocks[-1].register_forward_hook(end).remove)
            yield

    def _hf_attention(self, layer: int) -> Any:
        return self.model.blocks[layer].attn.original_component

    def sinks(self, layer: int) -> Tensor | None:
        sinks = getattr(self._hf_attention(layer), "sinks", None)
        return sinks if isinstance(sinks, Tensor) else None

    def reader(self, layer: int, *, normed: bool = False, norms: bool = False) -> Read:
        hf_attn = self._hf_attention(layer)
        d_head = int(getattr(hf_attn, "head_dim", None) or self.model.cfg.d_head)
        clip = getattr(getattr(hf_attn, "config", None), "clip_qkv", None)

        def read(part: str, x: Tensor) -> Tensor:
            if part not in ("q", "k"):
                return split_heads(x, d_head) if part == "v" else x
            norm: Any = _unhooked_norm(hf_attn, part) if norms else None
            if (weight := getattr(norm, "weight", None)) is not None and weight.numel() != d_head:
                x, norm = norm(x.flatten(2)).detach(), None  # over all heads together
            # hook_q_normed is [batch, head, pos, d] where the norm is per head, flat where it is over all heads
            x = x if normed and x.ndim == 4 else split_heads(x, d_head)
            x = x if norm is None else norm(x).detach()
            return x if clip is None else x.clamp(-clip, clip)

        return read

    def drafts(
        self, plain: LayerGeometry, fired: Mapping[str, Tensor], rotates: bool, left_to_hf: bool
    ) -> list[LayerGeometry]:
        layer, hf_attn = plain.layer, self._hf_attention(plain.layer)
        if hasattr(hf_attn, "kv_lora_rank"):
            raise UnsupportedModelError(
                f"layer {layer}: multi-head latent attention, whose hooks carry queries and keys only after RoPE"
            )
        draft = replace(
            plain,
            scale=attention_scale(hf_attn, plain.d_head),
            soft_cap=getattr(hf_attn, "attn_logit_softcapping", None),
            window=window_of(hf_attn, layer),
            qk_norm="q_normed" in fired or (left_to_hf and _unhooked_norm(hf_attn, "q") is not None),
        )
        positions = self.model.cfg.positional_embedding_type
        if "cos" in fired or (positions == "rotary" and left_to_hf):
            ropes = _ropes(self.model.original_model, hf_attn, plain.d_head)
            turned = [replace(draft, encoding="rotary", rope=rope) for rope in ropes]
            # where no hook shows the rotation there may be none
            return turned if "cos" in fired and turned else [*turned, replace(draft, encoding="none")]
        if positions == "rotary" and not rotates:
            raise UnsupportedModelError(
                f"layer {layer}: a rotary model none of whose layers is given a rotation that hooks can see, "
                "so its queries and keys may be captured after RoPE"
            )
        if positions == "alibi":
            from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # MPT's and Falcon's are the same

            slopes = build_alibi_tensor(torch.ones(1, 2, device="cpu"), draft.n_heads, torch.float32)[:, 0, 1]
            return [replace(draft, encoding="alibi", alibi_slopes=slopes)]
        return [replace(draft, encoding="absolute" if positions == "standard" else "none")]

    @contextmanager
    def plain(self) -> Iterator[Any]:
        """While the block runs, the Hugging Face model without TransformerLens' computations; None with processed
        weights."""
        if self.model.compatibility_mode:
            yield None
            return
        modules = list(self.model.original_model.modules())
        children = [(module, name, child) for module in modules for name, child in module._modules.items()]
        try:
            for module, name, child in children:
                module._modules[name] = original(child)
            yield self.model.original_model
        finally:
            for module, name, child in children:
                module._modules[name] = child

    def difference(self, origin: Origin) -> str:
        # a bridge of the same config with random weights tells a fault of the bridge from weights that the user changed
        reason = self.compare_with_hf()
        if reason == "":
            return ""
        with silenced(seed=0):
            random_model, _ = self.random_init(origin, moved=True)
        random_reason = Bridge(random_model).compare_with_hf()
        return (reason or random_reason) if random_reason else ""

    def compare_with_hf(self) -> str | None:
        """Say how logits of a few random tokens differ from the plain Hugging Face model's, the user's hooks left out;
        "" if they do not, None where the plain model no longer has the same weights."""
        model, tokens = self.model, self.some_tokens()
        dtype = next(model.parameters()).dtype
        with torch.no_grad(), without_hooks(model):
            with self.plain() as plain:
                if plain is None:
                    return None
                try:
                    expected = centred(plain(tokens).logits)
                except RuntimeError as error:
                    return f"the Hugging Face model that it wraps cannot run ({first_line(error)})"
            differ = how_they_differ(centred(model(tokens)), expected, dtype)
        return differ and (
            "this TransformerBridge computes something else than the Hugging Face model that it wraps: "
            f"logits {differ}. What it shows is not that model's attention; report the difference to TransformerLens."
            + rounding_remedy(dtype)
        )

    def fused(
        self, geometries: Mapping[int, LayerGeometry], attention_of: Callable[[int], Attention]
    ) -> AbstractContextManager[None]:
        return fused_bridge(self.model, geometries, attention_of)

    def context(self) -> KeyValueContext:
        from transformers import DynamicCache

        config = self.model.original_model.config
        cache = DynamicCache(config=config)
        shared = bool(getattr(config, "num_kv_shared_layers", 0))
        read = partial(self.model, return_type=None, past_key_values=cache, use_cache=True)
        return KeyValueContext(read, cache.layers, () if shared else ("keys", "values"))

    def attention_kernel(self) -> str | None:
        return getattr(self.model.original_model.config, "_attn_implementation", None)

    def random_init(self, origin: Origin, *, moved: bool = False, drawn: bool = True) -> tuple[Model, str]:
        config = origin.config or self.model.original_model.config
        return super().random_init(replace(origin, config=config), moved=moved, drawn=drawn)

    def drawing_rule(self, origin: Origin) -> str:
        hf_model = self.model.original_model
        return rule_of_draws(type(hf_model), origin.config or hf_model.config)

    def device_map(self) -> dict[str, Any] | None:
        return getattr(self.model.original_model, "hf_device_map", None)

    def copy(self, origin: Origin) -> Model:
        # a deep copy of a bridge can go on using the original's weights: adapters replace methods by closures over them
        copied, _ = self.random_init(origin, drawn=False)
        copied.cfg.default_prepend_bos = self.model.cfg.default_prepend_bos
        weights, copied_weights = dict(self.model.named_parameters()), dict(copied.named_parameters())
        if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in copied_weights.items()}:
            raise InputError(
                "this bridge's weights were processed after loading, so no copy of it can be made; load the model anew"
            )
        with torch.no_grad():
            for name, weight in weights.items():
                copied_weights[name].copy_(weight)
        copy_tables(self.model, copied)
        return copied


def original(module: Any) -> Any:
    """Return the Hugging Face module that components of a bridge stand for."""
    while (inner := getattr(module, "original_component", None)) is not None:
        module = inner
    return module


def _unhooked_norm(hf_attn: Any, part: str) -> Any:
    """Return the norm of queries or keys without the hooks of the bridge's component for it; None without one."""
    norm = getattr(hf_attn, f"{part}_norm", None)
    return original(getattr(hf_attn, "qk_norm", None) if norm is None else norm)


def window_of(hf_attn: Any, layer: int) -> int | None:
    """Return the sliding window: the module's own where it has one, else the config's, in the layers of that type."""
    config: Any = getattr(hf_attn, "config", None)
    if not getattr(hf_attn, "is_sliding", True):  # EXAONE 4 keeps the config's window in full layers too
        return None
    if hasattr(hf_attn, "sliding_window"):
        return hf_attn.sliding_window
    if hasattr(config, "attention_layers"):  # GPT-Neo
        return config.window_size if config.attention_layers[layer] == "local" else None
    types = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if types is None or types[layer] == "sliding_attention" else None


def _ropes(hf_model: Any, hf_attn: Any, d_head: int) -> list[Rope]:
    """Return the rotations that a layer may have, in both pairings: of every inv_freq in use by the model, in float64,
    with the attention scaling that belongs to it. A model may hold several (Gemma 3 one for window layers and one for
    the others)."""
    ropes: dict[Any, Rope] = {}
    if hasattr(hf_attn, "embed_positions"):  # GPT-J, whose table has no frequencies beside it
        planes = double(torch.arange(0, hf_attn.pos_embd_dim, 2, device="cpu"))
        ropes[()] = Rope(10_000 ** -(planes / hf_attn.pos_embd_dim), "adjacent")
    for module in hf_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1 and 2 * len(buffer) <= d_head:
                scaling = float(getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0))
                inv_freq = double(buffer.detach()).cpu()
                for pairing in PAIRINGS:
                    ropes[(*inv_freq.tolist(), scaling, pairing)] = Rope(inv_freq, pairing, scaling)
    return list(ropes.values())
