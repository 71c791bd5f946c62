"""Null models of one model, a kind and a seed each, built when they are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from tl_posgen.core.options import fits
from tl_posgen.errors import MOST_SEEDS, InputError
from tl_posgen.models.geometry.differences import first_difference
from tl_posgen.models.geometry.probe import ProbedOrReason
from tl_posgen.models.loading.null_kinds import NULL_KINDS, RANDOM_INIT, SHUFFLED, kind_and_seed, null_label
from tl_posgen.models.loading.random_init import check_draws_on
from tl_posgen.models.memory import release
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import SAME_WEIGHTS, fingerprint
from tl_posgen.models.session import Session, session_of

Seeds: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]


class NullModels(Sequence[str]):
    """Sequence of the labels that null models have along `init`; each model is built when it is needed.

    Those made of the trained weights come first, as a random init may take the memory of these.

    Args:
        seeds: of random inits, labelled "0", "1", ..; or seeds by kind, `{"random init": (0,), "shuffled": (0,)}`, and
            then of these kinds alone.
        shuffled: seeds of shuffled weights, labelled "shuffled 0", ..; None for one beside random inits, for what a
            single pass gives.
        device: on which random inits are drawn, see `random_like`.

    Example:
        >>> from tl_posgen.models.loading.load import load_model
        >>> nulls = NullModels(load_model("mini"), [0], [0])
        >>> list(nulls), [label for label, _ in nulls.models()]
        (['shuffled 0', '0'], ['shuffled weights (seed 0)', 'random init (seed 0)'])
    """

    def __init__(self, model: Model | Session, seeds: Seeds, shuffled: Sequence[int] | None = (), device: str = "cpu"):
        if isinstance(seeds, Mapping) and not shuffled:  # its kinds alone
            shuffled = None
        self.session, self.device = session_of(model), check_draws_on(device)
        self.given, self.asked = (seeds, shuffled), seeds_by_kind(seeds, shuffled)
        adds_shuffled = shuffled is None and not isinstance(seeds, Mapping) and bool(self.asked[RANDOM_INIT])
        self.by_kind = {RANDOM_INIT: [], SHUFFLED: [0] if adds_shuffled else [], **self.asked}
        first = sorted(self.by_kind, key=lambda kind: NULL_KINDS[kind].reorder is None)
        self.labels = [NULL_KINDS[kind].label(seed) for kind in first for seed in self.by_kind[kind]]
        self._fingerprint = ""
        self._layers: Sequence[ProbedOrReason] = ()
        self._held: tuple[str, str, Session] | None = None  # the last one that was built
        self._undo: Callable[[], None] | None = None  # puts the model's own parameters back into their order

    @property
    def seeds(self) -> dict[str, list[int]]:
        """Their seeds, as provenance names them."""
        return {NULL_KINDS[kind].seeds: seeds for kind, seeds in self.by_kind.items()}

    def with_inits(self, least: int) -> "NullModels":
        """Return null models with so many random inits at least, of the smallest other seeds; these, where there are as
        many, or none at all.

        Example:
            >>> from tl_posgen.models.loading.load import load_model
            >>> nulls = NullModels(load_model("mini"), [1], [0])
            >>> list(nulls.with_inits(3)), nulls.with_inits(1) is nulls
            (['shuffled 0', '1', '0', '2'], True)
        """
        seeds = self.asked.get(RANDOM_INIT, [])
        if not seeds or len(seeds) >= least:
            return self
        wider = [*seeds, *(seed for seed in range(least) if seed not in seeds)][:least]
        given_seeds, shuffled = self.given
        by_kind = {**given_seeds, RANDOM_INIT: wider} if isinstance(given_seeds, Mapping) else wider
        return NullModels(self.session, by_kind, shuffled, self.device)

    def for_runs(self, label: str) -> bool:
        """Tell whether measures that run the model have this null model too: those that were asked for."""
        return kind_and_seed(label)[0].name in self.asked

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        return self.labels[index]

    def models(self, *, in_place: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield (title, model) of each, in the place of the one before: use it before the next is asked for. The title
        says where a random init has the very weights of the model.

        Args:
            in_place: in the place of the model itself, which is of no use afterwards. Only for one that is ours.
        """
        for label in self.labels:
            title, session = self.build(label, in_place=in_place)
            yield title, session.model

    def holds(self, label: str) -> bool:
        """Return whether this label was built last, and is there."""
        return self._held is not None and self._held[0] == label

    def build(self, label: str, *, in_place: bool = False) -> tuple[str, Session]:
        """Return (title, session) of one label, as `models` yields it.

        Raises:
            InputError: a null model of the trained weights that has them in the model's own order; one whose layers do
                something else with positions than the model's.
        """
        if not self.holds(label):
            self.free_memory()
            (kind, seed), title = kind_and_seed(label), null_label(label)
            self._remember_model()
            if self._undo is not None and kind.reorder is not None:
                self._undo()
                self._undo = None
            if kind.reorder is not None and in_place:
                kind.reorder(self.session.model, seed)
                self._undo, session = partial(kind.reorder, self.session.model, seed, undo=True), self.session
            else:
                if in_place:
                    release(self.session.model)
                session = session_of(kind.make(self.session, seed, self.device))
            if fingerprint(session) == self._fingerprint:
                if kind.reorder is not None:
                    raise InputError(
                        f"{title} of {self.session.label} has the model's own weights, so it is no null model of it; "
                        f"give another seed, or {kind.argument}=()"
                    )
                title += SAME_WEIGHTS
            if difference := first_difference(self._layers, session.layers()):
                raise InputError(
                    f"{title} of {self.session.label} is no null model of it: its {difference}. Null models are made "
                    "of the model's config, which does not say what was changed in the model; change it there too, or "
                    f"leave them out, {kind.argument}=()"
                )
            self._held = label, title, session
        assert self._held is not None
        return self._held[1:]

    def _remember_model(self) -> None:
        """Keep the model's fingerprint and geometry while it has its own weights."""
        if not self._fingerprint:
            self._fingerprint, self._layers = fingerprint(self.session), self.session.layers()

    def free_memory(self) -> None:
        """Give the memory of the last one back."""
        if self._held is not None and self._held[2].model is not self.session.model:
            release(self._held[2].model)
        self._held = None


def null_models_of(
    model: Session, seeds: Seeds | NullModels, shuffled: Sequence[int] | None, device: str = "cpu"
) -> NullModels:
    """Return null models of these seeds; those given where they are of this model, and not of its weights on another
    backend, say."""
    if not isinstance(seeds, NullModels):
        return NullModels(model, seeds, shuffled, device)
    return seeds if seeds.session.model is model.model else NullModels(model, *seeds.given, seeds.device)


def seeds_by_kind(seeds: Seeds, shuffled: Sequence[int] | None = None) -> dict[str, list[int]]:
    """Return the seeds that were asked for by kind of null model; InputError for a kind that there is not, anything
    else than a sequence of different integers, or shuffled weights asked for twice.

    Example:
        >>> seeds_by_kind((0, 1), None), seeds_by_kind({"shuffled matrices": [2]}, [0])
        ({'random init': [0, 1]}, {'shuffled matrices': [2], 'shuffled': [0]})
    """
    by_kind = dict(seeds) if isinstance(seeds, Mapping) else {RANDOM_INIT: seeds}
    if unknown := [kind for kind in by_kind if kind not in NULL_KINDS]:
        raise InputError(f"null_seeds: no kind of null model {unknown[0]!r}; there are {', '.join(NULL_KINDS)}")
    if shuffled is not None:
        if SHUFFLED in by_kind:
            raise InputError("null_seeds and shuffled_seeds both give seeds of shuffled weights; give one of them")
        by_kind[SHUFFLED] = shuffled
    return {kind: _check_seeds(of_kind, NULL_KINDS[kind].argument) for kind, of_kind in by_kind.items()}


def _check_seeds(seeds: Any, name: str = "null_seeds") -> list[int]:
    """Return seeds as a list; InputError for anything else than a sequence of different integers."""
    if not fits(seeds, Sequence[int]) or not all(0 <= seed < MOST_SEEDS for seed in seeds):
        raise InputError(f"{name}={seeds!r}: give whole numbers below 2^32, such as (0,) or (0, 1, 2), or () for none")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{name}={list(seeds)}: each seed may stand only once")
    return [int(seed) for seed in seeds]
