"""One progress bar for all forward passes of one or several analyses, planned before the first."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

_counting: ContextVar["Passes | None"] = ContextVar("counting", default=None)


def count_pass(n: int) -> None:
    """Count a forward pass of n prompts that begins now; outside an analysis do nothing."""
    if (passes := _counting.get()) is not None:
        passes.begin(n)


@dataclass(eq=False)
class Stage:
    """Forward passes of one measure, or of those that share them, on one model.

    Attributes:
        name, label: of the measure, and of the model.
        planned, done: numbers of passes, one a prompt.
    """

    name: str
    label: str
    planned: int = 0
    done: int = 0


class Passes:
    """Forward passes of one or several analyses, one per prompt, on one bar whose total never grows.

    Args:
        shown: whether there is a bar; without one nothing is counted.

    Example:
        >>> with Passes(shown=False) as passes:
        ...     passes.plan([Stage("plane_perturbation", label, 40) for label in ("mini", "random init (seed 0)")])
        >>> passes.total
        80
    """

    def __init__(self, *, shown: bool):
        self.shown = shown
        self.stages: list[Stage] = []  # all that were planned, in any order
        self.waiting: list[Stage] = []  # those that have not begun
        self.now = Stage("", "")
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
        """How many passes have begun, but for those beyond a stage's plan, for which the bar waits."""
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
        if self.now.done < self.now.planned:  # an estimate, or a part that was finished before
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
        """Begin a pass of n prompts."""
        if self.bar is None:
            words = f"{self.now.name}, {self.now.label}"
            self.bar = tqdm(total=self.total, desc=words, unit="pass", miniters=1, smoothing=0.05, leave=None)
        self.bar.update(min(n, max(0, self.now.planned - self.now.done)))
        self.now.done += n
