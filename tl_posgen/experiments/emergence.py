"""How the measures form during training: the same analysis over a sequence of checkpoints."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.base import Analyzer
from tl_posgen.analyzers.feed import measure
from tl_posgen.analyzers.registry import make_analyzers
from tl_posgen.errors import InputError
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.load import BackendChoice, build, default_device, load_hf_model, load_model, load_tokenizer
from tl_posgen.models.origin import Origin, remember_origin
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.quiet import quiet
from tl_posgen.models.random_like import random_like
from tl_posgen.models.source import MINI, require_finite
from tl_posgen.results import Result

PER_HEAD = ("layer", "head")


def emergence(
    checkpoints: Sequence[str | os.PathLike],
    prompts: Any,
    *,
    model: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    analyzers: Sequence[str] | None = None,
    length: int | None = 256,
    n_prompts: int | None = 4,
    backend: BackendChoice | str = "auto",
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    """Every per-head measure of `analyze`, and the loss, at every checkpoint.

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia). One model is held at a time.
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's.
        analyzers: names; those of `analyze` if left out.
        null_seed: of a randomly initialised model of the last checkpoint's shape; None skips it.

    Returns:
        A Result named "emergence". Over (checkpoint, layer, head): "<analyzer>_<measure>", such as three_axis_r. Over
        checkpoint: `loss` in nats per token, and `step`, the number in its name (its place where there is none).

    Raises:
        InputError: no checkpoints, two of one name, or prompts that cannot be used.
        ModelError: a checkpoint that cannot be loaded.

    Source: that the claims be followed through training is asked by readers of Han & Ji 2025; the procedure is ours.
    """
    if not checkpoints:
        raise InputError("emergence: give one checkpoint at least, in order of training")
    names = [Path(checkpoint).name for checkpoint in checkpoints]
    if len(set(names)) < len(names):
        raise InputError(f"emergence: two checkpoints have one name: {', '.join(names)}")
    words = tokenizer if tokenizer is not None else checkpoints[-1]

    def load(checkpoint: str | os.PathLike) -> Model:
        if model is not None:
            return load_model(model, backend, revision=str(checkpoint))
        return load_checkpoint(checkpoint, words, backend)

    last = load(checkpoints[-1])
    tokens = prompts_of_one_length(last, prompts, length, n_prompts)
    rows = []
    for checkpoint in tqdm(checkpoints, desc="emergence", unit="checkpoint", disable=not progress):
        rows.append(measured(load(checkpoint), tokens, make_analyzers(analyzers)))
    label = model or training_run(checkpoints[-1])
    dataset = xr.concat(rows, pd.Index(names, name="checkpoint"), combine_attrs="drop")
    assert isinstance(dataset, xr.Dataset)
    dataset["step"] = ("checkpoint", steps_of(names))
    dataset.attrs = {"rows": ("checkpoint", *PER_HEAD), "model": label}
    null = None
    if null_seed is not None:
        twin = random_like(last, null_seed)
        null = measured(twin, tokens, make_analyzers(analyzers)).expand_dims(checkpoint=[null_label(null_seed)])
        null.attrs = {"rows": ("checkpoint", *PER_HEAD), "model": null_label(null_seed)}
    provenance = provenance_of(last, list(tokens), null_seed) | {"checkpoints": names, "model": label}
    return Result("emergence", dataset, null, provenance)


def load_checkpoint(directory: str | os.PathLike, tokenizer: str | os.PathLike, backend: BackendChoice | str) -> Model:
    """A checkpoint that may lack a tokenizer of its own."""
    path, words = Path(directory).expanduser(), MINI if str(tokenizer) == "mini" else Path(tokenizer).expanduser()
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        raise InputError(f"{path}: not a checkpoint; give directories that save_pretrained wrote (safetensors)")
    if not any(words.glob("tokenizer*")):
        raise InputError(f"{words}: no tokenizer there; give tokenizer=, the directory of the checkpoints' tokenizer")
    if path.resolve() == words.resolve():
        return load_model(path, backend)
    require_finite(path)
    with quiet(), torch.random.fork_rng(devices=[]):
        loaded = load_hf_model(path, torch.float32, False)
        model = build(loaded, load_tokenizer(words, False), path.name, default_device(), backend)
    remember_origin(model, Origin(path.name, backend_of(model), directory=path))
    return model


def training_run(checkpoint: str | os.PathLike) -> str:
    """The model's name where its checkpoints lie in <name>/ or <name>/checkpoints/."""
    directory = Path(checkpoint).resolve().parent
    return directory.parent.name if directory.name == "checkpoints" else directory.name


def measured(model: Model, tokens: Int[Tensor, "prompt pos"], analyzers: Sequence[Analyzer]) -> xr.Dataset:
    """What every analyzer says of each head, under names of their own, and the loss."""
    found = measure(model, list(tokens), analyzers, progress=False)
    data = {
        f"{name}_{measure_name}": array.drop_vars(set(array.coords) - set(PER_HEAD))
        for name, dataset in found.items()
        for measure_name, array in dataset.data_vars.items()
        if set(array.dims) == set(PER_HEAD)
    }
    return xr.Dataset(data).assign(loss=float(token_losses(model, tokens).mean()))


def steps_of(names: Sequence[str]) -> np.ndarray:
    """The last number in every name, or the place in the sequence where one has none or they do not rise."""
    numbers = [re.findall(r"\d+", name) for name in names]
    steps = np.array([int(found[-1]) if found else -1 for found in numbers])
    rising = (steps >= 0).all() and (np.diff(steps) > 0).all()
    return steps if rising else np.arange(len(names))
