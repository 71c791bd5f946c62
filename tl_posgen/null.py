"""A measure beside its null: the same on randomly initialised models of the same shape, one a seed."""

from collections.abc import Iterator, Sequence
from typing import Any

from tl_posgen.errors import InputError
from tl_posgen.measure import fits
from tl_posgen.models.provenance import SAME_WEIGHTS, fingerprint, null_label
from tl_posgen.models.random_like import random_like


class RandomInits(Sequence[int]):
    """The randomly initialised models of one model's shape: a sequence of seeds, each model built once, when needed.

    Example:
        >>> from tl_posgen.models.load import load_model
        >>> random_inits = RandomInits(load_model("mini"), [0])
        >>> [(label, model.cfg.n_layers) for label, model in random_inits.models()]
        [('random init (seed 0)', 4)]
    """

    def __init__(self, model: Any, seeds: Sequence[int]):
        self.model, self.seeds = model, check_seeds(seeds)
        self._built: dict[int, tuple[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: Any) -> Any:
        return self.seeds[index]

    def models(self) -> Iterator[tuple[str, Any]]:
        """(label, model) of every seed; the label says where it has the very weights of the model."""
        for seed in self.seeds:
            if seed not in self._built:
                made = random_like(self.model, seed)
                same = fingerprint(made) == fingerprint(self.model)
                self._built[seed] = f"{null_label(seed)}{SAME_WEIGHTS if same else ''}", made
            yield self._built[seed]

    def of(self, model: Any) -> "RandomInits":
        """These, or for another model (the same weights on another backend, say) ones of its own."""
        return self if model is self.model else RandomInits(model, self.seeds)


def random_inits_of(model: Any, seeds: Sequence[int]) -> RandomInits:
    """Random inits of these seeds, or those given where they are already built."""
    return seeds.of(model) if isinstance(seeds, RandomInits) else RandomInits(model, seeds)


MOST = 2**63  # what a torch generator takes


def check_seeds(seeds: Any) -> list[int]:
    """Seeds as a list; InputError for anything else than a sequence of different integers."""
    if not fits(seeds, Sequence[int]) or not all(0 <= seed < MOST for seed in seeds):
        raise InputError(
            f"null_seeds={seeds!r}: give whole numbers, 0 or more, such as (0,) or (0, 1, 2), or () for no random init"
        )
    if len(set(seeds)) < len(seeds):
        raise InputError(f"null_seeds={list(seeds)}: each seed may stand only once")
    return [int(seed) for seed in seeds]


def check_seed(seed: Any) -> int:
    """A seed of draws; InputError for anything else than a whole number, 0 or more."""
    if not fits(seed, int) or not 0 <= seed < MOST:
        raise InputError(f"seed = {seed!r}: give a whole number, 0 or more")
    return int(seed)
