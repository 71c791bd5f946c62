"""Frozen norms, queries or keys as the linear maps that they make, and sums by source: tensors in, tensors out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double

REST = slice(1, None)  # of a prompt without its first token
SAME = 1e-2  # of the largest output: by how much a centring norm may move when a constant is added


@dataclass(frozen=True)
class FrozenNorm:
    """y_t = c_t gamma * (x_t - mean x_t, where centred) + beta, float64.

    Attributes:
        gamma, beta: weight and bias.
        centred: whether the mean over the last axis is taken away first, as by LayerNorm.
        factor: c_t, such as 1 / rms(x_t).
        error: max |y - this| / max |y| on the inputs that it was made of.
    """

    gamma: Float[Tensor, "*batch d"]
    beta: Float[Tensor, "*batch d"]
    centred: bool
    factor: Float[Tensor, "*batch pos"]
    error: float

    def linear(self, parts: Float[Tensor, "*source pos d"]) -> Float[Tensor, "*source pos d"]:
        """Return c_t gamma * (r_t - mean r_t) of parts that add up to x_t, of a norm without a batch; beta is a part of
        its own."""
        return self.factor[..., None] * _scaled(parts, self.gamma, self.centred)


def _scaled(x: Float[Tensor, "*any d"], gamma: Float[Tensor, "*some d"], centred: bool) -> Float[Tensor, "*both d"]:
    """gamma * (x - mean x), or gamma * x where nothing is centred."""
    x = double(x)
    return double(gamma) * (x - x.mean(-1, keepdim=True) if centred else x)


def freeze(
    norm: Callable[[Float[Tensor, "*batch row d"]], Float[Tensor, "*batch row d"]],
    x: Float[Tensor, "*batch pos d"],
    y: Float[Tensor, "*batch pos d"],
) -> FrozenNorm:
    """Return the frozen form of a norm at inputs x with outputs y = norm(x).

    beta = norm(0); gamma from norm(1, -1, 1, -1, ...); a norm centres if adding 1 to that changes nothing; c_t is the
    least-squares factor of y_t on gamma * x_t. So RMSNorm, LayerNorm, norms without weights and the identity are read
    in one way; `error` tells what is none of these.

    Example:
        >>> x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> norm = torch.nn.LayerNorm(8, dtype=torch.float64)
        >>> frozen = freeze(norm, x, norm(x).detach())
        >>> frozen.centred, frozen.error < 1e-12
        (True, True)
    """
    d = x.shape[-1]
    signs = torch.ones(d, dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    probes = torch.stack([torch.zeros_like(signs), signs, signs + 1])
    with torch.no_grad():
        beta, at_signs, raised = double(norm(probes.expand(*x.shape[:-2], 3, d))).unbind(-2)
    reach = (at_signs - beta).abs().max()
    centred = bool((raised - at_signs).abs().max() <= SAME * reach)
    signs = double(signs)
    gamma = (at_signs - beta) / (signs - signs.mean() if centred else signs)
    unscaled = _scaled(x, gamma[..., None, :], centred)
    without_bias = double(y) - beta[..., None, :]
    factor = (unscaled * without_bias).sum(-1) / unscaled.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = (factor[..., None] * unscaled - without_bias).abs().max() / double(y).abs().max().clamp(min=1e-30)
    return FrozenNorm(gamma, beta, centred, factor, float(error))


@dataclass(frozen=True)
class FrozenMap:
    """k_t = c_t A x_t + sum of constants c'_t b, for every head, float64.

    Attributes:
        matrix: A with all weights folded in.
        factor: c_t.
        constants: name -> (b, c'): the norm's bias, the projection's, that of a norm behind it; no zeros.
    """

    matrix: Float[Tensor, "head d_model d_head"]
    factor: Float[Tensor, "head pos"]
    constants: Mapping[str, tuple[Float[Tensor, "head d_head"], Float[Tensor, "head pos"]]]

    def of_heads(self, heads: Sequence[int]) -> "FrozenMap":
        """Return the map of some of the heads."""
        chosen = list(heads)
        constants = {name: (b[chosen], c[chosen]) for name, (b, c) in self.constants.items()}
        return FrozenMap(self.matrix[chosen], self.factor[chosen], constants)

    def vectors(
        self, sources: Float[Tensor, "source pos d_model"]
    ) -> Float[Tensor, "source_and_constant head pos d_head"]:
        """Return what each source, and each constant, adds to the vector of every token."""
        of_sources = self.factor[..., None] * (double(sources)[:, None] @ self.matrix)
        return torch.cat([of_sources, *(c[None, ..., None] * b[None, :, None] for b, c in self.constants.values())])

    def mean_vectors(
        self, sources: Float[Tensor, "source pos d_model"], tokens: slice = REST
    ) -> Float[Tensor, "source_and_constant head d_head"]:
        """Return the means of `vectors` over tokens, without forming them."""
        factor, sources = self.factor[:, tokens], double(sources[:, tokens])
        if bool((factor == factor[:1]).all()):  # no norm behind the projection: one mean for all heads
            factor = factor[:1]
        weighted = factor @ sources / factor.shape[1]  # not an einsum, which would copy the sources
        of_sources = torch.einsum("shd,hdk->shk", weighted.expand(-1, len(self.matrix), -1), self.matrix)
        constants = [(c[:, tokens].mean(1, keepdim=True) * b)[None] for b, c in self.constants.values()]
        return torch.cat([of_sources, *constants])

    def products(
        self,
        sources: Float[Tensor, "source pos d_model"],
        weights: Float[Tensor, "head pos d_head"],
        tokens: slice = REST,
    ) -> Float[Tensor, "source_and_constant head"]:
        """Return sum_t <vectors_t, weights_t> over tokens, without forming the vectors."""
        weights, factor, sources = weights[:, tokens], self.factor[:, tokens], double(sources[:, tokens])
        pulled = (factor[..., None] * weights) @ self.matrix.mT
        of_sources = sources.flatten(1) @ pulled.flatten(1).mT
        constants = [(c[:, tokens] * (weights @ b[..., None])[..., 0]).sum(1)[None] for b, c in self.constants.values()]
        return torch.cat([of_sources, *constants])


def frozen_map(
    norm: FrozenNorm,
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None,
    behind: FrozenNorm | None,
    names: tuple[str, str, str],
) -> FrozenMap:
    """Return behind(norm(x) W + b) as a `FrozenMap`.

    Args:
        norm: of the residual stream [pos, d_model]; behind: of queries or keys [head, pos, d_head], or None.
        names: of the biases of the three, in this order.

    Example:
        >>> x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> one = FrozenNorm(torch.ones(8), torch.zeros(8), False, torch.ones(5), 0.0)
        >>> found = frozen_map(one, torch.ones(1, 8, 2), torch.ones(1, 2), None, ("ln bias", "b_K", "k_norm bias"))
        >>> list(found.constants), torch.allclose(found.vectors(x[None]).sum(0)[0, :, 0], x.sum(-1) + 1)
        (['b_K'], True)
    """
    weight = double(weight)
    matrix = double(norm.gamma)[:, None] * weight
    if norm.centred:
        matrix = matrix - matrix.mean(-2, keepdim=True)
    ones = torch.ones(len(weight), len(norm.factor), dtype=matrix.dtype, device=matrix.device)
    inner = {names[0]: double(norm.beta) @ weight} | ({} if bias is None else {names[1]: double(bias)})
    constants = {name: (vector, ones) for name, vector in inner.items()}
    factor = ones * double(norm.factor)
    if behind is not None:
        matrix = _scaled(matrix, behind.gamma[:, None], behind.centred)
        factor = factor * behind.factor
        scaled = {name: _scaled(vector, behind.gamma, behind.centred) for name, vector in inner.items()}
        constants = {name: (vector, behind.factor) for name, vector in scaled.items()}
        constants[names[2]] = behind.beta, ones
    nonzero = {name: constant for name, constant in constants.items() if bool(constant[0].any())}
    return FrozenMap(matrix, factor, nonzero)


@dataclass(frozen=True)
class SourceSums:
    """Sums over tokens by source, float64; `a + b` are those of both prompts, a source that one lacks is zero there.

    Attributes:
        n: how many tokens.
        names: of the sources, each once.
        values: one row a source.
    """

    n: int
    names: tuple[str, ...]
    values: Float[Tensor, "source *rest"]

    def of_names(self, names: Sequence[str]) -> Float[Tensor, "name *rest"]:
        """Return the rows of these sources, zeros of those that it lacks."""
        rows = self.values.new_zeros(len(names), *self.values.shape[1:])
        present = [place for place, name in enumerate(names) if name in self.names]
        rows[present] = self.values[[self.names.index(names[place]) for place in present]]
        return rows

    def __add__(self, other: "SourceSums") -> "SourceSums":
        names = sorted_sources((*self.names, *other.names))
        return SourceSums(self.n + other.n, names, self.of_names(names) + other.of_names(names))

    def __sub__(self, other: "SourceSums") -> "SourceSums":
        """Return the sums of the other prompts, of which `other` is one."""
        return SourceSums(self.n - other.n, self.names, self.values - other.of_names(self.names))

    @property
    def means(self) -> Float[Tensor, "source *rest"]:
        return self.values / self.n


def sorted_sources(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once: embeddings, then layer by layer, then biases of queries and keys.

    Example:
        >>> sorted_sources(["b_K", "L10 MLP", "L2H0", "embed", "L2H0"])
        ('embed', 'L2H0', 'L10 MLP', 'b_K')
    """

    def place(name: str) -> tuple[int, int]:
        layer = re.match(r"L(\d+)", name)
        return (1, int(layer[1])) if layer else (0 if "embed" in name else 2, 0)

    return tuple(sorted(dict.fromkeys(names), key=place))
