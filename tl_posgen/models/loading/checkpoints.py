"""Checkpoints of one training run: their names and steps."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained


class Checkpoints:
    """Sequence of checkpoints, checked before anything is loaded.

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia).
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's, of revisions the repository's.
        backend, dtype, device: as in `load_model`.

    Attributes:
        names: last parts of the directories, or the revisions. steps: see `steps_of`.
        label: the model's name, where its checkpoints lie in <name>/ or <name>/checkpoints/.
        models: the model of each, to be loaded where it is measured.

    Raises:
        InputError: no checkpoints, two of one name, steps that fall, or a directory without weights.
    """

    def __init__(
        self,
        checkpoints: Sequence[str | os.PathLike],
        model: str | None = None,
        tokenizer: str | os.PathLike | None = None,
        backend: BackendChoice | str = "auto",
        dtype: Dtype = "auto",
        device: str | None = None,
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
                _require_weights(Path(checkpoint).expanduser())
        self.steps = steps_of(self.names)
        directory = Path(checkpoints[-1]).resolve().parent
        self.label = model or (directory.parent.name if directory.name == "checkpoints" else directory.name)
        if model is None and tokenizer is None:
            tokenizer = checkpoints[-1]
        how = (backend, dtype, device)
        self.models = [
            Pretrained(one, *how, tokenizer=tokenizer)
            if model is None
            else Pretrained(model, *how, str(one), tokenizer)
            for one in checkpoints
        ]


def _require_weights(directory: Path) -> None:
    if not directory.is_dir() or not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory}: not a checkpoint; give directories that save_pretrained wrote (safetensors)")


def steps_of(names: Sequence[str]) -> np.ndarray:
    """Return the last number in every name, or the place in the sequence where one has none or they do not rise."""
    numbers = [re.findall(r"\d+", name) for name in names]
    steps = np.array([int(found[-1]) if found else -1 for found in numbers])
    rising = (steps >= 0).all() and (np.diff(steps) > 0).all()
    if (steps >= 0).all() and (np.diff(steps) < 0).all() and len(steps) > 1:
        raise InputError(f"checkpoints: steps fall, {', '.join(names)}; give them in order of training")
    return steps if rising else np.arange(len(names))
