"""Hooks that a user hands over, or has added to the model, and that hold during every measured pass: refused before
work starts where they are none, or where none of their points fires."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from tl_posgen.errors import InputError
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import N_TOKENS, without_hooks
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.streaming.stream import streaming_by_policy

Hooks: TypeAlias = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]

_SWITCHES = {  # hook points that fire only where a method of the model has switched them on
    "attn.hook_result": "set_use_attn_result",
    "hook_mlp_in": "set_use_hook_mlp_in",
    "hook_attn_in": "set_use_attn_in",
    "hook_q_input": "set_use_split_qkv_input",
    "hook_k_input": "set_use_split_qkv_input",
    "hook_v_input": "set_use_split_qkv_input",
}


@contextmanager
def under(model: Model | Session, hooks: Hooks) -> Iterator[None]:
    """Run every forward pass inside the block with these hooks; the model is probed before, without them."""
    if not hooks:
        yield
        return
    session = session_of(model)
    session.layers()
    with session.under(hooks):
        yield


def check_hooks(session: Session, hooks: Hooks) -> list[str]:
    """Return the name of each hook, such as "blocks.0.attn.hook_z: zero", with points of a filter that do not fire.
    Those that were added to the model before are checked too.

    Raises:
        InputError: what is no list of hooks; a hook none of whose points fires.
    """
    pairs = "give pairs as TransformerLens takes them: [('blocks.0.attn.hook_z', function), ...]"
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise InputError(f"fwd_hooks={hooks!r}: {pairs}")
    points: Mapping[str, Any] = session.model.hook_dict
    places: list[list[str]] = []
    for pair in hooks:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise InputError(f"fwd_hooks: {pair!r} is no hook; {pairs}")
        where, _ = pair
        places.append([name for name in points if (where(name) if callable(where) else where == name)])
        if not places[-1]:
            what = "no hook point is chosen by this filter" if callable(where) else f"no hook point {where!r}"
            raise InputError(f"fwd_hooks: {what}; model.hook_dict lists them")
    silent = _require_firing(session, [*places, *(names for _, names in _added_hooks(points).values())])
    names = []
    for (where, hook), chosen in zip(hooks, places, strict=True):
        quiet = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in silent.intersection(chosen)})
        names.append(f"{_name_of(where)}: {_name_of(hook)}" + (f" (silent: {', '.join(quiet)})" if quiet else ""))
    return names


@contextmanager
def every_hook_firing(model: Model) -> Iterator[None]:
    """While the block runs, refuse a forward pass under a hook none of whose points fires, as it begins."""
    session, checked = session_of(model), set[tuple[str, ...]]()
    session.layers()
    owner = session.owner

    def check(*_: Any) -> None:
        if session.owner != owner:  # a pass that this package makes for itself
            return
        if places := {tuple(names) for _, names in _added_hooks(model.hook_dict).values()} - checked:
            _require_firing(session, sorted(places))
            checked.update(places)

    handle = session.embedding.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def added_hooks(session: Session) -> list[str]:
    """Return the names of the hooks of the user's that are on the model, such as "blocks.*.attn.hook_z: zero"."""
    return sorted(
        {
            f"{re.sub(r'[.][0-9]+[.]', '.*.', name)}: {_name_of(hook)}"
            for hook, names in _added_hooks(session.model.hook_dict).values()
            for name in names
        }
    )


def _added_hooks(points: Mapping[str, Any]) -> dict[int, tuple[Callable[..., Any], list[str]]]:
    """Return each function that is added to the model with its hook points, TransformerLens' own, which keep a cache,
    left out. A function at several points is a filter's."""
    hooks: dict[int, tuple[Callable[..., Any], list[str]]] = {}
    for name, point in {id(point): (name, point) for name, point in points.items()}.values():
        for handle in point.fwd_hooks:
            hook = getattr(handle, "user_hook", handle)
            if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("transformer_lens."):
                hooks.setdefault(id(hook), (hook, []))[1].append(name)
    return hooks


def _require_firing(session: Session, places: Sequence[Sequence[str]]) -> set[str]:
    """Return which of these hook points do not fire while the model reads a few random tokens, without any hook of the
    user's; InputError where those of one hook are all such. Those of single experts fire where a token goes there."""
    points = session.model.hook_dict
    expected = {name: points[name] for names in places for name in names if ".experts." not in name}
    if not expected:
        return set()
    session.layers()
    tokens, fired = session.backend.some_tokens(N_TOKENS), set[int]()
    with torch.no_grad(), streaming_by_policy(session, N_TOKENS), ExitStack() as stack:
        stack.enter_context(session.exclusive("hooks"))
        stack.enter_context(without_hooks(session.model))
        for point in {id(point): point for point in expected.values()}.values():
            stack.callback(point.register_forward_hook(lambda module, *_: fired.add(id(module))).remove)
        session.backend.model(tokens, return_type=None, **session.backend.options(tokens))
    silent = {name for name, point in expected.items() if id(point) not in fired}
    for names in places:
        if silent.issuperset(names):
            switch = next((method for end, method in _SWITCHES.items() if names[0].endswith(end)), None)
            remedy = f"model.{switch}(True) makes it fire" if switch else "choose another of model.hook_dict"
            more = f", nor do {len(names) - 1} others that the hook is at" if len(names) > 1 else ""
            raise InputError(
                f"{names[0]} does not fire in this model{more}, so its hook would change nothing; {remedy}"
            )
    return silent


def _name_of(name_or_function: Any) -> str:
    """Return a name as it is, or the name of a function."""
    if isinstance(name_or_function, str):
        return name_or_function
    inner = getattr(name_or_function, "func", name_or_function)  # of a functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__)).replace("<locals>.", "")
