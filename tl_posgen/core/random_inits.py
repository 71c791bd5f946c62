"""Random inits: randomly initialised models of one model's shape, a seed each, built when they are needed."""

from collections.abc import Iterator, Sequence
from typing import Any

from tl_posgen.core.options import fits
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.weights import release
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import SAME_WEIGHTS, fingerprint, null_label
from tl_posgen.models.wrapped import WrappedModel, wrap


class RandomInits(Sequence[int]):
    """Randomly initialised models of one model's shape: a sequence of seeds, each model built when it is needed.

    Example:
        >>> from tl_posgen.models.loading.load import load_model
        >>> random_inits = RandomInits(load_model("mini"), [0])
        >>> [(label, model.cfg.n_layers) for label, model in random_inits.models()]
        [('random init (seed 0)', 4)]
    """

    def __init__(self, model: Model | WrappedModel, seeds: Sequence[int]):
        self.wrapped, self.seeds = wrap(model), check_seeds(seeds)
        self._fingerprint = ""
        self._held: tuple[int, str, WrappedModel] | None = None  # the last one that was built

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: Any) -> Any:
        return self.seeds[index]

    def models(self, *, in_place: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield (label, model) of every seed, each in the place of the one before: use it before the next is asked for.
        The label says where it has the very weights of the model.

        Args:
            in_place: in the place of the model itself, which is of no use afterwards. Only for one that is ours.
        """
        for seed in self.seeds:
            label, wrapped = self.build(seed, in_place=in_place)
            yield label, wrapped.model

    def build(self, seed: int, *, in_place: bool = False) -> tuple[str, WrappedModel]:
        """Return (label, wrapped model) of one seed, as `models` yields it."""
        if self._held is None or self._held[0] != seed:
            if not self._fingerprint:
                self._fingerprint = fingerprint(self.wrapped)
            self.let_go()
            if in_place:
                release(self.wrapped.model)
            made = wrap(random_like(self.wrapped, seed))
            same = fingerprint(made) == self._fingerprint
            self._held = seed, f"{null_label(seed)}{SAME_WEIGHTS if same else ''}", made
        return self._held[1:]

    def let_go(self) -> None:
        """Give the memory of the last one back."""
        if self._held is not None:
            release(self._held[2].model)
            self._held = None


def random_inits_of(model: WrappedModel, seeds: Sequence[int]) -> RandomInits:
    """Return random inits of these seeds; those given where they are of this model, and not of its weights on another
    backend, say."""
    if isinstance(seeds, RandomInits) and seeds.wrapped.model is model.model:
        return seeds
    return RandomInits(model, [*seeds])


MOST = 2**32  # torch generators read 32 bits of a seed: larger ones would share their draws


def check_seeds(seeds: Any) -> list[int]:
    """Return seeds as a list; InputError for anything else than a sequence of different integers."""
    if not fits(seeds, Sequence[int]) or not all(0 <= seed < MOST for seed in seeds):
        raise InputError(
            f"null_seeds={seeds!r}: give whole numbers below 2^32, such as (0,) or (0, 1, 2), or () for no random init"
        )
    if len(set(seeds)) < len(seeds):
        raise InputError(f"null_seeds={list(seeds)}: each seed may stand only once")
    return [int(seed) for seed in seeds]


def check_seed(seed: Any) -> int:
    """Return a seed of draws; InputError for anything else than a whole number, 0 to 2^32 - 1."""
    if not fits(seed, int) or not 0 <= seed < MOST:
        raise InputError(f"seed = {seed!r}: give a whole number, 0 or more, below 2^32")
    return int(seed)
