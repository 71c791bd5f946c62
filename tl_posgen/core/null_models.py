"""Null models of one model: random inits and shuffled weights, a seed each, built when they are needed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tl_posgen.core.options import fits
from tl_posgen.errors import MOST_SEEDS, InputError
from tl_posgen.models.loading.nulls import NULL_KINDS, check_draws_on, kind_of, null_label, shuffle
from tl_posgen.models.memory import release
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import SAME_WEIGHTS, fingerprint
from tl_posgen.models.session import Session, session_of


class NullModels(Sequence[str]):
    """Sequence of the labels that null models have along `init`; each model is built when it is needed.

    Those of shuffled weights come first, as they are made of the trained weights, whose memory the random inits may
    take.

    Args:
        seeds: of random inits, labelled "0", "1", ..
        shuffled: seeds of shuffled weights, labelled "shuffled 0", ..; None for one beside random inits, for what a
            single pass gives.
        device: on which random inits are drawn, see `random_like`.

    Example:
        >>> from tl_posgen.models.loading.load import load_model
        >>> nulls = NullModels(load_model("mini"), [0], [0])
        >>> list(nulls), [label for label, _ in nulls.models()]
        (['shuffled 0', '0'], ['shuffled weights (seed 0)', 'random init (seed 0)'])
    """

    def __init__(self, model: Model | Session, seeds: Any, shuffled: Sequence[int] | None = (), device: str = "cpu"):
        self.session, self.device = session_of(model), check_draws_on(device)
        given = seeds if isinstance(seeds, Mapping) else {"random init": seeds}
        self.by_kind = {kind: check_seeds(some, NULL_KINDS[kind].seeds) for kind, some in given.items()}
        self.for_runs = shuffled is not None  # whether measures that run the model have shuffled weights too
        usual = self.by_kind.get("random init", [])[:1] and (0,)
        self.by_kind.setdefault("shuffled", check_seeds(usual if shuffled is None else shuffled, "shuffled_seeds"))
        made = sorted(self.by_kind, key=lambda kind: not NULL_KINDS[kind].of_weights)
        self.labels = [NULL_KINDS[kind].label(seed) for kind in made for seed in self.by_kind[kind]]
        self._fingerprint = ""
        self._held: tuple[str, str, Session] | None = None  # the last one that was built
        self._shuffled_by: int | None = None  # seed by which the model's own weights are shuffled now

    @property
    def seeds(self) -> dict[str, list[int]]:
        """Their seeds, as provenance names them."""
        return {NULL_KINDS[kind].seeds: seeds for kind, seeds in self.by_kind.items()}

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

    def build(self, label: str, *, in_place: bool = False) -> tuple[str, Session]:
        """Return (title, session) of one label, as `models` yields it; InputError where a null that is made of the
        model's weights has the very same ones."""
        if self._held is None or self._held[0] != label:
            self.free_memory()
            (kind, seed), title = kind_of(label), null_label(label)
            self._fingerprint = self._fingerprint or fingerprint(self.session)  # while the model has its own weights
            if self._shuffled_by is not None and kind.of_weights:
                shuffle(self.session.model, self._shuffled_by, undo=True)
                self._shuffled_by = None
            if kind.name == "shuffled" and in_place:
                shuffle(self.session.model, seed)
                self._shuffled_by, made = seed, self.session
            else:
                if in_place and not kind.of_weights:
                    release(self.session.model)
                made = session_of(kind.make(self.session, seed, self.device))
            if fingerprint(made) == self._fingerprint:
                if kind.of_weights:
                    raise InputError(f"{title} changes no weight of this model, so it is no null; give another seed")
                title += SAME_WEIGHTS
            self._held = label, title, made
        return self._held[1:]

    def free_memory(self) -> None:
        """Give the memory of the last one back."""
        if self._held is not None and self._held[2].model is not self.session.model:
            release(self._held[2].model)
        self._held = None


def null_models_of(
    model: Session, seeds: Sequence[int] | NullModels, shuffled: Sequence[int] | None, device: str = "cpu"
) -> NullModels:
    """Return null models of these seeds; those given where they are of this model, and not of its weights on another
    backend, say."""
    if not isinstance(seeds, NullModels):
        return NullModels(model, seeds, shuffled, device)
    if seeds.session.model is model.model:
        return seeds
    some = {kind: one for kind, one in seeds.by_kind.items() if seeds.for_runs or kind != "shuffled"}
    return NullModels(model, some, () if seeds.for_runs else None, seeds.device)


def check_seeds(seeds: Any, name: str = "null_seeds") -> list[int]:
    """Return seeds as a list; InputError for anything else than a sequence of different integers."""
    if not fits(seeds, Sequence[int]) or not all(0 <= seed < MOST_SEEDS for seed in seeds):
        raise InputError(f"{name}={seeds!r}: give whole numbers below 2^32, such as (0,) or (0, 1, 2), or () for none")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{name}={list(seeds)}: each seed may stand only once")
    return [int(seed) for seed in seeds]
