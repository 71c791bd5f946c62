"""Backend of HookedTransformer (TransformerLens 3.9)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backends.backend import Backend, KeyValueContext, Origin, Read, split_heads
from tl_posgen.models.backends.fused_bridge import replaced
from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.layers.fused import Attention, Mask, finish_of
from tl_posgen.models.layers.geometry import ContextLimit, Encoding, LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.rope.rotation import Rope

ENCODINGS: dict[str, Encoding] = {
    "rotary": "rotary",
    "alibi": "alibi",
    "standard": "absolute",
    "shortformer": "absolute",
}


class Hooked(Backend):
    """Backend of a HookedTransformer."""

    name = "hooked"
    attention_input = "query_input"

    def count_parameters(self) -> int:
        embed, unembed = self.model.W_E.detach(), self.model.W_U.detach()  # two tensors where they are tied
        tied = embed.shape == unembed.T.shape and torch.equal(embed, unembed.T)
        return sum(weight.numel() for weight in self.model.parameters()) - tied * unembed.numel()

    def limit(self) -> ContextLimit:
        cfg = self.model.cfg
        if cfg.positional_embedding_type == "alibi":
            return ContextLimit()
        if cfg.use_dynamic_ntk_rope or cfg.use_logn_attn:
            why = "its frequencies change with the length of longer prompts"
            return ContextLimit(cfg.train_seq_length or cfg.n_ctx, why)
        lifted_as = "bridge" if cfg.positional_embedding_type == "rotary" else None
        return ContextLimit(cfg.n_ctx, "its context (cfg.n_ctx)", lifted_as)

    def options(self, tokens: Int[Tensor, "batch pos"]) -> dict[str, Any]:
        # with a tokenizer that pads on the left, leading tokens pass for padding unless it is told otherwise
        tokenizer = self.model.tokenizer
        left = tokenizer is not None and tokenizer.padding_side == "left"
        return {"attention_mask": torch.ones_like(tokens)} if left else {}

    def sinks(self, layer: int) -> Tensor | None:
        attn = self.model.blocks[layer].attn
        return attn.sinks if attn.cfg.use_attention_sinks else None

    def reader(self, layer: int, *, normed: bool = False, norms: bool = False) -> Read:
        # hook_q and hook_k fire before qk-norm always
        attn, d_head, clip = self.model.blocks[layer].attn, self.model.cfg.d_head, self.model.cfg.clip_qkv

        def read(part: str, x: Tensor) -> Tensor:
            if part not in ("q", "k"):
                return split_heads(x, d_head) if part == "v" else x
            norm = attn.q_norm if part == "q" else attn.k_norm
            x = split_heads(x if norm is None else _rms_norm(x, norm), d_head)
            return x if clip is None else x.clamp(-clip, clip)

        return read

    def drafts(
        self, plain: LayerGeometry, fired: Mapping[str, Tensor], rotates: bool, left_to_hf: bool
    ) -> list[LayerGeometry]:
        """Return one draft, from the cfg and the attention module."""
        cfg, attn = self.model.cfg, self.model.blocks[plain.layer].attn
        encoding = ENCODINGS.get(cfg.positional_embedding_type)
        if encoding is None or cfg.attention_dir != "causal":
            raise UnsupportedModelError(
                f"layer {plain.layer}: {cfg.attention_dir} attention with {cfg.positional_embedding_type} positions; "
                "only causal attention with rotary, ALiBi or absolute positions can be described"
            )
        draft = replace(
            plain,
            encoding=encoding,
            n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
            scale=1 / float(attn.attn_scale),
            rope=_hooked_rope(attn) if encoding == "rotary" else Rope(),
            soft_cap=float(cfg.attn_scores_soft_cap) if cfg.attn_scores_soft_cap > 0 else None,
            window=cfg.window_size if attn.attn_type == "local" else None,
            alibi_slopes=attn.create_alibi_multipliers(cfg.n_heads) if encoding == "alibi" else None,
            qk_norm=attn.q_norm is not None,
        )
        return [draft]

    @contextmanager
    def fused(
        self, geometries: Mapping[int, LayerGeometry], attention_of: Callable[[int], Attention]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, geometry in geometries.items():
                attn = self.model.blocks[layer].attn
                steps = _Steps(attn, attention_of(layer), geometry)
                for name in ("calculate_attention_scores", "apply_causal_mask", "calculate_z_scores"):
                    stack.enter_context(replaced(attn, name, getattr(steps, name)))
                stack.callback(steps.put_back)
            yield

    def context(self) -> KeyValueContext:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache: Any = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.model.cfg.device, 1)

        def read(tokens: Int[Tensor, "1 pos"]) -> None:
            everything = torch.ones_like(tokens, dtype=torch.int)  # not even pad tokens are masked
            self.model(tokens, return_type=None, past_kv_cache=cache, attention_mask=everything)

        return KeyValueContext(read, cache.entries, ("past_keys", "past_values"))

    def random_init(self, origin: Origin, *, moved: bool = False, drawn: bool = True) -> tuple[Model, str]:
        if origin.config is not None:
            return super().random_init(origin, moved=moved, drawn=drawn)
        drawn_model = self._anew(init_weights=True)
        return drawn_model, self.drawing_rule(origin)

    def drawing_rule(self, origin: Origin) -> str:
        if origin.config is not None:
            return super().drawing_rule(origin)
        cfg = self.model.cfg
        return f"HookedTransformer, init_mode {cfg.init_mode}, initializer_range {cfg.initializer_range:g}"

    def copy(self, origin: Origin) -> Model:
        copied = self._anew(init_weights=False)
        copied.load_state_dict({name: tensor.clone() for name, tensor in self.model.state_dict().items()}, assign=True)
        devices = {
            name: tensor.device for name, tensor in chain(self.model.named_parameters(), self.model.named_buffers())
        }
        for name, tensor in chain(copied.named_parameters(), copied.named_buffers()):
            # TransformerLens spreads new layers over devices by its own rule
            tensor.data = tensor.data.to(devices[name])
        return copied

    def _anew(self, init_weights: bool) -> Any:
        """Make a model of the same cfg; a deep copy of the model would hold what its hooks hold."""
        cfg = copy.deepcopy(self.model.cfg)
        cfg.seed, cfg.tokenizer_name, cfg.init_weights = None, None, init_weights  # a seed there would seed everything
        model = hooked_parts()[0](cfg).eval()
        model.tokenizer, cfg.tokenizer_name = self.model.tokenizer, self.model.cfg.tokenizer_name
        return model


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    """x / sqrt(mean(x^2) + eps) w: TransformerLens' RMSNorm, without firing its hooks a second time.

    The norm is over d_head (Qwen3, Gemma 3) or over all heads together (OLMo 2), as its weight's length says.
    """
    weight = norm.w.detach().to(x.device)
    y = x if weight.numel() == x.shape[-1] else x.flatten(2)
    return (rms_norm(y.float(), weight.shape, eps=norm.eps).to(x.dtype) * weight).view_as(x)


def _hooked_rope(attn: Any) -> Rope:
    """Read frequencies and scaling from the layer's own table of sines and cosines, asked for in float64.

    Row 1 of the table is (scaling sin theta_m, scaling cos theta_m), whatever scaling rule filled it, and every
    theta_m is below pi. The table in use would do in float32, but in a bfloat16 model it has three digits.
    """
    cfg = attn.cfg
    with torch.device("cpu"):  # whatever torch's default device is
        table = attn.calculate_sin_cos_rotary(cfg.rotary_dim, 2, base=attn._rotary_base(), dtype=DOUBLE)
    sin: Float[Tensor, " plane"]
    sin, cos = (x[1, 0::2] if cfg.rotary_adjacent_pairs else x[1].chunk(2)[0] for x in table)
    scaling = float(torch.hypot(sin, cos).mean())
    pairing = "adjacent" if cfg.rotary_adjacent_pairs else "half"
    return Rope(torch.atan2(sin, cos).cpu(), pairing, 1.0 if abs(scaling - 1) < 1e-6 else scaling)


class _Steps:
    """Steps of one attention module, in the order in which it calls them. Its hook points of scores and pattern are set
    aside meanwhile: `attention` fires them where they have hooks, and forms no scores otherwise."""

    def __init__(self, attn: Any, attention: Attention, geometry: LayerGeometry):
        self.attn, self.attention, self.geometry = attn, attention, geometry
        self.points = {name: attn._modules[name] for name in ("hook_attn_scores", "hook_pattern")}
        self.given: dict[str, Any] = {}  # q, k and the mask, until the values come

    def put_back(self) -> None:
        self.attn._modules.update(self.points)

    def calculate_attention_scores(self, q: Tensor, k: Tensor) -> Tensor:
        self.attn._modules.update({name: torch.nn.Identity() for name in self.points})
        self.given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2)}
        return q.new_zeros(1, self.geometry.n_heads, 1, 1)  # stands for the scores until the values come

    def apply_causal_mask(self, scores: Tensor, offset: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        window = self.attn.cfg.window_size if self.attn.attn_type == "local" else None
        q, padding = self.given["q"], attention_mask
        padding = None if padding is None or bool(padding.all()) else padding.bool()
        self.given["mask"] = Mask.of_window(q.shape[2], window, padding, before=offset, device=q.device)
        return scores

    def calculate_z_scores(self, v: Tensor, pattern: Tensor) -> Tensor:
        self.put_back()
        inputs, self.given = self.given, {}
        sinks = self.attn.sinks if self.attn.cfg.use_attention_sinks else None
        options = {"scale": self.geometry.scale, "finish": finish_of(self.geometry), "sinks": sinks}
        return self.attn.hook_z(self.attention(**inputs, v=v.transpose(1, 2), **options).transpose(1, 2))
