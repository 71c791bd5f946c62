"""One progress bar for all steps of one or several analyses: a measure, or those that share a pass, on one model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

_shown: ContextVar[Any] = ContextVar("shown", default=None)  # the bar, where there is one


def count_pass(n: int) -> None:
    """Count a forward pass of n prompts beside the steps; outside an analysis do nothing."""
    if (bar := _shown.get()) is not None:
        bar.passes += n
        bar.set_postfix_str(f"{bar.passes} passes")


@contextmanager
def steps_shown(total: int, *, shown: bool) -> Iterator[None]:
    """Show a bar of so many steps while the block runs; inside another block they join its bar.

    Args:
        shown: whether there is a bar; without one nothing is counted.
    """
    if shown and (outer := _shown.get()) is not None:
        outer.total += total
        yield
        return
    bar: Any = tqdm(total=total, unit="step", leave=None) if shown else None
    if bar is not None:
        bar.passes = 0
    token = _shown.set(bar)
    try:
        yield
    finally:
        _shown.reset(token)
        if bar is not None:
            bar.close()


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name the step on the bar, and count it when the block ends."""
    bar = _shown.get()
    if bar is not None:
        bar.set_description(name)
    yield
    if bar is not None:
        bar.update()
