"""Choosing layers and heads."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeAlias

import pandas as pd

from tl_posgen.errors import InputError
from tl_posgen.models.head_names import head_name, parse_head
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of

__all__ = ["Heads", "Layers", "check_indices", "head_name", "named_heads", "one_head", "parse_head", "select_heads"]

Layers: TypeAlias = SupportsIndex | Iterable[SupportsIndex] | None
Pair: TypeAlias = tuple[SupportsIndex, SupportsIndex]
Head: TypeAlias = Pair | str
Heads: TypeAlias = Head | Iterable[Head] | pd.DataFrame | None
_NAMED = 'name heads by layer and head: "L3H1", "3.1" or (3, 1), or a list of these'


def select_heads(model: Model | Session, layers: Layers = None, heads: Heads = None) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, both in order; layers without a chosen head are left out.

    Args:
        layers: an index, or several; all if left out.
        heads: one head, "L3H1", "3.1" or the pair (3, 1); or several in a list; or a frame with the columns layer and
            head, a row a head, as `Report.heads` returns; all if left out.

    Raises:
        InputError: a layer that does not exist, a head that its layer does not have, none at all, an index that says no
            layer, or a head in a layer that `layers` leaves out.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> select_heads(model, layers=[0, 3])
        {0: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
        >>> select_heads(model, heads=(3, 1))
        {3: [1]}
        >>> select_heads(model, heads=["3.1", "L0H2", (3, 0)])
        {0: [2], 3: [0, 1]}
    """
    session = session_of(model)
    n_layers = session.model.cfg.n_layers
    indices, n_heads = check_indices(layers, n_layers, "layer"), session.n_heads
    owners = ["this model" if len({*n_heads}) == 1 else f"layer {layer}" for layer in range(n_layers)]
    if heads is None:
        return {layer: list(range(n_heads[layer])) for layer in indices}
    selected: dict[int, set[int]] = defaultdict(set)
    for pair in named_heads(heads):
        place = f"head {pair!r}: "
        layer = _index(pair[0], n_layers, "layer", place)
        head = _index(pair[1], n_heads[layer], "head", place, owners[layer])
        if layer not in indices:
            raise InputError(
                f"head {pair!r} is in layer {layer}, which layers={indices} leaves out; add it there, or give no layers"
            )
        selected[layer].add(head)
    return {layer: sorted(selected[layer]) for layer in sorted(selected)}


def named_heads(heads: Heads) -> list[tuple[int, int]]:
    """Return the layer and the index of each head that is named, whether a model has it or not."""
    choice: Any = heads
    if isinstance(choice, pd.DataFrame):
        if missing := {"layer", "head"} - set(choice.columns):
            raise InputError(
                "heads: a frame needs the columns layer and head, a row a head; "
                f"{' and '.join(sorted(missing))} missing among [{', '.join(map(str, choice.columns))}]"
            )
        listed = list(choice[["layer", "head"]].itertuples(index=False, name=None))
    elif isinstance(choice, str) or _is_pair(choice):
        listed = [choice]
    else:
        choice = choice.tolist() if hasattr(choice, "tolist") else choice  # arrays and tensors
        # an iterator can be read once, and the choice is needed for each model
        if isinstance(choice, bytes | Mapping | Iterator) or not isinstance(choice, Iterable):
            raise InputError(f"heads={choice!r}: {_NAMED}")
        listed = list(choice)
    if not listed:
        raise InputError("no heads chosen; leave heads out to have all")
    pairs = []
    for head in listed:
        if not isinstance(head, str | tuple | list):
            raise InputError(f"heads={choice!r}: {head!r} says no layer; {_NAMED}")
        pair = parse_head(head) if isinstance(head, str) else tuple(head)
        if len(pair) != 2:
            raise InputError(f"head {pair!r}: a pair is (layer, head)")
        pairs.append((_integer(pair[0], "layer", f"head {pair!r}: "), _integer(pair[1], "head", f"head {pair!r}: ")))
    return pairs


def _is_pair(heads: Any) -> bool:
    """Return whether this is (layer, head), and no list of heads."""
    return isinstance(heads, tuple) and bool(heads) and not any(isinstance(head, str | tuple | list) for head in heads)


def one_head(model: Model | Session, layer: Any = None, head: Any = None) -> tuple[int, int]:
    """Return the layer and the index of one head.

    Args:
        layer: its layer; None where `head` names it.
        head: an index in that layer; or, with no layer or its own, what `select_heads` takes for one head.

    Raises:
        InputError: none, or more than one; a layer or a head that does not exist.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> one_head(model, 3, 1), one_head(model, head="L3H1"), one_head(model, head=(3, 1))
        ((3, 1), (3, 1), (3, 1))
    """
    remedy = 'give one head, layer=3, head=1 or head="L3H1"'
    is_named = isinstance(head, str | pd.DataFrame | tuple | list)
    if head is None or (layer is None and not is_named):
        raise InputError(f"head={head!r}: {remedy}")
    chosen: Any = head if is_named else (layer, head)
    selected = select_heads(model, None if layer is None else [layer], chosen)
    pairs = [(layer, head) for layer, heads in selected.items() for head in heads]
    if len(pairs) != 1:
        raise InputError(f"head={head!r}: these are {len(pairs)} heads; {remedy}")
    return pairs[0]


def check_indices(indices: Layers, n: int, kind: str) -> list[int]:
    """Return the chosen layers, or what else is counted, in order, or all; InputError where the model lacks one."""
    if indices is None:
        return list(range(n))
    choice: Any = indices
    choice = choice.tolist() if hasattr(choice, "tolist") else choice  # arrays and tensors
    choice = [choice] if isinstance(choice, int) and not isinstance(choice, bool) else choice
    if isinstance(choice, str | bytes | Mapping | Iterator) or not isinstance(choice, Iterable):
        raise InputError(f"{kind}s={choice!r}: give a list of integers, such as {kind}s=[0, 1]")
    if not (listed := list(choice)):
        raise InputError(f"no {kind}s chosen; choose from {kind}s 0 to {n - 1}")
    return sorted({_index(index, n, kind) for index in listed})


def _index(value: Any, n: int, kind: str, place: str = "", owner: str = "this model") -> int:
    index = _integer(value, kind, place, f"; choose from {kind}s 0 to {n - 1}")
    if not 0 <= index < n:
        raise InputError(f"{place}{kind} {index} does not exist: {owner} has {kind}s 0 to {n - 1}")
    return index


def _integer(value: Any, kind: str, place: str, remedy: str = "") -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:  # of a tensor, too, that is no single integer
        raise InputError(f"{place}{kind} {value!r} is {type(value).__name__}, not an integer{remedy}") from error
