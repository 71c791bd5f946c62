"""The running model as a measure sees it: prompts, losses under hooks, grids of conditions, examples of heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.core.measure import LABELS
from tl_posgen.core.numbers import one_side
from tl_posgen.core.sums import Sums
from tl_posgen.models.capture.capturing import Consumer, capturing, run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import run_prompts, token_losses
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import token_strings

if TYPE_CHECKING:
    from tl_posgen.core.measure import Measure

MOST_CHOSEN = 6  # heads that are all shown where the user chose them
_Pick = tuple[int, int, str]  # layer, head, why


@dataclass
class Run:
    """One model (the trained one, or a random init) under a measure that runs it.

    Attributes:
        measure: with all its options filled in.
        session, prompts: the model with all that is known of it, and the prompts as the user gave them.
        rows: token ids of every prompt.
        where: {"layers": ..., "heads": ...} as the user chose them, for hooks and captures.
        seed: of draws.
        init: label of the null model along the dim init; None for the model itself.
        before: datasets of this model by the name of the measure.
        trained: of a null model, what this measure found of the model itself: heads that all of them show.
        keep: from the labels of a cell of `grid` and what makes it to the finished cell; None where nothing is kept.
        shared: what the measure has found of this model and needs again, such as the sinks of a prompt by its number.
    """

    measure: "Measure"
    session: Session
    prompts: Any
    rows: Sequence[Int[Tensor, " _"]]
    where: Mapping[str, Any]
    seed: int = 0
    init: str | None = None
    before: Mapping[str, xr.Dataset] = field(default_factory=dict)
    trained: xr.Dataset | None = None
    keep: Callable[[Mapping[str, Any], Callable[[], xr.Dataset]], xr.Dataset] | None = None
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> Any:
        """The HookedTransformer or TransformerBridge."""
        return self.session.model

    @cached_property
    def tokens(self) -> Int[Tensor, "prompt pos"]:
        """Prompts of one length, stacked."""
        return torch.stack(list(self.rows))

    @cached_property
    def heads(self) -> Mapping[int, list[int]]:
        """Layer -> its chosen heads, in order."""
        return select_heads(self.session, **self.where)

    def texts(self, tokens: Int[Tensor, " pos"]) -> np.ndarray:
        """Return the texts of tokens, as Python's strings: numpy's lose NULs."""
        return np.array(token_strings(self.session, tokens), dtype=object)

    @property
    def data(self) -> xr.Dataset:
        """Dataset of this measure's `of_layer` for this model, all prompts."""
        return self.dataset_of(type(self.measure))

    def dataset_of(self, measure: type["Measure"]) -> xr.Dataset:
        """Return the dataset, for this model, of a measure that `after` names."""
        return one_side(self.before[measure.name])

    @cached_property
    def loss(self) -> Float[Tensor, "prompt target"]:
        """The loss of every token, nothing changed, in nats."""
        return token_losses(self.session, self.tokens)

    def passes(
        self, tokens: Int[Tensor, "row pos"], of_logits: Callable[[Tensor, Tensor], Any], hooks: Any = ()
    ) -> list[Any]:
        """Return what `of_logits(logits, tokens)` gives of every pass over other prompts, under hooks; see
        `tl_posgen.models.loss.run_prompts`."""
        return run_prompts(self.session, tokens, of_logits, hooks)

    def losses(self, tokens: Int[Tensor, "row pos"], hooks: Any = ()) -> Float[Tensor, "row target"]:
        """Return the loss of every token of other prompts, under hooks."""
        return token_losses(self.session, tokens, hooks)

    def losses_under(
        self,
        hooks: Any,
        consumer: Consumer | None = None,
        needs: frozenset[str] = frozenset(),
        *,
        prove: bool = True,
    ) -> Float[Tensor, "prompt target"]:
        """Return the loss of every token of the prompts under hooks.

        Args:
            consumer: is given every layer of the same passes as a `LayerCapture`.
            needs: as `Measure.needs`, of the consumer.
            prove: as in `capturing`.
        """
        if consumer is None:
            return token_losses(self.session, self.tokens, hooks)
        with capturing(self.session, consumer, needs=needs, prove=prove, **self.where):
            return token_losses(self.session, self.tokens, hooks)

    def capture(self, consumer: Consumer, needs: frozenset[str] = frozenset(), rows: Any = None) -> None:
        """Give the consumer every chosen layer of every prompt (or of other rows of token ids), one pass a prompt."""
        for number, row in enumerate(self.rows if rows is None else rows):

            def numbered(layer: Any, number: int = number) -> None:
                layer.prompt = number
                consumer(layer)

            run_capture(self.session, row[None], numbered, needs=needs, **self.where)

    def sums(self) -> Sums:
        """Return empty sums over prompts for variables of this measure."""
        return Sums(self.measure.variables, self.measure.labels())

    def grid(
        self, cell: Callable[..., Mapping[Any, Any]], *, pure: bool = False, **labels: Sequence[Any]
    ) -> xr.Dataset:
        """Return `cell(**{dim: label})` at all combinations of labels, as variables with these dims in front.

        Args:
            cell: returns, by variable, a DataArray, or an array of the declared dims of the variable less those of
                `labels`.
            pure: whether a cell depends on its labels alone and leaves nothing else behind: one that was finished
                before a stop is then not made again.
            labels: dim -> its labels.
        """

        def measured(at: Mapping[str, Any]) -> xr.Dataset:
            arrays = {}
            for name, value in cell(**at).items():
                dims = tuple(dim for dim in self.measure.variables[name].dims if dim not in labels)
                arrays[name] = value if isinstance(value, xr.DataArray) else xr.DataArray(np.asarray(value), dims=dims)
            return xr.Dataset(arrays)

        values: dict[str, np.ndarray] = {}
        dims: dict[str, tuple] = {}
        coords: dict[str, Any] = {dim: list(dim_labels) for dim, dim_labels in labels.items()}
        for place in product(*(range(len(dim_labels)) for dim_labels in labels.values())):
            at = {dim: dim_labels[number] for (dim, dim_labels), number in zip(labels.items(), place, strict=True)}
            dataset = self.keep(at, partial(measured, at)) if pure and self.keep is not None else measured(at)
            coords |= {str(dim): coord.values for dim, coord in dataset.coords.items()}
            for name, array in dataset.data_vars.items():
                if name not in values:
                    kind: Any = object if array.dtype.kind in "OU" else float
                    shape = (*map(len, labels.values()), *array.shape)
                    values[str(name)], dims[str(name)] = np.full(shape, np.nan, dtype=kind), array.dims
                values[str(name)][place] = array.values
        data = {name: ((*labels, *dims[name]), array) for name, array in values.items()}
        used = {dim for all_dims, _ in data.values() for dim in all_dims}
        all_labels = {**LABELS, **self.measure.labels(), **coords}
        return xr.Dataset(data, {dim: np.asarray(dim_labels) for dim, dim_labels in all_labels.items() if dim in used})


# Examples of heads


def pick_heads(values: pd.Series, n: int, why: tuple[str, str], *, chosen: bool) -> list[_Pick]:
    """Return (layer, head, why) of the n heads with the highest values, and of the n with the lowest; all where the
    user has chosen a few heads. Of equal values the first in the order of `values` are the highest."""
    ranked = values.dropna().sort_values(ascending=False, kind="stable")
    heads = [(int(layer), int(head)) for layer, head in ranked.index.to_list()]
    if chosen and len(heads) <= MOST_CHOSEN:
        return [(*head, "chosen") for head in heads]
    n = max(1, min(n, len(heads) // 2))
    highest = [(*head, why[0]) for head in heads[:n]]
    return highest + [(*head, why[1]) for head in heads[-n:] if head not in heads[:n]]


def head_examples(
    run: Run,
    row: Int[Tensor, " pos"],
    n: int,
    picks: Sequence[_Pick],
    of_layer: Callable[[LayerCapture], Mapping[str, Tensor]],
) -> xr.Dataset:
    """Return the picked heads of one prompt along "example", with layer, head and why, and the texts of its first n
    tokens along "key".

    Args:
        of_layer: from a captured layer to arrays [head, *dims of the variable, "example" left out] by name.
    """
    by_head: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    chosen = {(layer, head) for layer, head, _ in picks}

    def keep(layer: LayerCapture) -> None:
        arrays = {name: array.cpu().numpy() for name, array in of_layer(layer).items()}
        for place, head in enumerate(layer.heads):
            if (layer.layer, head) in chosen:
                by_head[layer.layer, head] = {name: array[place].copy() for name, array in arrays.items()}

    if picks:
        run_capture(run.session, row[None], keep, heads=[*chosen])
    return examples_of(run.measure, picks, by_head, n).assign_coords(token=("key", run.texts(row[:n])))


def examples_of(
    measure: "Measure", picks: Sequence[_Pick], arrays: Mapping[tuple[int, int], Mapping[str, Any]], n: int
) -> xr.Dataset:
    """Return arrays by (layer, head) and name, of n tokens, of the picked heads along "example", with layer, head and
    why."""
    labels: dict[str, Any] = {**LABELS, **measure.labels()}
    data = {}
    for name, variable in measure.variables.items():
        if "example" in variable.dims:
            inner = tuple(dim for dim in variable.dims if dim != "example")
            empty = np.zeros((0, *(len(labels.get(dim, range(n))) for dim in inner)))
            values = np.stack([arrays[layer, head][name] for layer, head, _ in picks]) if picks else empty
            data[name] = (("example", *inner), values)
    used = {dim for dims, _ in data.values() for dim in dims}
    coords: dict[str, Any] = {dim: list(dim_labels) for dim, dim_labels in labels.items() if dim in used}
    coords["example"] = np.arange(len(picks))
    coords |= {name: ("example", [pick[at] for pick in picks]) for at, name in enumerate(("layer", "head", "why"))}
    return xr.Dataset(data, coords)
