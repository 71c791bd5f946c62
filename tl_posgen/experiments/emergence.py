"""How the measures form during training: the same analysis over a sequence of checkpoints."""

import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.base import Analyzer
from tl_posgen.analyzers.feed import measure
from tl_posgen.analyzers.registry import make_analyzers
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.models.backend import Model
from tl_posgen.models.checkpoints import Checkpoints
from tl_posgen.models.load import BackendChoice
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.random_like import random_like
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
    run = Checkpoints(checkpoints, model, tokenizer, backend)
    last = run.load(-1)
    tokens = prompts_of_one_length(last, prompts, length, n_prompts)
    rows = []
    for place in tqdm(range(len(run)), desc="emergence", unit="checkpoint", disable=not progress):
        rows.append(measured(run.load(place), tokens, make_analyzers(analyzers)))
    dataset = xr.concat(rows, pd.Index(run.names, name="checkpoint"), combine_attrs="drop")
    assert isinstance(dataset, xr.Dataset)
    dataset["step"] = ("checkpoint", run.steps)
    dataset.attrs = {"rows": ("checkpoint", *PER_HEAD), "model": run.label}
    null = None
    if null_seed is not None:
        twin = random_like(last, null_seed)
        null = measured(twin, tokens, make_analyzers(analyzers)).expand_dims(checkpoint=[null_label(null_seed)])
        null.attrs = {"rows": ("checkpoint", *PER_HEAD), "model": null_label(null_seed)}
    provenance = provenance_of(last, list(tokens), null_seed) | {"checkpoints": run.names, "model": run.label}
    return Result("emergence", dataset, null, provenance)


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
