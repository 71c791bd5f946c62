"""Sum what each source adds to queries or keys over tokens and prompts, and the passes that it is read from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.run import Run
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.models.wrapped import WrappedModel
from tl_posgen.residual.frozen_layer import ROUNDING, Side, frozen_layer, require_small
from tl_posgen.residual.numbers.frozen_map import FrozenMap
from tl_posgen.residual.residual_sources import By, ResidualSources, SourceReader, place_of_source

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
        cls, wrapped: WrappedModel, capture: LayerCapture, written: ResidualSources, side: Letter
    ) -> "SourcedSide":
        """Return one side of a capture with its resid, inputs and projections."""
        whole = capture.q if side == "q" else capture.k
        frozen = frozen_layer(wrapped, capture, SIDES[side]).of_heads(capture.heads)
        names = frozen.names(written.names)
        names = (*names, ROUNDING) if wrapped.dtype.itemsize < torch.float32.itemsize else names
        return cls(whole, written, frozen, names, wrapped.dtype)

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
        reader, captures = SourceReader(run.wrapped, last, by), list[LayerCapture]()
        with reader.attached():
            run_capture(run.wrapped, row[None], captures.append, {"resid", "inputs"}, **run.where)
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
