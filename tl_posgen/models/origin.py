"""Where a model came from: for provenance, and to make its random twin."""

from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from tl_posgen.models.backend import Backend, Model, backend_of


@dataclass(frozen=True)
class Origin:
    """Where a model came from.

    Attributes:
        name: as the user gave it (a Hub name, a directory, "mini"), or cfg.model_name.
        backend: which object it became.
        revision: commit of the Hub repository, or None.
        directory: where config, weights and tokenizer were read, or None for a model that was not made by `load_model`.
        seed: of a model with random weights, else None.
        initialisation: rule that made the random weights, else None.
        trust_remote_code: whether code from the repository was allowed.
    """

    name: str
    backend: Backend
    revision: str | None = None
    directory: Path | None = None
    seed: int | None = None
    initialisation: str | None = None
    trust_remote_code: bool = False


_origins: WeakKeyDictionary[Model, Origin] = WeakKeyDictionary()


def remember_origin(model: Model, origin: Origin) -> None:
    _origins[model] = origin


def origin_of(model: Model) -> Origin:
    """Where `model` came from; for one that this package did not make, what its cfg says."""
    if model in _origins:
        return _origins[model]
    return Origin(str(model.cfg.model_name), backend_of(model))
