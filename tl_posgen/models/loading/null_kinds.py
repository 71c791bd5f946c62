"""Kinds of null models: a row each, which holds all that anything else asks of a kind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tl_posgen.errors import check_seed
from tl_posgen.models.conversion.hugging_face import silenced
from tl_posgen.models.loading.random_init import drawn_like
from tl_posgen.models.loading.shuffle import shuffle
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of

RANDOM_INIT, SHUFFLED = "random init", "shuffled"  # those that are made unless the caller says otherwise


@dataclass(frozen=True)
class NullKind:
    """A kind of null model.

    Attributes:
        name: behind a number, as in "(random init 0.35, shuffled 0.41)".
        field: of its values in summary.json.
        title: of one model, with its seed: "shuffled weights (seed 0)".
        description: what brackets hold, in a sentence of a page.
        draw: (session of the model, seed, device of draws) -> a model with drawn weights; None for a kind that has the
            trained ones in another order.
        reorder: (model, seed, undo=) puts the parameters of the model itself in random order, and back; None for a kind
            whose weights are drawn.
        rule: how weights that are reordered came to be, in provenance; a draw says so itself.
        usual: which measures are repeated on it where the caller gives a number of null models: all, those that share
            a single pass, or none.
        colour, dash, symbol: in figures, the symbol of points.
    """

    name: str
    field: str
    title: str
    description: str
    usual: Literal["all", "single pass", "none"]
    colour: str
    dash: str
    symbol: str
    draw: Callable[[Session, int, str], Model] | None = None
    reorder: Callable[..., None] | None = None
    rule: str = ""

    def label(self, seed: int) -> str:
        """Return the label along the dim init: a random init's seed, or "shuffled 0"."""
        return str(seed) if self.name == RANDOM_INIT else f"{self.name} {seed}"

    def make(self, session: Session, seed: int, device: str = "cpu") -> Model:
        """Return a null model of this kind beside the model, without hooks; the global random state stays as it was."""
        if self.draw is not None:
            return self.draw(session, seed, device)
        assert self.reorder is not None
        with silenced(seed=0):
            null = session.backend.copy(session.origin)
        self.reorder(null, check_seed(seed))
        session_of(null).remember_origin(replace(session.origin, seed=seed, initialisation=self.rule), proved=True)
        return null


_ROWS = (
    NullKind(
        name=RANDOM_INIT,
        field="inits",
        title="random init",
        description="for a randomly initialised model of the same shape (random init)",
        usual="all",
        colour="#9ca3af",
        dash="dash",
        symbol="circle-open",
        draw=drawn_like,
    ),
    NullKind(
        name=SHUFFLED,
        field="shuffled",
        title="shuffled weights",
        description="for the trained weights with the entries of every parameter in random order (shuffled)",
        usual="single pass",
        colour="#d8b88a",
        dash="dot",
        symbol="x-thin-open",
        reorder=shuffle,
        rule="trained, entries of every parameter permuted",
    ),
    NullKind(
        name="shuffled matrices",
        field="shuffled_matrices",
        title="shuffled matrices",
        description="for the trained weights with the entries of every matrix in random order, biases and gains of "
        "norms as they were trained (shuffled matrices)",
        usual="none",
        colour="#a8c5a0",
        dash="dashdot",
        symbol="triangle-up-open",
        reorder=partial(shuffle, vectors=False),
        rule="trained, entries of every weight matrix permuted",
    ),
)
NULL_KINDS: Mapping[str, NullKind] = {kind.name: kind for kind in _ROWS}  # in the order in which they are told


def shuffled_like(model: Model | Session, seed: int, kind: str = SHUFFLED) -> Model:
    """w -> the entries of w in random order, for every parameter w: trained values without trained structure.

    What a measure keeps here, it owes to the sizes of the parameters; what it loses, to their arrangement. Entries of a
    matrix move within the whole matrix: the queries of all heads of a layer are one matrix (so are keys, and values),
    so they change heads, and embeddings are matrices too. Entries of a vector, a bias or the gains of a norm, move
    within the vector; of queries, keys and values, within each head (each group of heads that share keys). The shuffle
    is ours.

    Of the kind "shuffled matrices" biases and gains stay as they were trained. That is no null of models whose position
    is in the biases of queries and keys (Qwen2.5), or in the gains of their norms (Gemma 3): it keeps what was learned
    there. Matrices are in the same order in both kinds, for one seed.

    A new model of the same kind comes back, without hooks; the weights are those that `model` has in memory. Which
    permutation a seed gives depends on how the backend lays out its parameters, so a HookedTransformer and a
    TransformerBridge of one model have two draws of the same null. The global random state is left as it was.

    Args:
        kind: "shuffled" or "shuffled matrices".

    Raises:
        InputError: a TransformerBridge whose weights no longer have the architecture's names and shapes.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> null = shuffled_like(model, seed=0)
        >>> gains, shuffled = (m.blocks[0].ln1.w for m in (model, null))
        >>> torch.equal(gains, shuffled), torch.equal(gains.sort().values, shuffled.sort().values)
        (False, True)
    """
    return NULL_KINDS[kind].make(session_of(model), seed)


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
