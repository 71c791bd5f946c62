"""Silence while models are loaded: TransformerLens and transformers print, log and warn on every load."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def quiet() -> Iterator[None]:
    """No prints, warnings, log lines or progress bars inside the block; everything is as before after it."""
    from transformers.utils import logging as hf_logging

    verbosity, bars, disabled = (
        hf_logging.get_verbosity(),
        hf_logging.is_progress_bar_enabled(),
        logging.root.manager.disable,
    )
    try:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
