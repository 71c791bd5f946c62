"""Frequencies as transformers' own rules of scaling RoPE make them."""

from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.conversion.quiet import quiet

TransformersRule = Literal["linear", "ntk", "yarn", "longrope", "llama3"]


@lru_cache(maxsize=256)
def scaled_frequencies(
    rule: TransformersRule,
    factor: int | float,
    rotary_dim: int,
    base: float,
    training_length: int,
    long_factors: tuple[float, ...] = (),
) -> tuple[Float[Tensor, " plane"], float]:
    """Return theta'_m and the factor on rotated q and k, of `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`.

    "ntk" is theirs called "dynamic" with its own factor at 1 and a text of factor x training_length tokens: the base
    becomes base * factor^(rotary_dim / (rotary_dim - 2)). "longrope" has the same divisors for texts of any length;
    "llama3" has the low_freq_factor 1 and high_freq_factor 4 of Llama 3.1. All of it is float32 there, and returned as
    float64; do not change it in place, it is kept.

    Args:
        rotary_dim: twice the number of planes; 4 at least for "ntk".
        training_length: tokens of the training context.
        long_factors: what "longrope" divides the frequencies by, one a plane.

    Source: transformers; Chen et al. 2023 (arXiv 2306.15595) for linear, Peng et al. 2023 (arXiv 2309.00071) for YaRN,
    Ding et al. 2024 (arXiv 2402.13753) for LongRoPE.

    Example:
        >>> theta, scaling = scaled_frequencies("linear", 2, rotary_dim=4, base=100.0, training_length=64)
        >>> theta.round(decimals=6).tolist(), scaling
        ([0.5, 0.05], 1.0)
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = {name: list(long_factors) for name in ("short_factor", "long_factor")}  # for texts of any length
    rules: dict[str, dict[str, Any]] = {
        "linear": {"rope_type": "linear", "factor": factor},
        "ntk": {"rope_type": "dynamic", "factor": 1.0},
        "yarn": {"rope_type": "yarn", "factor": factor},
        "longrope": {"rope_type": "longrope", "factor": factor, **divisors},
        "llama3": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    rope = {"rope_theta": base, "original_max_position_embeddings": training_length, **rules[rule]}
    sizes: dict[str, Any] = {"hidden_size": rotary_dim, "num_attention_heads": 1, "head_dim": rotary_dim}
    with quiet():
        config = LlamaConfig(max_position_embeddings=training_length, rope_parameters=rope, **sizes)
        make = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        theta, scaling = make(config, torch.device("cpu"), seq_len=round(factor * training_length))
    return double(theta), float(scaling)
