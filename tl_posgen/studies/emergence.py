"""Emergence of the measures during training: one analysis over a sequence of checkpoints."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.engine import Measures, analyze, drawn
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, check_seed, check_seeds
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.result import Result
from tl_posgen.core.store import Parts
from tl_posgen.models.conversion.weights import release
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.tokens import check_counts, check_numbers
from tl_posgen.studies.course import Emergence
from tl_posgen.studies.curves import numbers_of

MEASURES = ("three_axis", "variance", "mean_key")


def emergence(
    checkpoints: Sequence[str | os.PathLike],
    prompts: Any,
    *,
    measures: Measures = MEASURES,
    model: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    backend: BackendChoice | str = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    length: int | None = None,
    n_prompts: int | None = None,
    consecutive: bool = False,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    """Measure every checkpoint of a training run on the same prompts, and its loss.

    The result holds the numbers of each measure as "<measure>_<variable>" over `checkpoint`, such as three_axis_r
    [checkpoint, tokens, layer, head] and coupling_coupling [checkpoint, version, bases, prompt]; the `loss` in nats per
    token; and `step`, the number in a checkpoint's name (its place where there is none).

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia). One model is held at a time.
        prompts: as in `analyze`, of one length.
        measures: names or measures, as in `analyze`; three_axis, variance and mean_key if left out.
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's.
        backend, dtype, device: as in `load_model`.
        length, n_prompts, consecutive, seed: as in `analyze`.
        null_seeds: of randomly initialised models of the last checkpoint's shape; () for none. A run's step 0 should
            measure as they do.
        keep: directory for finished checkpoints, as in `analyze`.

    Raises:
        InputError: no checkpoints, two of one name, prompts that cannot be used, or what a measure refuses.
        ModelError: a checkpoint that cannot be loaded.

    Source: that coupling, linearity and exponential growth rise during training is a claim of Aubry, Meng, Sugolov and
    Papyan, arXiv 2407.07810; that the split be followed through training is asked by readers of Han & Ji 2025; the
    procedure is ours.

    Example:
        >>> from tl_posgen.models.conversion.source import MINI
        >>> from tl_posgen.models.tokens import bundled_text
        >>> cut = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = emergence([MINI], bundled_text(), measures="three_axis", **cut)
        >>> found.sel()["three_axis_r"].dims
        ('checkpoint', 'tokens', 'layer', 'head')
    """
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("model", model, str | None)
    require("tokenizer", tokenizer, str | os.PathLike | None)
    asked, null_seeds, seed = registry.requested(measures), check_seeds(null_seeds), check_seed(seed)
    check_counts(length, n_prompts)
    run = Checkpoints(checkpoints, model, tokenizer, backend, dtype, device)
    last = run.models[-1].load(precise=any(measure.precise for measure in asked))
    check_numbers(last, length, n_prompts)
    tokens = prompts_of_one_length(last, prompts, length, n_prompts, consecutive=consecutive)
    provenance = provenance_of(last, list(tokens), null_seeds, seed=seed)
    options = {measure.name: measure.options() for measure in asked}
    provenance |= {"checkpoints": run.names, "model": run.label, "measures": options}
    provenance |= drawn(length, n_prompts, consecutive)
    random_inits = NullModels(last, null_seeds)
    with Parts.kept_in(keep) as parts:
        measured = partial(numbers_of_model, tokens=tokens, measures=asked, seed=seed, parts=parts)
        nulls = [measured(model) for _, model in random_inits.models(in_place=True)]
        random_inits.free_memory()
        release(last)
        rows = [measured(one) for one in tqdm(run.models, desc="emergence", unit="checkpoint", disable=not progress)]
    own: Any = xr.concat(rows, xr.Variable("checkpoint", np.array(run.names)), combine_attrs="override")
    inits = [own, *(null.expand_dims(checkpoint=run.names) for null in nulls)]  # the same beside every checkpoint
    labels = xr.Variable("init", np.array([TRAINED, *map(str, null_seeds)]))
    data: Any = xr.concat(inits, labels, combine_attrs="override")
    data = data.assign(step=("checkpoint", run.steps)).assign_attrs(measures=list(options))
    data = data.assign_coords(init_label=("init", [run.label, *map(null_label, null_seeds)]))
    measure = Emergence(per_head="head" in data.dims)
    return Result(measure, measure.describe(data), provenance | {"options": measure.options()})


def numbers_of_model(
    model: Model | Pretrained, tokens: Int[Tensor, "prompt pos"], measures: Sequence[Measure], seed: int, parts: Parts
) -> xr.Dataset:
    """Return the numbers of every measure of one model under names of their own, and its loss."""
    names = [measure.name for measure in measures]
    with_loss = measures if "loss" in names else [*measures, "loss"]
    report = analyze(model, tokens, measures=with_loss, seed=seed, null_seeds=(), keep=parts, progress=False)
    numbers = numbers_of(report[name] for name in report if name in names).sel(init=TRAINED, drop=True)
    return numbers.assign(loss=report["loss"].own["loss"].drop_vars("init_label", errors="ignore"))
