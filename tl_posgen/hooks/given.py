"""Hooks that a user hands over, under which everything is measured: checked before work starts, and said."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from tl_posgen.errors import InputError
from tl_posgen.models.model import Model
from tl_posgen.models.wrapped import wrap

Hooks: TypeAlias = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]


@contextmanager
def under(model: Model, hooks: Hooks) -> Iterator[None]:
    """While the block runs, every forward pass runs with these hooks; the model is probed without them."""
    if not hooks:
        yield
        return
    wrap(model).found()
    with model.hooks(fwd_hooks=list(hooks)):
        yield


def check_hooks(model: Model, hooks: Hooks) -> list[str]:
    """What the hooks are called, "blocks.0.attn.hook_z: zero" each.

    Raises:
        InputError: something that is no list of pairs (name of a hook point, or a function of it, and hook), or a hook
            point that the model lacks.
    """
    pairs = "give pairs as TransformerLens takes them: [('blocks.0.attn.hook_z', function), ...]"
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise InputError(f"fwd_hooks={hooks!r}: {pairs}")
    points: set[str] = set(model.hook_dict) if hooks else set()
    said = []
    for pair in hooks:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise InputError(f"fwd_hooks: {pair!r} is no hook; {pairs}")
        where, hook = pair
        if not (any(map(where, points)) if callable(where) else where in points):
            what = "no hook point is chosen by this filter" if callable(where) else f"no hook point {where!r}"
            raise InputError(f"fwd_hooks: {what}; model.hook_dict lists them")
        said.append(f"{called(where)}: {called(hook)}")
    return said


def called(thing: Any) -> str:
    """A name, or what a function is called."""
    if isinstance(thing, str):
        return thing
    inner = getattr(thing, "func", thing)  # of a functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__)).replace("<locals>.", "")
