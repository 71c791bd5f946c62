"""Making models without side effects: TransformerLens and transformers print, log, warn and draw random numbers."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import torch


@contextmanager
def quiet(seed: int | None = None, device: str = "cpu") -> Iterator[None]:
    """Suppress prints, warnings, log lines and progress bars; make new tensors on this device, whatever torch's default
    is. Afterwards everything is as before, the random states of the CPU and of this device too, which begin as after
    torch.manual_seed(seed)."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    disabled = logging.root.manager.disable
    try:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        silent = redirect_stdout(io.StringIO()), warnings.catch_warnings()
        place = torch.device(device)
        also = [] if place.type == "cpu" else [place]
        with torch.random.fork_rng(devices=also), place, silent[0], silent[1]:
            warnings.simplefilter("ignore")
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                for _ in also:
                    torch.cuda.default_generators[torch.empty(0).device.index].manual_seed(seed)
            yield
    finally:
        logging.disable(disabled)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
