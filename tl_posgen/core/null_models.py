"""Null models of one model, a kind and a seed each, built when they are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from tl_posgen.core.measure import Measure
from tl_posgen.core.options import Whole, fits
from tl_posgen.errors import MOST_SEEDS, InputError
from tl_posgen.models.geometry.differences import first_difference
from tl_posgen.models.geometry.probe import ProbedOrReason
from tl_posgen.models.loading.null_kinds import NULL_KINDS, RANDOM_INIT, kind_and_seed, null_label
from tl_posgen.models.loading.random_init import check_draws_on
from tl_posgen.models.memory import release
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import SAME_WEIGHTS, fingerprint
from tl_posgen.models.session import Session, session_of

Nulls: TypeAlias = int | Mapping[str, Sequence[int]]  # how many random inits, or seeds by kind: see `NullModels`
_MOST = 10_000  # random inits


class NullModels(Sequence[str]):
    """Sequence of the labels that null models have along `init`; each model is built when it is needed.

    Those made of the trained weights come first, as a random init may take the memory of these.

    Args:
        nulls: a number n: n random inits, labelled "0", "1", .., on which everything is repeated, and beside them one
            model of shuffled weights, "shuffled 0", for measures that share a single pass: it predicts nothing that an
            intervention could take away. 0: none. Or seeds by kind, `{"random init": (0, 1), "shuffled": (3,)}`: these
            kinds alone, everything repeated on each.
        device: on which random inits are drawn, see `random_like`.

    Example:
        >>> from tl_posgen.models.loading.load import load_model
        >>> nulls = NullModels(load_model("mini"))
        >>> list(nulls), [label for label, _ in nulls.models()]
        (['shuffled 0', '0'], ['shuffled weights (seed 0)', 'random init (seed 0)'])
    """

    def __init__(self, model: Model | Session, nulls: Nulls = 1, device: str = "cpu"):
        self.session, self.device = session_of(model), check_draws_on(device)
        self.nulls, self.by_kind = nulls, seeds_by_kind(nulls)
        first = sorted(self.by_kind, key=lambda kind: NULL_KINDS[kind].reorder is None)
        self.labels = [NULL_KINDS[kind].label(seed) for kind in first for seed in self.by_kind[kind]]
        self._fingerprint = ""
        self._layers: Sequence[ProbedOrReason] = ()
        self._held: tuple[str, str, Session] | None = None  # the last one that was built
        self._undo: Callable[[], None] | None = None  # puts the model's own parameters back into their order

    def with_inits(self, least: int) -> "NullModels":
        """Return null models with so many random inits at least, of the smallest other seeds; these, where there are as
        many, or none at all.

        Example:
            >>> from tl_posgen.models.loading.load import load_model
            >>> nulls = NullModels(load_model("mini"), {"shuffled": [0], "random init": [1]})
            >>> list(nulls.with_inits(3)), nulls.with_inits(1) is nulls
            (['shuffled 0', '1', '0', '2'], True)
        """
        seeds = self.by_kind.get(RANDOM_INIT, [])
        if not seeds or len(seeds) >= least:
            return self
        wider = [*seeds, *(seed for seed in range(least) if seed not in seeds)][:least]
        nulls = {**self.nulls, RANDOM_INIT: wider} if isinstance(self.nulls, Mapping) else least
        return NullModels(self.session, nulls, self.device)

    def seeds_for(self, measure: Measure) -> dict[str, list[int]]:
        """Return the seeds of those on which a measure is repeated, by kind."""
        return {
            kind: seeds
            for kind, seeds in self.by_kind.items()
            if measure.has_null
            and (isinstance(self.nulls, Mapping) or not measure.runs_model or NULL_KINDS[kind].usual == "all")
        }

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
                        f"give another seed, or leave {kind.name} out of nulls"
                    )
                title += SAME_WEIGHTS
            if difference := first_difference(self._layers, session.layers()):
                raise InputError(
                    f"{title} of {self.session.label} is no null model of it: its {difference}. Null models are made "
                    "of the model's config, which does not say what was changed in the model; change it there too, or "
                    f"leave {kind.name} out of nulls, or all with nulls=0"
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


def null_models_of(model: Session, nulls: Nulls | NullModels, device: str = "cpu") -> NullModels:
    """Return these null models; those given where they are of this model, and not of its weights on another backend,
    say."""
    if not isinstance(nulls, NullModels):
        return NullModels(model, nulls, device)
    return nulls if nulls.session.model is model.model else NullModels(model, nulls.nulls, nulls.device)


def seeds_by_kind(nulls: Nulls) -> dict[str, list[int]]:
    """Return the seeds of null models by kind, of those kinds that have any; InputError for a kind that there is not,
    or anything else than a number or sequences of different integers by kind.

    Example:
        >>> seeds_by_kind(2), seeds_by_kind(0), seeds_by_kind({"shuffled matrices": (2,)})
        ({'random init': [0, 1], 'shuffled': [0]}, {}, {'shuffled matrices': [2]})
    """
    if not isinstance(nulls, Mapping):
        if not (isinstance(nulls, bool) or fits(nulls, Whole)) or nulls > _MOST:
            raise InputError(
                f"nulls={nulls!r}: give how many random inits (at most {_MOST:,}), 0 for no null model; or seeds by "
                "kind, such as {'random init': (0, 1), 'shuffled': (0,)}"
            )
        of_kinds = {"all": [*range(nulls)], "single pass": [0] if nulls else []}
        return {kind.name: seeds for kind in NULL_KINDS.values() if (seeds := of_kinds.get(kind.usual))}
    if unknown := [kind for kind in nulls if kind not in NULL_KINDS]:
        raise InputError(f"nulls: no kind of null model {unknown[0]!r}; there are {', '.join(NULL_KINDS)}")
    for kind, seeds in nulls.items():
        if not fits(seeds, Sequence[int]) or not all(0 <= seed < MOST_SEEDS for seed in seeds):
            raise InputError(f"nulls: {kind} has {seeds!r}; give whole numbers below 2^32, such as (0,) or (0, 1, 2)")
        if len(set(seeds)) < len(seeds):
            raise InputError(f"nulls: {kind} has {list(seeds)}; each seed may stand only once")
    return {kind: [int(seed) for seed in nulls[kind]] for kind in NULL_KINDS if len(nulls.get(kind, ()))}
