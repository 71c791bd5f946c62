"""One bar for a whole analysis: forward passes are counted as they happen, and what takes long is said early."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

LONG = 20.0  # seconds: of an analysis that takes more it is said how much
SAMPLE = 2.0  # seconds of forward passes, one at least, that this is estimated from

_counting: ContextVar["Passes | None"] = ContextVar("counting", default=None)


def count(n: int) -> None:
    """A forward pass of n prompts begins, whoever runs the model; outside an analysis nobody counts."""
    if (passes := _counting.get()) is not None:
        passes.begin(n)


def passes_begun() -> int:
    """Return how many forward passes of the present analysis have begun; 0 where nobody counts."""
    passes = _counting.get()
    return 0 if passes is None else passes.done + passes.running


class Passes:
    """The forward passes of an analysis, one a prompt: how many are planned, how many done, on one bar.

    A pass is done when the next begins, so its time is also that of what is computed from it.

    Args:
        shown: whether there is a bar; without one nothing is counted.
        models: how many everything is measured on: one, and its random inits.

    Attributes:
        planned, done: passes.
        each, once: passes planned of every model, by name of the stage; and of the first model alone, in this stage.

    Example:
        >>> with Passes(shown=False, models=2) as passes, passes.stage("substitution", "mini"):
        ...     passes.plan(40, once=7)
        >>> passes.planned
        87
    """

    def __init__(self, *, shown: bool, models: int):
        self.shown, self.models = shown, models
        self.planned = self.done = self.running = 0
        self.before, self.began = 0, 0.0  # passes done before this stage, and when its first one began
        self.words, self.then, self.said = "", (), False
        self.each: dict[str, int] = {}
        self.once, self.name = 0, ""
        self.bar: Any = None

    def __enter__(self) -> "Passes":
        self._outside: Token = _counting.set(self if self.shown else None)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        _counting.reset(self._outside)
        if self.bar is not None:
            if error is None and self.planned != self.done:
                self.resize(self.done)
            self.bar.close()

    @contextmanager
    def stage(self, name: str, label: str, then: Sequence[str] = ()) -> Iterator[None]:
        """While the block runs, passes are of this measure and model.

        Args:
            then: what is to follow and has planned nothing yet.
        """
        self.words, self.then, self.before = f"{name}, {label}", then, self.done
        if self.bar is not None:
            self.bar.set_description(self.words)
        self.name, self.once = name, 0
        self.each.setdefault(name, 0)
        yield
        self.end()
        expected = self.each[name] + self.once
        if self.shown and (missing := expected - (self.done - self.before)):  # a part that was finished before
            self.planned -= missing
            self.resize(self.planned)

    def plan(self, each: int, once: int = 0) -> None:
        """So many passes more of every model, and so many of the first alone."""
        self.planned += self.models * each + once
        self.each[self.name] = self.each.get(self.name, 0) + each
        self.once += once
        if self.shown:
            self.resize(self.planned)

    def resize(self, total: int) -> None:
        """Another total, and time left by the passes from here on; a bar in a notebook takes it from `reset` alone."""
        if self.bar is None:
            self.bar = tqdm(total=total, desc=self.words, unit="pass", miniters=1, smoothing=0.05, leave=None)
            return
        began = self.bar.start_t
        self.bar.reset(total)
        self.bar.start_t, self.bar.n, self.bar.last_print_n = began, self.done, self.done
        self.bar.refresh()

    def begin(self, n: int) -> None:
        """A pass of n prompts begins, so the one before it is done."""
        if self.bar is None:  # of a procedure that planned nothing
            self.resize(0)
        self.end()
        if self.done == self.before:
            self.began = perf_counter()
        self.running = n

    def end(self) -> None:
        """The pass that is running, if one is, is done."""
        if not self.running:
            return
        self.bar.update(self.running)
        self.done, self.running = self.done + self.running, 0
        done, spent = self.done - self.before, perf_counter() - self.began
        whole = spent / done * (self.planned - self.before)
        if not self.said and spent >= SAMPLE and whole > LONG:
            self.said = True
            inits = ", random inits included" if self.models > 1 else ""
            more = f"; {', '.join(self.then)} not yet counted" if self.then else ""
            planned, amount = f"{self.planned - self.before:,} forward passes{inits}", in_words(whole)
            taken = f"({done} of them took {spent:.1f} s)"
            tqdm.write(f"{self.words}: {planned}, about {amount} {taken}{more}", file=sys.stderr)


def in_words(seconds: int | float) -> str:
    """A duration in its unit.

    Example:
        >>> [in_words(seconds) for seconds in (41.3, 150, 9000)]
        ['41 s', '2.5 min', '2.5 h']
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
