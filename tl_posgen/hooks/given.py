"""Hooks that a user hands over and that hold during every measured pass: checked before work starts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from tl_posgen.errors import InputError
from tl_posgen.models.model import Model
from tl_posgen.models.wrapped import WrappedModel, wrap

Hooks: TypeAlias = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]


@contextmanager
def under(model: Model | WrappedModel, hooks: Hooks) -> Iterator[None]:
    """Run every forward pass inside the block with these hooks; the model is probed before, without them."""
    if not hooks:
        yield
        return
    wrapped = wrap(model)
    wrapped.found()
    with wrapped.model.hooks(fwd_hooks=list(hooks)):
        yield


def check_hooks(model: Model, hooks: Hooks) -> list[str]:
    """Return the name of each hook, such as "blocks.0.attn.hook_z: zero"; InputError for what is no list of hooks."""
    pairs = "give pairs as TransformerLens takes them: [('blocks.0.attn.hook_z', function), ...]"
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise InputError(f"fwd_hooks={hooks!r}: {pairs}")
    points: set[str] = set(model.hook_dict) if hooks else set()
    names = []
    for pair in hooks:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise InputError(f"fwd_hooks: {pair!r} is no hook; {pairs}")
        where, hook = pair
        if not (any(map(where, points)) if callable(where) else where in points):
            what = "no hook point is chosen by this filter" if callable(where) else f"no hook point {where!r}"
            raise InputError(f"fwd_hooks: {what}; model.hook_dict lists them")
        names.append(f"{name_of(where)}: {name_of(hook)}")
    return names


def name_of(thing: Any) -> str:
    """Return a name as it is, or the name of a function."""
    if isinstance(thing, str):
        return thing
    inner = getattr(thing, "func", thing)  # of a functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__)).replace("<locals>.", "")
