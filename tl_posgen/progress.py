"""One progress bar for all forward passes: planned before the first, and early an estimate of how long they take."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

LONG = 20.0  # seconds: the time of longer work is estimated and printed
_AGAIN = 1.5  # times more or less than was said: then it is said again
_SAMPLE = 2.0  # seconds of a stage's forward passes (one pass at least) that an estimate needs

_counting: ContextVar["Passes | None"] = ContextVar("counting", default=None)


def count(n: int) -> None:
    """Count a forward pass of n prompts that begins now; outside an analysis do nothing."""
    if (passes := _counting.get()) is not None:
        passes.begin(n)


@dataclass(eq=False)
class Stage:
    """Forward passes of one measure, or of those that share them, on one model.

    Attributes:
        name, label: of the measure, and of the model.
        planned, done: numbers of passes, one a prompt.
        fewer_with: options of the measure that make them fewer.
        seconds: that the passes done took, with all that is computed between them.
        first: passes and seconds of the first batch, which may have to get a model ready.
    """

    name: str
    label: str
    planned: int = 0
    fewer_with: tuple[str, ...] = ()
    done: int = 0
    seconds: float = 0.0
    first: tuple[int, float] = (0, 0.0)

    @property
    def steady(self) -> tuple[int, float]:
        """Passes done and seconds that they took, after the first batch where there are any."""
        n, seconds = self.first
        return (self.done - n, self.seconds - seconds) if self.done > n else self.first

    @property
    def left(self) -> int:
        return max(0, self.planned - self.done)


class Passes:
    """Forward passes of one or several analyses, one per prompt, on one bar whose total never grows.

    A pass ends when the next one begins, so its time includes the computations on its captures.

    Args:
        shown: whether there is a bar; without one nothing is counted.

    Example:
        >>> with Passes(shown=False) as passes:
        ...     passes.plan([Stage("key_cut", label, 40) for label in ("mini", "random init (seed 0)")])
        >>> passes.total
        80
    """

    def __init__(self, *, shown: bool):
        self.shown = shown
        self.stages: list[Stage] = []  # all that were planned, in any order
        self.waiting: list[Stage] = []  # those that have not begun
        self.now = Stage("", "")
        self.running, self.began, self.said = 0, 0.0, 0.0
        self.bar: Any = None

    @classmethod
    def counted(cls, *, shown: bool) -> "AbstractContextManager[Passes]":
        """Return new ones as a context manager; or those that are counted now, whose maker planned these too."""
        outer = _counting.get()
        return nullcontext(outer) if shown and outer is not None else cls(shown=shown)

    def __enter__(self) -> "Passes":
        self._outside: Token = _counting.set(self if self.shown else None)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        _counting.reset(self._outside)
        if self.bar is not None:
            if error is None:  # what never began was left out
                self.stages = [one for one in self.stages if one not in self.waiting]
                self.show()
            self.bar.close()

    @property
    def total(self) -> int:
        """How many passes there are, as far as is known."""
        return sum(one.planned for one in self.stages)

    @property
    def done(self) -> int:
        """How many passes are done, but for those beyond a stage's plan, for which the bar waits."""
        return sum(min(one.done, one.planned) for one in self.stages)

    def plan(self, stages: Iterable[Stage]) -> None:
        """Add stages, all before the first begins."""
        added = list(stages)
        self.stages += added
        self.waiting += added

    @contextmanager
    def stage(self, name: str, label: str) -> Iterator[None]:
        """Count passes inside the block as those of the next planned stage of this measure and model; it takes no more
        when the block ends."""
        planned = [one for one in self.waiting if (one.name, one.label) == (name, label)]
        self.now = planned[0] if planned else Stage(name, label)
        self.waiting = [one for one in self.waiting if one is not self.now]
        if self.bar is not None:
            self.bar.set_description(f"{name}, {label}")
        yield
        self.end()
        if self.now.left:  # an estimate, or a part that was finished before
            self.now.planned = self.now.done
            self.show()
        self.now = Stage("", "")

    def show(self) -> None:
        """Show the present total; a bar in a notebook takes another one only from its `reset`."""
        if self.bar is None or self.bar.disable:  # by TQDM_DISABLE: it has no times
            return
        began = self.bar.start_t
        self.bar.reset(self.total)
        self.bar.start_t, self.bar.n, self.bar.last_print_n = began, self.done, self.done
        self.bar.refresh()

    def begin(self, n: int) -> None:
        """Begin a pass of n prompts; the pass before it is done."""
        if self.bar is None:
            words = f"{self.now.name}, {self.now.label}"
            self.bar = tqdm(total=self.total, desc=words, unit="pass", miniters=1, smoothing=0.05, leave=None)
        self.end()
        if not self.now.done:
            self.began = perf_counter()
        self.running = n

    def end(self) -> None:
        """End the pass that is running, if there is one."""
        if not self.running:
            return
        self.bar.update(min(self.running, self.now.left))
        self.now.done, self.running = self.now.done + self.running, 0
        self.now.seconds = perf_counter() - self.began
        self.now.first = self.now.first if self.now.first[0] else (self.now.done, self.now.seconds)
        if self.can_be_told:
            whole = self.seconds
            off = max(whole, self.said) / min(whole, self.said) if self.said else _AGAIN
            if off >= _AGAIN and whole > LONG:
                self.say(whole)

    @property
    def can_be_told(self) -> bool:
        """Whether the passes so far tell how long all take: some of the measure with most left, or LONG of any."""
        if self.now.seconds < _SAMPLE or not self.stages:
            return False
        most = max(self.stages, key=lambda one: one.left)
        is_typical = self.now.name == most.name and self.now.done > self.now.first[0]
        return is_typical or sum(one.seconds for one in self.stages) > LONG

    @property
    def seconds(self) -> float:
        """How long all passes take: those left at the cost of the same measure's, or else the mean, so far."""
        timed = [one for one in {*self.stages, self.now} if one.done]

        def cost(stage: Stage) -> float:
            alike = [one.steady for one in timed if one.name == stage.name] or [one.steady for one in timed]
            return sum(seconds for _, seconds in alike) / sum(n for n, _ in alike)

        left = sum(one.left * cost(one) for one in self.stages if one.left)
        return left + sum(one.seconds for one in timed)

    def say(self, whole: float) -> None:
        """Print how many passes there are and how long they take."""
        models, largest = {one.label for one in self.stages}, max(self.stages, key=lambda one: one.left)
        of_models = f" of {len(models)} models" if len(models) > 1 else ""
        now = "now " if self.said else ""
        fewer = f"; {largest.name}: fewer with {', '.join(largest.fewer_with)}" if largest.fewer_with else ""
        taken = f"({self.now.done:,} of {self.now.name} took {self.now.seconds:.1f} s)"
        words = f"{self.total:,} forward passes{of_models}, {now}about {format_duration(whole)} in all {taken}{fewer}"
        tqdm.write(words, file=sys.stderr)
        self.said = whole


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
