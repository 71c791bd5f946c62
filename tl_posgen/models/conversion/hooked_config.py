"""Making HookedTransformer's config of a Hugging Face config, for families whose weights TransformerLens converts.

The table of TransformerLens 3.9, given a directory, fails for Gemma 2, GPT-2 and Phi, drops linear and YaRN scaling of
RoPE, and gives Mistral and Qwen 3 a context of 2,048. Every converted model is compared with the Hugging Face
one before it is handed out (see `convert`).
"""

import math
from typing import Any

from tl_posgen.errors import UnsupportedModelError

LLAMA = {"normalization_type": "RMS", "positional_embedding_type": "rotary", "gated_mlp": True, "final_rms": True}
NEOX = {"normalization_type": "LN", "positional_embedding_type": "rotary", "parallel_attn_mlp": True}
GEMMA2 = {
    **LLAMA,
    "use_normalization_before_and_after": True,
    "attn_scale": lambda config: math.sqrt(config.query_pre_attn_scalar),
    "attn_scores_soft_cap": lambda config: config.attn_logit_softcapping or -1.0,
    "output_logits_soft_cap": lambda config: config.final_logit_softcapping or -1.0,
}
GPT2 = {
    "normalization_type": "LN",
    "use_attn_scale": lambda config: config.scale_attn_weights,
    "scale_attn_by_inverse_layer_idx": lambda config: config.scale_attn_by_inverse_layer_idx,
}
GPTJ = {**NEOX, "rotary_adjacent_pairs": True, "rotary_dim": lambda config: config.rotary_dim}
BLOOM = {
    "normalization_type": "LN",
    "positional_embedding_type": "alibi",
    "post_embedding_ln": True,
    "act_fn": "gelu_fast",
}

# architecture -> X of TransformerLens' convert_X_weights, and fields of HookedTransformerConfig (or what makes them of
# the Hugging Face config)
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", LLAMA),
    "MistralForCausalLM": ("mistral", LLAMA),
    "Qwen2ForCausalLM": ("qwen2", LLAMA),
    "Qwen3ForCausalLM": ("qwen3", {**LLAMA, "use_qk_norm": True}),
    "Gemma2ForCausalLM": ("gemma", GEMMA2),
    "GPTNeoXForCausalLM": ("neox", {**NEOX, "parallel_attn_mlp": lambda config: config.use_parallel_residual}),
    "GPTJForCausalLM": ("gptj", GPTJ),
    "PhiForCausalLM": ("phi", NEOX),
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "BloomForCausalLM": ("bloom", BLOOM),
}
ALWAYS_GROUPED = {"mistral", "qwen2", "gemma"}  # converters that want n_key_value_heads even when keys are not grouped


def hooked_settings(config: Any, architecture: str) -> dict[str, Any]:
    """Return the fields of HookedTransformerConfig for a Hugging Face config; UnsupportedModelError without a
    recipe."""
    if architecture not in RECIPES:
        raise UnsupportedModelError(
            f"{architecture} cannot be made a HookedTransformer here (only {', '.join(RECIPES)})"
        )
    converter, own = RECIPES[architecture]
    own = {name: value(config) if callable(value) else value for name, value in own.items()}
    settings = {**sizes(config), **windows(config)}
    if own.get("positional_embedding_type") == "rotary":
        settings |= rotary(config, settings["d_head"])
    if settings["n_key_value_heads"] == settings["n_heads"] and converter not in ALWAYS_GROUPED:
        settings["n_key_value_heads"] = None
    return {**settings, **own, "original_architecture": architecture, "init_weights": False}


def first_of(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these config fields that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def sizes(config: Any) -> dict[str, Any]:
    """Return sizes, epsilon and activation, whatever the family calls them."""
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
        "act_fn": first_of(config, "hidden_activation", "hidden_act", "activation_function"),
    }


def windows(config: Any) -> dict[str, Any]:
    """Return sliding windows, per layer where the config has layer types, else in every layer."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if not window or "sliding_attention" not in types:
        return {}
    local = ["local" if kind == "sliding_attention" else "global" for kind in types]
    return {"use_local_attn": True, "window_size": window, "attn_types": local}


def rotary(config: Any, d_head: int) -> dict[str, Any]:
    """Return base, rotary dimension and scaling rule of RoPE."""
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
        raise UnsupportedModelError(f"HookedTransformer has no {kind!r} RoPE scaling")
    return settings
