"""Sums of what each source adds to queries or keys, over tokens and prompts, and the shares that are made of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import TOKENS
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.variance_shares import (
    DistanceWeights,
    Spread,
    TripleMoments,
    turning,
    weighted_spread,
)
from tl_posgen.position.decomposition.variance import moments_with_and_without_first
from tl_posgen.residual.numbers import REST, FrozenMap
from tl_posgen.residual.residual_sources import (
    ROUNDING,
    By,
    ResidualSources,
    Side,
    SourceReader,
    frozen_layer,
    place_of_source,
    require_small,
)
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.sources.numbers import TERMS, as_shares, products_of_means, source_form, source_weights

Letter = Literal["q", "k"]
SIDES: dict[Letter, Side] = {"q": "query", "k": "key"}
SIDE_WORDS: dict[str, str] = {"k": "keys", "q": "queries"}


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
        whole = self.values.new_zeros(len(names), *self.values.shape[1:])
        here = [place for place, name in enumerate(names) if name in self.names]
        whole[here] = self.values[[self.names.index(names[place]) for place in here]]
        return whole

    def __add__(self, other: "SourceSums") -> "SourceSums":
        names = tuple(sorted(dict.fromkeys((*self.names, *other.names)), key=place_of_source))
        return SourceSums(self.n + other.n, names, self.of_names(names) + other.of_names(names))

    def __sub__(self, other: "SourceSums") -> "SourceSums":
        """Return the sums of the other prompts, of which `other` is one."""
        return SourceSums(self.n - other.n, self.names, self.values - other.of_names(self.names))

    @property
    def means(self) -> Float[Tensor, "source *rest"]:
        return self.values / self.n


@dataclass(frozen=True)
class SourcedSide:
    """Queries or keys of the chosen heads of one layer on one prompt, and the map that makes them of their sources.

    Attributes:
        whole: the vectors that the pass had.
        written: the sources of the residual stream.
        frozen: makes queries or keys of them.
        names: of the sources, biases included; last what half precision took away, where the model's is that coarse.
        dtype: the model's.
    """

    whole: Float[Tensor, "head pos d_head"]
    written: ResidualSources
    frozen: FrozenMap
    names: tuple[str, ...]
    dtype: torch.dtype

    @classmethod
    def of_capture(
        cls, session: Session, capture: LayerCapture, written: ResidualSources, side: Letter
    ) -> "SourcedSide":
        """Return one side of a capture with its resid, inputs and projections."""
        whole = capture.q if side == "q" else capture.k
        frozen = frozen_layer(session, capture, SIDES[side]).of_heads(capture.heads)
        names = frozen.names(written.names)
        names = (*names, ROUNDING) if session.dtype.itemsize < torch.float32.itemsize else names
        return cls(whole, written, frozen, names, session.dtype)

    def sums(self, tokens: slice) -> Float[Tensor, "source head d_head"]:
        """Return the sums over tokens of what each source adds.

        Raises:
            UnsupportedModelError: they do not add up to the queries or keys.
        """
        n, whole = self.whole[:, tokens].shape[1], double(self.whole[:, tokens]).sum(1)
        values = n * self.frozen.mean_vectors(self.written.values, tokens)
        require_small((whole - values.sum(0)) / n, self.whole, self.dtype)
        return self.with_rest(values, whole)

    def energies(self, tokens: slice) -> Float[Tensor, "source head"]:
        """Return the sums over tokens of |x_s|^2 of what each source adds."""
        values = self.with_rest(self.frozen.vectors(self.written.values), double(self.whole))
        return values[:, :, tokens].square().sum((2, 3))

    def products(self, weights: Float[Tensor, "head pos d_head"], tokens: slice) -> Float[Tensor, "source head"]:
        """Return the sums over tokens of the products of what each source adds with weights."""
        values = self.frozen.products(self.written.values, weights, tokens)
        return self.with_rest(values, (double(self.whole) * weights)[:, tokens].sum((1, 2)))

    def with_rest(self, values: Float[Tensor, "source *rest"], whole: Float[Tensor, "*rest"]) -> Tensor:
        return torch.cat([values, (whole - values.sum(0))[None]]) if ROUNDING in self.names else values


def read_prompts(
    run: Run, by: By, rows: Sequence[Int[Tensor, " _"]] | None = None
) -> Iterator[tuple[LayerCapture, ResidualSources]]:
    """Yield every chosen layer of every prompt with what earlier layers wrote.

    Args:
        by: whether a source is a head, or all heads of a layer.
        rows: token ids of other prompts than those of the run.
    """
    last = max(select_heads(run.model, **run.where))
    for number, row in enumerate(run.rows if rows is None else rows):
        reader, captures = SourceReader(run.session, last, by), list[LayerCapture]()
        with reader.attached():
            run_capture(run.session, row[None], captures.append, {"resid", "inputs"}, **run.where)
        while captures:  # let go one by one
            capture = captures.pop(0)
            assert capture.resid is not None
            capture.prompt = number
            yield capture, reader.sources(capture.layer, capture.resid.to(capture.device))


def folded(written: ResidualSources, fold: Mapping[str, str]) -> ResidualSources:
    """Return sources in which those that `fold` gives one name are one."""
    if not fold:
        return written
    named = [fold.get(name, name) for name in written.names]
    known = tuple(dict.fromkeys(named))
    places = torch.tensor([known.index(name) for name in named], device=written.values.device)
    whole = written.values.new_zeros(len(known), *written.values.shape[1:])
    return ResidualSources(known, whole.index_add(0, places, written.values), written.residual)


# Shares


TermName = Literal["position", "content", "interaction", "key"]
FIRST = slice(0, 1)
PARTS: dict[str, slice] = dict(zip(TOKENS, (slice(0, None), REST), strict=True))  # tokens that count


@dataclass(frozen=True)
class Factors:
    """Moments of queries, keys and distances of one layer, which fix the weights of its sources."""

    geometry: LayerGeometry
    moments: TripleMoments
    distance: Spread

    @classmethod
    def of_layer(
        cls, sums: Sums, layer: int, tokens: str, n_distances: int | None, weights: DistanceWeights
    ) -> "Factors":
        """Return those of the prompts of these sums; distances as in `variance`."""
        geometry, moments = sums.layers[layer][0], sums.by_layer(f"moments {tokens}")[layer]
        n = n_distances or max(sums.lengths.values())
        distances = turning(moments, geometry.rope, min(n, geometry.window or n), weights)
        return cls(geometry, moments, weighted_spread(*distances))

    def form(self, side: Letter, term: TermName) -> SecondMoments:
        return source_form(TERMS[term], side, self.moments, self.distance)

    def defined(self, term: TermName) -> bool:
        """Tell whether the term is more than zero by construction."""
        return TERMS[term].d == "mean" or self.geometry.rope.rotary_dim > 0


def takes_products(side: Letter, term: TermName) -> bool:
    """Tell whether a term has more of the queries or keys of this side than their mean, so that products of every
    token with fixed weights are needed: a second pass."""
    return getattr(TERMS[term], side) != "mean"


def sums_of(
    session: Session, capture: LayerCapture, written: ResidualSources, sides: Sequence[Letter]
) -> dict[str, Any]:
    """Return moments of queries and keys, and sums of what each source adds, of one layer of one prompt."""
    both = zip(TOKENS, moments_with_and_without_first(capture), strict=True)
    found: dict[str, Any] = {f"moments {tokens}": moments for tokens, moments in both}
    for side in sides:
        sourced = SourcedSide.of_capture(session, capture, written, side)
        rests = sourced.sums(REST)
        for tokens, values in zip(TOKENS, (sourced.sums(FIRST) + rests, rests), strict=True):
            n = capture.length - (tokens != TOKENS[0])
            found[f"{side} {tokens}"] = SourceSums(n, sourced.names, values)
    return found


def products_of(
    sourced: SourcedSide, side: Letter, term: TermName, tokens: str, factors: Factors, sums: SourceSums
) -> SourceSums:
    """Return the sums over the tokens of one prompt of <x_s, g>, x_s what a source adds, or its deviation from the mean
    over all prompts where the term has deviations."""
    part, device, whole = PARTS[tokens], sourced.whole.device, double(sourced.whole)
    centred, means = getattr(TERMS[term], side) == "rest", sums.means.to(whole.device)
    form = factors.form(side, term)
    form = SecondMoments(form.plain.to(whole.device), form.conjugate.to(whole.device))
    g = source_weights(form, whole - means.sum(0)[:, None] if centred else whole, factors.geometry.rope)
    found = SourceSums(g[:, part].shape[1], sourced.names, sourced.products(g.to(device), part))
    if not centred:
        return found
    shift = (means * g[:, part].sum(1)).sum(-1)
    return found + SourceSums(0, sums.names, -shift.to(found.values.device))


def share_of(
    sums: Sums, layer: int, side: Letter, term: TermName, tokens: str, factors: Factors, every: Sequence[str]
) -> tuple[Float[Tensor, "head source"], Float[Tensor, " head"]]:
    """Return the shares of all sources in a term, NaN of those that the layer lacks, and E w^2."""
    rope, scale = factors.geometry.rope, factors.geometry.scale
    sourced: SourceSums = sums.by_layer(f"{side} {tokens}")[layer]
    names = sourced.names
    if takes_products(side, term):
        values = sums.by_layer(f"{side} {term} {tokens}")[layer].of_names(names) / sourced.n
    else:
        values = products_of_means(factors.form(side, term), sourced.means, rope)
    known = 1.0 if factors.defined(term) else torch.nan
    shares = known * as_shares(values, factors.moments)
    whole = shares.new_full((len(every), shares.shape[1]), torch.nan)
    whole[[every.index(name) for name in names]] = shares
    return whole.mT, known * scale**2 * values.sum(0)


def all_sources(sums: Sums, sides: Sequence[Letter]) -> list[str]:
    """Return the sources of all layers, embeddings first, then in the order of layers."""
    found: Iterator[SourceSums] = (
        one for side, tokens in product(sides, TOKENS) for one in reversed(sums.by_layer(f"{side} {tokens}").values())
    )
    return sorted(dict.fromkeys(name for one in found for name in one.names), key=place_of_source)
