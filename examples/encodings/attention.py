"""A Llama whose scores take position in one of four ways, with the same parameters in all of them.

Score of query i and key j <= i of a head, s = 1 / sqrt(d_head), R_i the rotation of position i, m a learned mean key of
each key/value head:

    rope    s <R_i q_i, R_j (k_j + m)>                  position, content and their interaction
    split   s (<R_i q_i, R_j m> + <q_i, k_j>)           f(q, i - j) + g(q, k): no interaction by construction
    alibi   s <q_i, k_j + m> - slope (i - j)            no interaction, and position the same for every query of a head
    none    s <q_i, k_j + m>                            position by the causal mask alone

Every one is s <R_i q'_i, R_j k'_j>, less ALiBi's line: split is partial RoPE on q' = [q, q] and k' = [m, k]. In alibi and
none <q_i, m> is the same for all keys of a row, so that m changes no weight there.
"""

from functools import lru_cache

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

ENCODINGS = ("rope", "split", "alibi", "none")
ROTATED = ("rope", "split")


def slopes(n_heads: int) -> torch.Tensor:
    """2^(-8 h / n), h = 1 .. n, a power of two: the slopes of Press, Smith and Lewis (2022)."""
    return 2.0 ** (-8 / n_heads * torch.arange(1, n_heads + 1))


@lru_cache(maxsize=2)
def alibi_bias(n_heads: int, length: int) -> torch.Tensor:
    """-slope (i - j), and -inf where j > i: [1, head, query, key]."""
    position = torch.arange(length, dtype=torch.float32)
    distance = position[:, None] - position
    return torch.where(distance < 0, -torch.inf, -slopes(n_heads)[:, None, None] * distance)[None]


class EncodedAttention(LlamaAttention):
    """LlamaAttention and a mean key, with the encoding that the configuration names."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # As large as a key at the start: weights of std initializer_range on hidden_size inputs of unit size. Of one
        # axis, as a bias is, so that weight decay leaves it alone.
        std = config.initializer_range * config.hidden_size**0.5
        self.mean_key = torch.nn.Parameter(std * torch.randn(config.num_key_value_heads * self.head_dim))

    def operands(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q', k' before rotation, [batch, head, position, d] and one k' a key/value head."""
        q, k = (self._by_head(projection(hidden_states)) for projection in (self.q_proj, self.k_proj))
        mean_key = self.mean_key.view(-1, 1, self.head_dim)
        if self.config.encoding == "split":
            return torch.cat([q, q], -1), torch.cat([mean_key.expand_as(k), k], -1)
        return q, k + mean_key

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        if attention_mask is not None or past_key_values is not None:
            raise ValueError("whole unpadded sequences only: leave out attention_mask, or give use_cache=False")
        q, k = self.operands(hidden_states)
        if self.config.encoding in ROTATED:
            d = self.head_dim
            rotated = apply_rotary_pos_emb(q[..., :d], k[..., :d], *position_embeddings)
            q, k = (torch.cat([turned, x[..., d:]], -1) for turned, x in zip(rotated, (q, k), strict=True))
        # the fused kernel wants values as wide as keys
        v = pad(self._by_head(self.v_proj(hidden_states)), (0, k.shape[-1] - self.head_dim))
        bias = alibi_bias(q.shape[1], q.shape[2]).to(q) if self.config.encoding == "alibi" else None
        k, v = (repeat_kv(x, self.num_key_value_groups) for x in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=self.scaling)
        return self.o_proj(mixed[..., : self.head_dim].transpose(1, 2).flatten(2)), None

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class EncodedLlama(LlamaForCausalLM):
    """LlamaForCausalLM with EncodedAttention; `config.encoding` is one of ENCODINGS."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = EncodedAttention(config, index)
        self.post_init()
