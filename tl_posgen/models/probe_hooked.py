"""What a HookedTransformer layer does with positions, read from its config and its attention module."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.maths.rope import Rope
from tl_posgen.models.backend import Model
from tl_posgen.models.geometry import Encoding, LayerGeometry

ENCODINGS: dict[str, Encoding] = {
    "rotary": "rotary",
    "alibi": "alibi",
    "standard": "absolute",
    "shortformer": "absolute",
}


def hooked_drafts(model: Model, layer: int) -> list[LayerGeometry]:
    """The one description of this layer, not yet proved.

    Raises:
        UnsupportedModelError: bidirectional attention, or positions that are not among the encodings we know.
    """
    cfg, attn = model.cfg, model.blocks[layer].attn
    encoding = ENCODINGS.get(cfg.positional_embedding_type)
    if encoding is None or cfg.attention_dir != "causal":
        raise UnsupportedModelError(
            f"layer {layer}: {cfg.attention_dir} attention with {cfg.positional_embedding_type} positions; "
            "only causal attention with rotary, ALiBi or absolute positions can be described"
        )
    draft = LayerGeometry(
        layer=layer,
        encoding=encoding,
        n_heads=cfg.n_heads,
        n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_head=cfg.d_head,
        scale=1 / float(attn.attn_scale),
        rope=hooked_rope(attn) if encoding == "rotary" else Rope(),
        soft_cap=float(cfg.attn_scores_soft_cap) if cfg.attn_scores_soft_cap > 0 else None,
        window=cfg.window_size if attn.attn_type == "local" else None,
        alibi_slopes=attn.create_alibi_multipliers(cfg.n_heads) if encoding == "alibi" else None,
        qk_norm=attn.q_norm is not None,
    )
    return [draft]


def hooked_rope(attn: Any) -> Rope:
    """Frequencies and scaling from the layer's own table of sines and cosines, asked for in float64.

    Row 1 of the table is (scaling sin theta_m, scaling cos theta_m), whatever scaling rule filled it, and every
    theta_m is below pi. The table in use would do in float32, but in a bfloat16 model it has three digits.
    """
    cfg = attn.cfg
    sin, cos = attn.calculate_sin_cos_rotary(cfg.rotary_dim, 2, base=attn._rotary_base(), dtype=torch.float64)
    pairing = "adjacent" if cfg.rotary_adjacent_pairs else "half"
    inv_freq, scaling = read_turn(sin[1], cos[1], adjacent=cfg.rotary_adjacent_pairs)
    return Rope(inv_freq, pairing, scaling)


def read_turn(
    sin: Float[Tensor, " rotary_dim"], cos: Float[Tensor, " rotary_dim"], adjacent: bool
) -> tuple[Float[Tensor, " plane"], float]:
    """theta_m = atan2(sin, cos) and the common length of (sin, cos), from the turn of one token."""
    sin, cos = (x.double()[0::2] if adjacent else x.double().chunk(2)[0] for x in (sin, cos))
    scaling = float(torch.hypot(sin, cos).mean())
    return torch.atan2(sin, cos).cpu(), 1.0 if abs(scaling - 1) < 1e-6 else scaling


def hooked_limit(model: Model) -> tuple[int | None, str]:
    """The longest prompt the model takes, or None, and why."""
    cfg = model.cfg
    if cfg.positional_embedding_type == "alibi":
        return None, ""
    if cfg.use_dynamic_ntk_rope or cfg.use_logn_attn:
        return cfg.train_seq_length or cfg.n_ctx, "its frequencies change with the length of longer prompts"
    return cfg.n_ctx, "its context (cfg.n_ctx)"
