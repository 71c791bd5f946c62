"""Checkpoints of one training run: their names and steps, and one model of them at a time."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tl_posgen.errors import InputError
from tl_posgen.models.load import BackendChoice, load_model, load_source
from tl_posgen.models.model import Model
from tl_posgen.models.source import MINI, Source


class Checkpoints:
    """A sequence of checkpoints, checked before anything is loaded.

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia).
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's.

    Attributes:
        names: last parts of the directories, or the revisions. steps: see `steps_of`.
        label: the model's name, where its checkpoints lie in <name>/ or <name>/checkpoints/.

    Raises:
        InputError: no checkpoints, two of one name, or a directory without weights.
    """

    def __init__(
        self,
        checkpoints: Sequence[str | os.PathLike],
        model: str | None = None,
        tokenizer: str | os.PathLike | None = None,
        backend: BackendChoice | str = "auto",
    ):
        if isinstance(checkpoints, str | os.PathLike):
            raise InputError(f"checkpoints={str(checkpoints)!r}: give a list of them, in order of training")
        if not checkpoints:
            raise InputError("checkpoints: give one at least, in order of training")
        self.names = [Path(checkpoint).name for checkpoint in checkpoints]
        if len(set(self.names)) < len(self.names):
            raise InputError(f"checkpoints: two have one name: {', '.join(self.names)}")
        if model is None:
            for checkpoint in checkpoints:
                require_weights(Path(checkpoint).expanduser())
        self.steps = steps_of(self.names)
        directory = Path(checkpoints[-1]).resolve().parent
        self.label = model or (directory.parent.name if directory.name == "checkpoints" else directory.name)
        self._checkpoints, self._model, self._backend = list(checkpoints), model, backend
        self._tokenizer = tokenizer if tokenizer is not None else checkpoints[-1]

    def __len__(self) -> int:
        return len(self.names)

    def load(self, place: int) -> Model:
        checkpoint = self._checkpoints[place]
        if self._model is not None:
            return load_model(self._model, self._backend, revision=str(checkpoint))
        return load_checkpoint(checkpoint, self._tokenizer, self._backend)


def load_checkpoint(directory: str | os.PathLike, tokenizer: str | os.PathLike, backend: BackendChoice | str) -> Model:
    """A checkpoint that may lack a tokenizer of its own."""
    path, words = Path(directory).expanduser(), MINI if str(tokenizer) == "mini" else Path(tokenizer).expanduser()
    require_weights(path)
    if not any(words.glob("tokenizer*")):
        raise InputError(f"{words}: no tokenizer there; give tokenizer=, the directory of the checkpoints' tokenizer")
    if path.resolve() == words.resolve():
        return load_model(path, backend)
    return load_source(Source(path.name, path), words, backend)


def require_weights(directory: Path) -> None:
    if not directory.is_dir() or not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory}: not a checkpoint; give directories that save_pretrained wrote (safetensors)")


def steps_of(names: Sequence[str]) -> np.ndarray:
    """The last number in every name, or the place in the sequence where one has none or they do not rise."""
    numbers = [re.findall(r"\d+", name) for name in names]
    steps = np.array([int(found[-1]) if found else -1 for found in numbers])
    rising = (steps >= 0).all() and (np.diff(steps) > 0).all()
    return steps if rising else np.arange(len(names))
