"""Measures of a model while it is trained: in a loop of one's own, and as a callback of transformers' Trainer."""

import inspect
import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import torch
from transformers.trainer_callback import TrainerCallback

from tl_posgen.core import registry
from tl_posgen.core.engine import analyze
from tl_posgen.core.options import Count, Within, fits
from tl_posgen.core.report import Report
from tl_posgen.errors import InputError
from tl_posgen.models.loading.snapshot import snapshot
from tl_posgen.models.tokens import check_counts, refuse_file_names
from tl_posgen.report.tables import head_means

Step = Annotated[int, Within(0, words="a step, 0 or more")]


def analyze_in_training(hf_model: Any, tokenizer: Any, prompts: Any, **settings: Any) -> Report:
    """Run `analyze` on a copy of the current weights, and leave the model and all random states as they are.

    Mode, dtype, device, gradients and weights of the model stay untouched, as only the copy is run, in evaluation mode
    and outside of autocast. The random states of Python, numpy and torch (CPU, CUDA) are put back.

    Args:
        hf_model, tokenizer: as `tl_posgen.models.loading.snapshot.snapshot` takes them.
        prompts: as `analyze` takes them.
        settings: of `analyze`; nulls=0 and progress=False if left out.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from tl_posgen.models.conversion.files import MINI
        >>> model, tokenizer = AutoModelForCausalLM.from_pretrained(MINI), AutoTokenizer.from_pretrained(MINI)
        >>> report = analyze_in_training(model, tokenizer, "The White Rabbit.", measures="three_axis")
        >>> list(headline_means(report))
        ['three_axis_r', 'three_axis_r_within_rows']
    """
    if not isinstance(hf_model, torch.nn.Module):
        raise InputError(f"analyze_in_training: {hf_model!r:.80} is no model; give the transformers model in training")
    device = next((parameter.device for parameter in hf_model.parameters()), torch.device("cpu"))
    with _random_states_kept(device), torch.autocast(device.type, enabled=False), torch.enable_grad():
        model = snapshot(hf_model, tokenizer)
        return analyze(model, prompts, **{"nulls": 0, "progress": False} | settings)


def headline_means(report: Report) -> dict[str, float]:
    """Return the mean over heads of every headline of a report, by the name that `report.frame()` gives it; of a
    measure without numbers of heads, the mean over prompts of what has one value a prompt."""
    if not isinstance(report, Report):
        raise InputError(f"report is a {type(report).__name__}: give a Report, as analyze returns")
    means = head_means(report.frame())
    for name, result in report.items():
        if result.headline_frame() is None:
            plain = {key: array for key, array in result.trained.data_vars.items() if array.dims == ("prompt",)}
            means |= {name if key == name else f"{name}_{key}": float(array.mean()) for key, array in plain.items()}
    return means


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Put back the random states of Python, numpy and torch when the block ends."""
    python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, the state that others draw from
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)  # noqa: NPY002


class PositionCallback(TrainerCallback):
    """Measures of the model in training, logged at chosen steps beside the loss.

    `trainer.add_callback(PositionCallback(trainer, text, at=100, measures=["slash"]))`. The means over heads of the
    measures' headlines go to `trainer.log` as "position/slash_score" and so on, hence to TensorBoard, W&B and
    `trainer.state.log_history`; "position/seconds" is what they took. Training goes on as without it, bit by bit: see
    `analyze_in_training`. Of several processes the first one measures.

    Args:
        trainer: the `transformers.Trainer` to whose log numbers are written; its model, and its tokenizer
            (`processing_class`), are measured.
        prompts: as `analyze` takes them.
        at: every so many optimiser steps, from step 0 on; or the steps.
        tokenizer: where the trainer has none.
        settings: of `analyze`: measures, length, n_prompts, ...; nulls=0 if left out.

    Attributes:
        reports: step -> `Report`, of everything that was measured.

    Raises:
        InputError: unknown measures or settings, steps that are none, a length that is none, a trainer that is none or
            that shards its weights, no tokenizer.
    """

    def __init__(
        self, trainer: Any, prompts: Any, *, at: int | Collection[int] = 100, tokenizer: Any = None, **settings: Any
    ):
        steps = list(at) if isinstance(at, Collection) else []
        if not fits(at, Count) and not (steps and all(fits(step, Step) for step in steps)):
            raise InputError(f"at={at!r}: give a number of steps, 1 or more, or a collection of steps")
        if not hasattr(trainer, "log") or not hasattr(trainer, "processing_class"):
            raise InputError(f"PositionCallback: {type(trainer).__name__} is no transformers.Trainer; give the trainer")
        if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
            raise InputError(
                "PositionCallback: FSDP and DeepSpeed shard the weights; measure saved checkpoints instead"
            )
        self.tokenizer = trainer.processing_class if tokenizer is None else tokenizer
        if self.tokenizer is None:
            raise InputError("PositionCallback: this trainer has no processing_class; give tokenizer=")
        try:
            inspect.signature(analyze).bind(None, prompts, **settings)
        except TypeError as error:
            raise InputError(f"PositionCallback: {error}; give settings of tl_posgen.analyze") from None
        registry.requested(settings.get("measures"))
        check_counts(settings.get("length"), settings.get("n_prompts"))
        refuse_file_names(prompts)
        self.trainer, self.prompts, self.settings = trainer, prompts, settings
        self.at = steps if isinstance(at, Collection) else int(at)
        self.reports: dict[int, Report] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # and not resumed
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        chosen = step % self.at == 0 if isinstance(self.at, int) else step in self.at
        if not chosen or not state.is_world_process_zero:
            return
        began = time.perf_counter()
        model = kwargs["model"]
        with _random_states_kept(next(model.parameters()).device):
            report = analyze_in_training(model, self.tokenizer, self.prompts, **self.settings)
            logs = headline_means(report) | {"seconds": time.perf_counter() - began}
        self.reports[step] = report
        will_log = control.should_log  # logging clears the flag by which the loss of this step is logged
        self.trainer.log({f"position/{name}": value for name, value in logs.items()})
        control.should_log = will_log
