"""Lists of hooks that print the call that made them."""

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, ParamSpec

import pandas as pd
from torch import Tensor

from tl_posgen.models.selection import head_name

HookList = list[tuple[str, Callable[..., Any]]]
_Given = ParamSpec("_Given")
_LONGEST = 60  # letters of an argument
_MOST_HEADS = 8  # of a frame


class PrintedHooks(HookList):
    """Hooks as TransformerLens takes them, a list of (hook point, function), which prints what it does.

    Example:
        >>> PrintedHooks([("blocks.3.attn.hook_z", print)], "silence('L3H1')")
        silence('L3H1'): 1 hook at attn.hook_z of layer 3
    """

    def __init__(self, hooks: Iterable[tuple[str, Callable[..., Any]]] = (), call: str = ""):
        super().__init__(hooks)
        self.call = call

    def __add__(self, other: Any) -> "PrintedHooks":
        """Return the hooks of both, those of `other` behind."""
        calls = [self.call, other.call if isinstance(other, PrintedHooks) else f"hooks[{len(other)}]"]
        return PrintedHooks([*self, *other], " + ".join(calls))

    def __iadd__(self, other: Any) -> "PrintedHooks":
        return self + other

    def __repr__(self) -> str:
        layers: dict[str, list[int]] = {}
        for name, _ in self:
            number, _, point = name.removeprefix("blocks.").partition(".")
            is_of_layer = name.startswith("blocks.") and number.isdigit()
            layers.setdefault(point if is_of_layer else name, []).extend([int(number)] if is_of_layer else [])
        points: dict[str, list[str]] = {}
        for point, numbers in layers.items():
            points.setdefault(_layers_in_words(sorted(set(numbers))), []).append(point)
        places = "; ".join(", ".join(names) + of_layers for of_layers, names in points.items())
        return f"{self.call}: {len(self)} hook{'s' * (len(self) != 1)}{' at ' * bool(places)}{places}"


def printing_call(function: Callable[_Given, HookList]) -> Callable[_Given, HookList]:
    """Make the hooks that a function of a model returns print its call: `ablate_heads('L3H1', 'mean')`."""
    signature = inspect.signature(function)

    @wraps(function)
    def printing(*arguments: _Given.args, **options: _Given.kwargs) -> HookList:
        hooks = function(*arguments, **options)
        _, *named_values = signature.bind(*arguments, **options).arguments.items()
        optional = {
            name for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
        }
        printed = [f"{name}={_brief(value)}" if name in optional else _brief(value) for name, value in named_values]
        call = f"{function.__name__}({', '.join(printed)})"
        for _, hook in hooks:
            owner: Any = getattr(hook, "__self__", None)
            if hasattr(owner, "call"):  # which names it in messages
                owner.call = call
        return PrintedHooks(hooks, call)

    return printing


def _name_of(value: Callable[..., Any]) -> str:
    """Return the name of a function, or of the one that made it."""
    function: Any = inspect.unwrap(getattr(value, "func", value))
    return getattr(function, "__qualname__", type(value).__name__).partition(".<locals>")[0]


def _made_by(value: Callable[..., Any]) -> str:
    """Return the name of a function; of one that another made, that name with what it was given: "by_split(..)"."""
    function, name = inspect.unwrap(getattr(value, "func", value)), _name_of(value)
    if not inspect.isfunction(function):
        return name
    given = dict[str, str]()
    for key, held in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # what is bound later
            given[key] = _brief(held.cell_contents, depth=0)
    written = [f"{key}={of}" for key, of in given.items() if not of.endswith("..")]
    return f"{name}({', '.join(written)})" if written else name


def _layers_in_words(layers: list[int]) -> str:
    """Return " of layers 0 to 3"; nothing for none."""
    if not layers:
        return ""
    is_run = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
    numbers = f"{layers[0]} to {layers[-1]}" if is_run else ", ".join(map(str, layers))
    return f" of layer{'s' * (len(layers) > 1)} {numbers}"


def _brief(value: Any, depth: int = 1) -> str:
    """Return an argument in a few letters; of functions what they hold, down to this depth."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, pd.DataFrame):
        if not {"layer", "head"} <= set(value.columns):
            return f"frame[{len(value)}]"
        names = [head_name(*place) for place in zip(value["layer"], value["head"], strict=True)]
        return f"[{', '.join(names[:_MOST_HEADS])}{', ..' * (len(names) > _MOST_HEADS)}]"
    if callable(value := getattr(value, "scores_of", value)) and not is_dataclass(value):
        return _made_by(value) if depth else _name_of(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
