"""Kinds of null models: a row each, which holds all that anything else asks of a kind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tl_posgen.models.loading.random_init import drawn_like
from tl_posgen.models.loading.shuffle import shuffle, shuffled_like
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session

RANDOM_INIT, SHUFFLED = "random init", "shuffled"  # those that are made unless the caller says otherwise


@dataclass(frozen=True)
class NullKind:
    """A kind of null model.

    Attributes:
        name: behind a number, as in "(random init 0.35, shuffled 0.41)".
        field: of its values in summary.json.
        seeds: name of its seeds in a report's provenance.
        title: of one model, with its seed: "shuffled weights (seed 0)".
        description: what brackets hold, in a sentence of a page.
        make: (session of the model, seed, device of draws) -> the null model.
        reorder: (model, seed, undo=) puts the parameters of the model itself in random order, and back; None for a kind
            whose weights are drawn.
        usual: which measures are repeated on it where the caller asks for none: all, those that share a single pass, or
            none.
        colour, dash, symbol: in figures, the symbol of points.
    """

    name: str
    field: str
    seeds: str
    title: str
    description: str
    make: Callable[[Session, int, str], Model]
    reorder: Callable[..., None] | None
    usual: Literal["all", "single pass", "none"]
    colour: str
    dash: str
    symbol: str

    def label(self, seed: int) -> str:
        """Return the label along the dim init: a random init's seed, or "shuffled 0"."""
        return str(seed) if self.name == RANDOM_INIT else f"{self.name} {seed}"


_ROWS = (
    NullKind(
        name=RANDOM_INIT,
        field="inits",
        seeds="null_seeds",
        title="random init",
        description="for a randomly initialised model of the same shape (random init)",
        make=drawn_like,
        reorder=None,
        usual="all",
        colour="#9ca3af",
        dash="dash",
        symbol="circle-open",
    ),
    NullKind(
        name=SHUFFLED,
        field="shuffled",
        seeds="shuffled_seeds",
        title="shuffled weights",
        description="for the trained weights with the entries of every parameter in random order (shuffled)",
        make=lambda session, seed, _device: shuffled_like(session, seed),
        reorder=shuffle,
        usual="single pass",
        colour="#d8b88a",
        dash="dot",
        symbol="x-thin-open",
    ),
    NullKind(
        name="shuffled matrices",
        field="shuffled_matrices",
        seeds="shuffled_matrices_seeds",
        title="shuffled matrices",
        description="for the trained weights with the entries of every matrix in random order, biases and gains of "
        "norms as they were trained (shuffled matrices)",
        make=lambda session, seed, _device: shuffled_like(session, seed, vectors=False),
        reorder=partial(shuffle, vectors=False),
        usual="none",
        colour="#a8c5a0",
        dash="dashdot",
        symbol="triangle-up-open",
    ),
)
NULL_KINDS: Mapping[str, NullKind] = {kind.name: kind for kind in _ROWS}  # in the order in which they are told


def kind_and_seed(label: Any) -> tuple[NullKind, int]:
    """Return the kind and the seed of a null model by its label along init.

    Example:
        >>> [(kind.name, seed) for kind, seed in map(kind_and_seed, ["3", "shuffled 0"])]
        [('random init', 3), ('shuffled', 0)]
    """
    name, _, seed = str(label).rpartition(" ")
    return NULL_KINDS[name or RANDOM_INIT], int(seed)


def null_label(label: Any) -> str:
    """Return the title of a null model by its label along init."""
    kind, seed = kind_and_seed(label)
    return f"{kind.title} (seed {seed})"


def in_order(labels: Iterable[str]) -> list[str]:
    """Return labels of null models by kind, as the table has them; those of one kind in their present order."""
    order = list(NULL_KINDS)
    return sorted(labels, key=lambda label: order.index(kind_and_seed(label)[0].name))
