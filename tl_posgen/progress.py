"""One progress bar for a whole analysis: counts forward passes, and estimates early how long it will take."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

LONG = 20.0  # seconds: the time of a longer analysis is estimated and printed
AGAIN = 3  # times the time that was said: then it is said again
SAMPLE = 2.0  # seconds of forward passes (one pass at least) that the estimate needs

_counting: ContextVar["Passes | None"] = ContextVar("counting", default=None)


def count(n: int) -> None:
    """Count a forward pass of n prompts that begins now; outside an analysis do nothing."""
    if (passes := _counting.get()) is not None:
        passes.begin(n)


def passes_begun() -> int:
    """Return how many forward passes of the present analysis have begun; 0 where nobody counts."""
    passes = _counting.get()
    return 0 if passes is None else passes.done + passes.running


class Passes:
    """Forward passes of an analysis, one per prompt: how many are planned, how many are done, on one bar.

    A pass ends when the next one begins, so its time includes the computations on its captures.

    Args:
        shown: whether there is a bar; without one nothing is counted.
        models: number of models that are measured: the model and its random inits.

    Attributes:
        planned, done: numbers of passes.
        each: passes planned for every model, by name of the stage.
        once: further passes planned for the first model alone, in this stage.

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
        self.words, self.then, self.announced = "", (), 0.0
        self.purpose, self.fewer_with = "", ()
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
    def stage(self, name: str, label: str, then: Sequence[str] = (), fewer_with: Sequence[str] = ()) -> Iterator[None]:
        """Count passes inside the block as passes of this measure and model.

        Args:
            name: the measure. label: the model.
            then: names of later stages that have not planned passes yet.
            fewer_with: options of the measure that make the passes fewer.
        """
        self.words, self.then, self.before = f"{name}, {label}", then, self.done
        self.purpose, self.fewer_with = "", fewer_with
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

    def plan(self, each: int, once: int = 0, purpose: str = "") -> None:
        """Add `each` passes for every model, and `once` passes for the first model alone.

        Args:
            purpose: of the passes, for the message on their time.
        """
        self.purpose = purpose or self.purpose
        self.planned += self.models * each + once
        self.each[self.name] = self.each.get(self.name, 0) + each
        self.once += once
        if self.shown:
            self.resize(self.planned)

    def resize(self, total: int) -> None:
        """Set another total, and estimate the time left from the passes from here on.

        A bar in a notebook takes a new total only from its `reset`.
        """
        if self.bar is None:
            self.bar = tqdm(total=total, desc=self.words, unit="pass", miniters=1, smoothing=0.05, leave=None)
            return
        if self.bar.disable:  # by TQDM_DISABLE: it has no times
            return
        began = self.bar.start_t
        self.bar.reset(total)
        self.bar.start_t, self.bar.n, self.bar.last_print_n = began, self.done, self.done
        self.bar.refresh()

    def begin(self, n: int) -> None:
        """Begin a pass of n prompts; the pass before it is done."""
        if self.bar is None:  # of a procedure that planned nothing
            self.resize(0)
        self.end()
        if self.done == self.before:
            self.began = perf_counter()
        self.running = n

    def end(self) -> None:
        """End the pass that is running, if there is one."""
        if not self.running:
            return
        self.bar.update(self.running)
        self.done, self.running = self.done + self.running, 0
        done, spent = self.done - self.before, perf_counter() - self.began
        whole = spent / done * (self.planned - self.before)
        if spent >= SAMPLE and whole > max(LONG, AGAIN * self.announced):
            self.announced = whole
            inits = ", random inits included" if self.models > 1 else ""
            purpose = f": {self.purpose}" if self.purpose else ""
            fewer = f"; fewer with {', '.join(self.fewer_with)}" if self.fewer_with else ""
            more = f"{purpose}{fewer}" + (f"; {', '.join(self.then)} not yet counted" if self.then else "")
            planned, amount = f"{self.planned - self.before:,} forward passes{inits}", format_duration(whole)
            taken = f"({done} of them took {spent:.1f} s)"
            tqdm.write(f"{self.words}: {planned}, about {amount} {taken}{more}", file=sys.stderr)


def format_duration(seconds: int | float) -> str:
    """Format a duration in seconds, minutes or hours.

    Example:
        >>> [format_duration(seconds) for seconds in (41.3, 150, 9000)]
        ['41 s', '2.5 min', '2.5 h']
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
