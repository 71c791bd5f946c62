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
        self.steps = steps_of(self.names)
        directory = Path(checkpoints[-1]).resolve().parent
        self.label = model or (directory.parent.name if directory.name == "checkpoints" else directory.name)
        if model is not None:
            options = (backend, dtype, device)
            self.models = [Pretrained(model, *options, str(checkpoint), tokenizer) for checkpoint in checkpoints]
            return
        for checkpoint in checkpoints:
            if not any(Path(checkpoint).expanduser().glob("*.safetensors")):
                remedy = "give directories that save_pretrained wrote (safetensors)"
                raise InputError(f"{checkpoint}: not a checkpoint; {remedy}")
        tokenizer = checkpoints[-1] if tokenizer is None else tokenizer
        self.models = [
            Pretrained(checkpoint, backend, dtype, device, tokenizer=tokenizer) for checkpoint in checkpoints
        ]


def steps_of(names: Sequence[str]) -> np.ndarray:
    """Return the last number in every name, or the place in the sequence where one has none or they do not rise."""
    numbers = [re.findall(r"\d+", name) for name in names]
    if not all(numbers):
        return np.arange(len(names))
    steps = np.array([int(numerals[-1]) for numerals in numbers])
    if len(steps) > 1 and (np.diff(steps) < 0).all():
        raise InputError(f"checkpoints: steps fall, {', '.join(names)}; give them in order of training")
    return steps if (np.diff(steps) > 0).all() else np.arange(len(names))
