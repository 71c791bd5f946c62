"""HookedTransformer's config for a Hugging Face config, for the families whose weights TransformerLens can convert.

TransformerLens has such a table, but it goes by the model's name on the Hub; a directory of any name needs one that
goes by the config. Every converted model is compared with the Hugging Face one before it is handed out (see `convert`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tl_posgen.errors import UnsupportedModelError


def _nothing(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Recipe:
    """How an architecture becomes a HookedTransformer.

    Attributes:
        converter: function of transformer_lens.pretrained.weight_conversions.
        settings: HookedTransformerConfig fields of the architecture.
        more: those that depend on the model's config.
        grouped: whether the converter wants n_key_value_heads even when keys are not grouped.
    """

    converter: str
    settings: dict[str, Any]
    more: Callable[[Any], dict[str, Any]] = _nothing
    grouped: bool = False


LLAMA = {"normalization_type": "RMS", "positional_embedding_type": "rotary", "gated_mlp": True, "final_rms": True}
NEOX = {"normalization_type": "LN", "positional_embedding_type": "rotary", "parallel_attn_mlp": True}


def _gemma2(config: Any) -> dict[str, Any]:
    return {
        "attn_scale": math.sqrt(config.query_pre_attn_scalar),
        "attn_scores_soft_cap": config.attn_logit_softcapping or -1.0,
        "output_logits_soft_cap": config.final_logit_softcapping or -1.0,
    }


def _gpt2(config: Any) -> dict[str, Any]:
    return {
        "use_attn_scale": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }


RECIPES = {
    "LlamaForCausalLM": Recipe("convert_llama_weights", LLAMA),
    "MistralForCausalLM": Recipe("convert_mistral_weights", LLAMA, grouped=True),
    "Qwen2ForCausalLM": Recipe("convert_qwen2_weights", LLAMA, grouped=True),
    "Qwen3ForCausalLM": Recipe("convert_qwen3_weights", {**LLAMA, "use_qk_norm": True}),
    "Gemma2ForCausalLM": Recipe(
        "convert_gemma_weights", {**LLAMA, "use_normalization_before_and_after": True}, _gemma2, grouped=True
    ),
    "GPTNeoXForCausalLM": Recipe(
        "convert_neox_weights", NEOX, lambda config: {"parallel_attn_mlp": config.use_parallel_residual}
    ),
    "GPTJForCausalLM": Recipe(
        "convert_gptj_weights",
        {**NEOX, "rotary_adjacent_pairs": True},
        lambda config: {"rotary_dim": config.rotary_dim},
    ),
    "PhiForCausalLM": Recipe("convert_phi_weights", NEOX),
    "GPT2LMHeadModel": Recipe("convert_gpt2_weights", {"normalization_type": "LN"}, _gpt2),
    "BloomForCausalLM": Recipe(
        "convert_bloom_weights",
        {
            "normalization_type": "LN",
            "positional_embedding_type": "alibi",
            "post_embedding_ln": True,
            "act_fn": "gelu_fast",
        },
    ),
}


def hooked_settings(config: Any, architecture: str) -> dict[str, Any]:
    """The fields of HookedTransformerConfig for a Hugging Face config.

    Raises:
        UnsupportedModelError: an architecture without a recipe, or a RoPE scaling that HookedTransformer lacks.
    """
    if architecture not in RECIPES:
        raise UnsupportedModelError(
            f"{architecture} cannot be made a HookedTransformer here (only {', '.join(RECIPES)}); use backend='bridge'"
        )
    recipe = RECIPES[architecture]
    settings = {**sizes(config), **activation(config), **windows(config), **recipe.settings}
    if recipe.settings.get("positional_embedding_type") == "rotary":
        settings |= rotary(config, settings["d_head"])
    if settings["n_key_value_heads"] == settings["n_heads"] and not recipe.grouped:
        settings["n_key_value_heads"] = None
    return {**settings, **recipe.more(config), "original_architecture": architecture, "init_weights": False}


def first_of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these config fields that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def sizes(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_key_value_heads": first_of(config, "num_key_value_heads", default=heads),
        "d_head": first_of(config, "head_dim", default=config.hidden_size // heads),
        "d_mlp": first_of(config, "intermediate_size", "n_inner", default=4 * config.hidden_size),
        "d_vocab": config.vocab_size,
        "n_ctx": first_of(config, "max_position_embeddings", default=2048),
        "eps": first_of(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    }


def activation(config: Any) -> dict[str, Any]:
    return {"act_fn": first_of(config, "hidden_activation", "hidden_act", "activation_function")}


def windows(config: Any) -> dict[str, Any]:
    """Sliding windows, per layer where the config has layer types, else in every layer."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if not window or "sliding_attention" not in types:
        return {}
    local = ["local" if kind == "sliding_attention" else "global" for kind in types]
    return {"use_local_attn": True, "window_size": window, "attn_types": local}


def rotary(config: Any, d_head: int) -> dict[str, Any]:
    """Base, rotary dimension and scaling rule of RoPE."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    share = rope.get("partial_rotary_factor") or first_of(config, "partial_rotary_factor", "rotary_pct", default=1.0)
    settings = {"rotary_base": rope.get("rope_theta", 10_000.0), "rotary_dim": int(d_head * share)}
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        settings["rotary_scaling_factor"] = rope["factor"]
    elif kind == "llama3":
        settings |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_factor": rope["factor"],
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_original_ctx_len": rope["original_max_position_embeddings"],
        }
    elif kind == "yarn":
        settings |= {
            "use_yarn_rope": True,
            "yarn_factor": rope["factor"],
            "yarn_attention_factor": rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1,
            "yarn_beta_fast": rope.get("beta_fast") or 32.0,
            "yarn_beta_slow": rope.get("beta_slow") or 1.0,
            "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
            "yarn_truncate": rope.get("truncate", True),
        }
    elif kind != "default":
        raise UnsupportedModelError(f"HookedTransformer has no {kind!r} RoPE scaling; use backend='bridge'")
    return settings
