"""The geometry of an attention layer: how its scores depend on positions, and which keys a query sees."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from tl_posgen.rope.rotation import Rope

Encoding = Literal["rotary", "alibi", "absolute", "none"]


@dataclass(frozen=True)
class LayerGeometry:
    """score_ij = cap(scale <R_i q_i, R_j k_j>) + slope (j - i) for j <= i and, in a window layer, i - j < window.

    The cap comes before the bias, as in TransformerLens; no model that has both the other way round is known.
    `capped` and `distance_bias` are the two terms, `finish` is what all scores are made by: another term belongs there.

    Attributes:
        layer: index of the layer in the model.
        encoding: how the layer knows positions. "absolute": learned or sinusoidal embeddings added to the residual
            stream. "none": this layer does nothing with positions (NoPE).
        n_heads, n_key_value_heads, d_head: shapes; query head h reads key head h // (n_heads / n_key_value_heads).
        scale: multiplies <q, k> (1 / sqrt(d_head) in most models).
        rope: planes and frequencies; `Rope()` where nothing turns.
        soft_cap: c in c tanh(score / c), or None.
        window: a query sees the `window` last keys, itself included; None sees all.
        alibi_slopes: positive slope per head (the score falls by slope per token of distance), or None.
        qk_norm: whether q and k are normalised before RoPE (the captured ones already are).
        sinks: whether something that carries no value joins each row's softmax, so that patterns sum to less than one.
        error: largest |recomputed - model's own score| over the probe tokens: the proof of this description.
    """

    layer: int
    encoding: Encoding
    n_heads: int
    n_key_value_heads: int
    d_head: int
    scale: float
    rope: Rope = field(default_factory=Rope)
    soft_cap: float | None = None
    window: int | None = None
    alibi_slopes: Float[Tensor, " n_heads"] | None = None
    qk_norm: bool = False
    sinks: bool = False
    error: float | None = None

    @cached_property
    def bilinear(self) -> bool:
        """Tell whether the score is scale <R_i q_i, R_j k_j> and nothing else, so that no L x L matrix is needed.

        It is where `finish` returns what it is given.
        """
        products = torch.zeros(self.n_heads, 1, 1, device="cpu")
        return self.finish(products, 0) is products

    @cached_property
    def has_cap(self) -> bool:
        """Tell whether `capped` returns something else than what it is given."""
        products = torch.zeros(1, device="cpu")
        return self.capped(products) is not products

    def capped(self, products: Float[Tensor, "*pair"]) -> Float[Tensor, "*pair"]:
        """c tanh(products / c); the products themselves where there is no cap."""
        return products if self.soft_cap is None else self.soft_cap * torch.tanh(products / self.soft_cap)

    def distance_bias(
        self, distance: int | float | Real[Tensor, "*pair"], heads: Iterable[int] | None = None
    ) -> Float[Tensor, "head *pair"] | None:
        """-slope d: what the layer adds to scale <q, k> at distance d; None where it adds nothing.

        Args:
            heads: all of the layer's if left out.
        """
        if self.alibi_slopes is None:
            return None
        slopes = self.alibi_slopes if heads is None else self.alibi_slopes[list(heads)]
        distance = distance if isinstance(distance, Tensor) else torch.tensor(distance, device=slopes.device)
        dtype = torch.promote_types(distance.dtype, torch.float32)  # as fine as the distances are given
        return slopes.to(distance.device, dtype).view(-1, *[1] * distance.ndim) * -distance

    def finish(
        self,
        products: Float[Tensor, "*batch head query key"],
        distance: int | float | Real[Tensor, "query key"],
        heads: Iterable[int] | None = None,
    ) -> Float[Tensor, "*batch head query key"]:
        """cap(products_ij) - slope d_ij: the scores that the layer makes of scale <q, k> for pairs d_ij apart; the
        products themselves where it adds nothing.

        Args:
            heads: all of the layer's if left out.
        """
        if isinstance(distance, Tensor) and self.alibi_slopes is not None:
            distance = distance.to(torch.promote_types(products.dtype, torch.float32))
        scores, bias = self.capped(products), self.distance_bias(distance, heads)
        return scores if bias is None else scores + bias.to(scores).view(-1, *(bias.shape[1:] or (1, 1)))

    def key_head(self, head: int) -> int:
        return head // (self.n_heads // self.n_key_value_heads)

    def key_heads(self, heads: Iterable[int]) -> list[int]:
        return [self.key_head(head) for head in heads]

    def reach(self, n: int) -> int:
        """min(n, window): how many keys a query of n tokens sees at most, and so how many distances."""
        return min(n, self.window or n)

    def visible(self, n: int, device: torch.device | str = "cpu") -> Bool[Tensor, "query key"]:
        """Return which keys each of n queries sees: the causal mask, and the window where there is one."""
        position = torch.arange(n, device=device)
        return self.sees(position[:, None] - position)

    def sees(self, distance: Int[Tensor, "query key"]) -> Bool[Tensor, "query key"]:
        """0 <= i - j, and i - j < window where there is one: whether a query sees the key that is so far back."""
        return in_window(distance, self.window)


def in_window(distance: Int[Tensor, "query key"], window: int | None) -> Bool[Tensor, "query key"]:
    """0 <= d, and d < window where there is one."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class ContextLimit(NamedTuple):
    """Longest prompt that a model takes, or that its geometry holds for.

    Attributes:
        tokens: how many; None for any number.
        why: what sets the limit; "" without one.
        lifted_as: the other kind of object that the same model has no such limit as, or None.
    """

    tokens: int | None = None
    why: str = ""
    lifted_as: Literal["bridge"] | None = None

    def cut(self, n: int) -> int:
        """Return n, or the longest prompt where that is shorter."""
        return n if self.tokens is None else min(n, self.tokens)

    @property
    def remedy(self) -> str:
        if self.lifted_as is None:
            return "cut texts into shorter prompts with length= (and n_prompts=)"
        lifted = f'load it with backend="{self.lifted_as}", where rotary models have no such limit'
        return f"cut texts with length=, or {lifted}"
