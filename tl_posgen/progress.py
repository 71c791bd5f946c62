"""One progress bar for all steps of one or several analyses: a measure, or those that share a pass, on one model."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from tqdm.auto import tqdm

MAKING = "making"  # the step in which a null model is made

_shown: ContextVar["_Steps | None"] = ContextVar("shown", default=None)


class _Steps:
    """The steps on the bar: those to come, and how long those took that are finished.

    A step is expected to take the mean of the finished steps of its name, which other models had. One that made no
    pass, as its part was kept before, says nothing of the next.
    """

    def __init__(self, names: Counter[str]):
        self.coming, self.seconds, self.passes = names.copy(), defaultdict[str, list[float]](list), 0
        self.running: list[tuple[str, str, float]] = []  # name, description and start; the last is inside the others
        shape = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar: Any = tqdm(total=names.total(), unit="step", leave=None, miniters=0, bar_format=shape)

    def show(self) -> None:
        """Show the present total, and what is known of the time."""
        total, bar = self.bar.n + len(self.running) + self.coming.total(), self.bar
        bar.set_postfix_str(self.said(), refresh=False)
        if total != bar.total and not bar.disable:  # by TQDM_DISABLE: it has no times
            began, done = bar.start_t, bar.n
            bar.reset(total)  # a bar in a notebook takes another total from here alone
            bar.start_t, bar.n, bar.last_print_n = began, done, done
            bar.refresh()

    def begin(self, name: str, description: str) -> None:
        self.coming -= Counter([name])
        self.running.append((name, description, monotonic()))
        self.show()
        self.bar.set_description_str(description)

    def end(self, *, done: bool, worked: bool) -> None:
        """End the step that began last.

        Args:
            done: whether it counts. worked: whether others of its name will take as long.
        """
        name, _, began = self.running.pop()
        taken = monotonic() - began
        if done and worked:
            self.seconds[name].append(taken)
        # what a step inside another takes is not the other's
        self.running = [(outer, description, at + taken) for outer, description, at in self.running]
        self.bar.update(done)
        self.show()
        if self.running:
            self.bar.set_description_str(self.running[-1][1])

    def count_pass(self, n: int) -> None:
        self.passes += n
        self.bar.set_postfix_str(self.said(), refresh=False)
        self.bar.update(0)  # shown ten times a second at most

    def said(self) -> str:
        """Return "12 passes, 01:30 left"; "more than 01:30 left" where a step comes whose time is not known."""
        expected = {name: sum(taken) / len(taken) for name, taken in self.seconds.items()}
        left = sum(n * expected.get(name, 0) for name, n in self.coming.items())
        is_known = all(name in expected for name in self.coming)
        ends = [*(began for _, _, began in self.running[1:]), monotonic()]
        for (name, _, began), end in zip(self.running, ends, strict=False):
            remaining = expected.get(name, 0) - (end - began)
            left, is_known = left + max(0, remaining), is_known and remaining > 0
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'}"
        if left < 1:
            return passes
        return f"{passes}, {'' if is_known else 'more than '}{self.bar.format_interval(left)} left"


def count_pass(n: int) -> None:
    """Count a forward pass of n prompts beside the steps; outside an analysis do nothing."""
    if (steps := _shown.get()) is not None:
        steps.count_pass(n)


@contextmanager
def steps_shown(names: Sequence[str], *, shown: bool) -> Iterator[None]:
    """Show a bar of these steps while the block runs; inside another block they join its bar, where those that it has
    planned are the same ones.

    Args:
        shown: whether there is a bar; without one nothing is counted.
    """
    if not shown:
        token = _shown.set(None)
        try:
            yield
        finally:
            _shown.reset(token)
        return
    planned, outer = Counter(names), _shown.get()
    steps = outer or _Steps(planned)
    steps.coming |= planned
    coming_before, token = steps.coming.copy(), _shown.set(steps)
    try:
        steps.show()
        yield
    finally:
        _shown.reset(token)
        steps.coming -= planned - (coming_before - steps.coming)  # what never began was left out
        steps.show()
        if outer is None:
            steps.bar.close()


@contextmanager
def step(name: str, label: str) -> Iterator[None]:
    """Show a step of this name, on the model of this label, and count it when the block ends."""
    if (steps := _shown.get()) is None:
        yield
        return
    done, before = False, steps.passes
    steps.begin(name, f"{name} {label}")
    try:
        yield
        done = True
    finally:
        steps.end(done=done, worked=name == MAKING or steps.passes > before)
