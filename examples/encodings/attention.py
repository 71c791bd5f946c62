"""A Llama whose scores take position in one of seven ways.

Score of query i and key j <= i of a head, s = 1 / sqrt(d_head), R_i the rotation of position i, m a learned mean key of
each key/value head, P_n the rolling of planes by n quarters of them, n = 0 .. 3:

    rope     s <R_i q_i, R_j (k_j + m)>                  position, content and their interaction
    plain    s <R_i q_i, R_j k_j>                        RoPE as models have it, without a mean key
    split    s (<R_i q_i, R_j m> + <q_i, k_j>)           f(q, i - j) + g(q, k): no interaction by construction
    several  s (sum_n <R_i P_n q_i, R_j m_n> + <q_i, k_j>)   likewise, with four mean keys
    added    s (<R_i q_i, R_j (k_j + m)> + <q_i, k_j>)   split, with rotated content added: an interaction
    alibi    s <q_i, k_j + m> - slope (i - j)            no interaction, and position the same for every query of a head
    none     s <q_i, k_j + m>                            position by the causal mask alone

Every one is s <R_i q'_i, R_j k'_j>, less ALiBi's line: split is partial RoPE on q' = [q, q] and k' = [m, k]. In alibi and
none <q_i, m> is the same for all keys of a row, so that m changes no weight there. A split whose content is rotated is
rope. Several mean keys of one rotation are one, their sum, so that each meets the query with its planes rolled: a plane
of the query turns at four frequencies in place of one. Parameters are the same but for m: none in plain, four in several.
"""

from functools import lru_cache

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

ENCODINGS = ("rope", "plain", "split", "several", "added", "alibi", "none")
ROTATED = ("rope", "plain", "split", "several", "added")
N_KEYS = 4  # mean keys of several


def n_rotated(encoding: str) -> int:
    """Return how many times d_head coordinates of q' and k' are rotated."""
    return N_KEYS if encoding == "several" else 1


def slopes(n_heads: int) -> torch.Tensor:
    """2^(-8 h / n), h = 1 .. n, a power of two: the slopes of Press, Smith and Lewis (2022)."""
    return 2.0 ** (-8 / n_heads * torch.arange(1, n_heads + 1))


def rolled_planes(x: torch.Tensor, n: int) -> torch.Tensor:
    """P_n x: plane m of it is plane m - n / N_KEYS of all planes, [..., d]; coordinates m and m + d / 2 are a plane."""
    planes = x.unflatten(-1, (2, -1))
    return planes.roll(n * planes.shape[-1] // N_KEYS, -1).flatten(-2)


def beside(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Vectors of one space as one, [..., n d], with every plane again the coordinates m and m + n d / 2."""
    return torch.cat([x.unflatten(-1, (2, -1)) for x in vectors], -1).flatten(-2)


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
        mean_key = std * torch.randn(config.num_key_value_heads * self.head_dim)
        if config.encoding == "several":
            with torch.random.fork_rng(devices=[]):  # so that all other weights are those of the other encodings
                more = std * torch.randn(len(mean_key) * (N_KEYS - 1))
            mean_key = torch.cat([mean_key, more]) / N_KEYS**0.5  # the position part as large as in split
        self.mean_key = None if config.encoding == "plain" else torch.nn.Parameter(mean_key)

    def operands(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q', k' before rotation, [batch, head, position, d] and one k' a key/value head."""
        q, k = (self._by_head(projection(hidden_states)) for projection in (self.q_proj, self.k_proj))
        if self.mean_key is None:
            return q, k
        mean_keys = self.mean_key.view(-1, self.config.num_key_value_heads, 1, self.head_dim)
        match self.config.encoding:
            case "split":
                return torch.cat([q, q], -1), torch.cat([mean_keys[0].expand_as(k), k], -1)
            case "added":
                return torch.cat([q, q], -1), torch.cat([k + mean_keys[0], k], -1)
            case "several":
                rolled = beside([rolled_planes(q, n) for n in range(N_KEYS)])
                return torch.cat([rolled, q], -1), torch.cat([beside([m.expand_as(k) for m in mean_keys]), k], -1)
        return q, k + mean_keys[0]

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        if attention_mask is not None or past_key_values is not None:
            raise ValueError("whole unpadded sequences only: leave out attention_mask, or give use_cache=False")
        q, k = self.operands(hidden_states)
        if self.config.encoding in ROTATED:
            n = n_rotated(self.config.encoding)
            d, angles = n * self.head_dim, (x.repeat(1, 1, n) for x in position_embeddings)
            rotated = apply_rotary_pos_emb(q[..., :d], k[..., :d], *angles)
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
