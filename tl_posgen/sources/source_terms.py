"""Products of what sources write with the whole, of one layer: what their shares of a part of the score are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import TOKENS
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.wrapped import WrappedModel
from tl_posgen.position.decomposition.numbers.variance_shares import (
    DistanceWeights,
    Spread,
    TripleMoments,
    turning,
    weighted_spread,
)
from tl_posgen.position.decomposition.variance import moments_with_and_without_first
from tl_posgen.residual.numbers.frozen_map import REST
from tl_posgen.residual.residual_sources import ResidualSources, place_of_source
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.sources.numbers.source_shares import TERMS, as_shares, products_of_means, source_form, source_weights
from tl_posgen.sources.source_sums import Letter, SourcedSide, SourceSums

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
    wrapped: WrappedModel, capture: LayerCapture, written: ResidualSources, sides: Sequence[Letter]
) -> dict[str, Any]:
    """Return moments of queries and keys, and sums of what each source adds, of one layer of one prompt."""
    both = zip(TOKENS, moments_with_and_without_first(capture), strict=True)
    found: dict[str, Any] = {f"moments {tokens}": moments for tokens, moments in both}
    for side in sides:
        sourced = SourcedSide.of_capture(wrapped, capture, written, side)
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
