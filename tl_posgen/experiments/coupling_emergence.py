"""How coupling, straightness and growth form during training: the same measures over a sequence of checkpoints."""

import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.experiments.coupling import coupling, headline
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.models.backend import Model
from tl_posgen.models.checkpoints import Checkpoints
from tl_posgen.models.load import BackendChoice
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result


def coupling_emergence(
    checkpoints: Sequence[str | os.PathLike],
    prompts: Any,
    *,
    model: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    k: int = 10,
    length: int | None = 256,
    n_prompts: int | None = 4,
    backend: BackendChoice | str = "auto",
    seed: int = 0,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    """The headline numbers of `coupling`, and the loss, at every checkpoint. One model is held at a time.

    Args:
        checkpoints, model, tokenizer, backend: as in `emergence`.
        prompts, k, length, n_prompts, seed: as in `coupling`.
        null_seed: of a randomly initialised model of the last checkpoint's shape; None skips it.

    Returns:
        A Result named "coupling_emergence". Over checkpoint: coupling, chance, trace, swapped, line_shape_score,
        expodistance, growth_slope, growth_r2 and linearisation, each with its 95 % interval _low and _high over
        prompts; `loss` in nats per token, and `step`.

    Raises:
        InputError: no checkpoints, two of one name, or what `coupling` refuses.
        ModelError: a checkpoint that cannot be loaded.

    Source: that coupling, linearity and exponential growth rise during training is a claim of Aubry, Meng, Sugolov and
    Papyan, arXiv 2407.07810; the procedure is ours.
    """
    run = Checkpoints(checkpoints, model, tokenizer, backend)
    last = run.load(-1)
    tokens = prompts_of_one_length(last, prompts, length, n_prompts)
    provenance = provenance_of(last, list(tokens), null_seed)
    null = None
    if null_seed is not None:
        null = _headlines(random_like(last, null_seed), tokens, k, seed).expand_dims(checkpoint=[null_label(null_seed)])
        null.attrs = {"rows": "checkpoint", "model": null_label(null_seed), "k": k}
    del last
    bar = tqdm(range(len(run)), desc="coupling over training", unit="checkpoint", disable=not progress)
    rows = [_headlines(run.load(place), tokens, k, seed) for place in bar]
    dataset = xr.concat(rows, pd.Index(run.names, name="checkpoint"))
    assert isinstance(dataset, xr.Dataset)
    dataset["step"] = ("checkpoint", run.steps)
    dataset.attrs = {"rows": "checkpoint", "model": run.label, "k": k}
    return Result("coupling_emergence", dataset, null, provenance | {"checkpoints": run.names, "model": run.label})


def _headlines(model: Model, tokens: Int[Tensor, "prompt pos"], k: int, seed: int) -> xr.Dataset:
    found = coupling(model, tokens, length=None, n_prompts=None, k=[k], seed=seed, null_seed=None, progress=False)
    return xr.Dataset(headline(found.dataset, k)).assign(loss=float(token_losses(model, tokens).mean()))
