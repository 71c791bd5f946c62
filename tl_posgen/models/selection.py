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

__all__ = ["Heads", "Layers", "check_indices", "head_name", "one_head", "parse_head", "select_heads"]

Layers: TypeAlias = SupportsIndex | Iterable[SupportsIndex] | None
Pair: TypeAlias = tuple[SupportsIndex, SupportsIndex]
Heads: TypeAlias = SupportsIndex | str | Iterable[SupportsIndex | str] | Iterable[Pair] | pd.DataFrame | None


def select_heads(model: Model | Session, layers: Layers = None, heads: Heads = None) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, both in order; layers without a chosen head are left out.

    Args:
        layers: an index, or several; all if left out.
        heads: an index or several, meant in every chosen layer; or (layer, head) pairs; or names of heads, "L3H1" or
            "3.1"; or a frame with the columns layer and head, a row a head, as `Report.heads` returns; all if left
            out.

    Raises:
        InputError: a layer that does not exist, a head that its layer does not have, none at all, something else than
            integers or names, or a pair in a layer that `layers` leaves out.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> select_heads(model, layers=[0, 3], heads=[1])
        {0: [1], 3: [1]}
        >>> select_heads(model, heads=[(3, 1), (0, 2), (3, 0)])
        {0: [2], 3: [0, 1]}
        >>> select_heads(model, heads=["3.1", "L0H2"])
        {0: [2], 3: [1]}
    """
    session = session_of(model)
    n_layers = session.model.cfg.n_layers
    indices, n_heads = check_indices(layers, n_layers, "layer"), session.n_heads
    owners = ["this model" if len({*n_heads}) == 1 else f"layer {layer}" for layer in range(n_layers)]
    if heads is None:
        return {layer: list(range(n_heads[layer])) for layer in indices}
    if isinstance(heads, pd.DataFrame):
        if missing := {"layer", "head"} - set(heads.columns):
            raise InputError(
                "heads: a frame needs the columns layer and head, a row a head; "
                f"{' and '.join(sorted(missing))} missing among [{', '.join(map(str, heads.columns))}]"
            )
        given: list[Any] = list(heads[["layer", "head"]].itertuples(index=False, name=None))
    else:
        listed = [heads] if isinstance(heads, str) else _listed(heads, "head")
        given = [parse_head(one) if isinstance(one, str) else one for one in listed]
    pairs = [tuple(head) for head in given if isinstance(head, tuple | list)]
    if not pairs:
        return {layer: check_indices(given, n_heads[layer], "head", owners[layer]) for layer in indices}
    if len(pairs) < len(given):
        raise InputError("heads: give indices, meant in every chosen layer, or (layer, head) pairs or names, not both")
    selected: dict[int, set[int]] = defaultdict(set)
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(f"head {pair!r}: a pair is (layer, head)")
        place = f"head {pair!r}: "
        layer = _index(pair[0], n_layers, "layer", place)
        head = _index(pair[1], n_heads[layer], "head", place, owners[layer])
        if layer not in indices:
            raise InputError(
                f"head {pair!r} is in layer {layer}, which layers={indices} leaves out; add it there, or give no layers"
            )
        selected[layer].add(head)
    return {layer: sorted(selected[layer]) for layer in sorted(selected)}


def one_head(model: Model, layer: Any = None, head: Any = None) -> tuple[int, int]:
    """Return the layer and the index of one head.

    Args:
        layer: its layer; None where `head` names it.
        head: an index in that layer; or, with no layer or its own, a pair (layer, head), a name "3.1" or "L3H1", or a
            frame with one row.

    Raises:
        InputError: none, or more than one; a layer or a head that does not exist.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> one_head(model, 3, 1), one_head(model, head="L3H1"), one_head(model, head=(3, 1))
        ((3, 1), (3, 1), (3, 1))
    """
    remedy = 'give one head, layer=3, head=1 or head="3.1"'
    named = isinstance(head, str | pd.DataFrame | tuple | list)
    if head is None or (layer is None and not named):
        raise InputError(f"head={head!r}: {remedy}")
    if (
        isinstance(head, tuple | list)
        and len(head) == 2
        and not any(isinstance(one, str | tuple | list) for one in head)
    ):
        head = [tuple(head)]
    chosen: Any = head if named else [head]
    found = select_heads(model, None if layer is None else [layer], chosen)
    pairs = [(at, index) for at, of in found.items() for index in of]
    if len(pairs) != 1:
        raise InputError(f"head={head!r}: these are {len(pairs)} heads; {remedy}")
    return pairs[0]


def check_indices(indices: Layers, n: int, kind: str, owner: str = "this model") -> list[int]:
    """Return the chosen layers or heads in order, or all; InputError where their owner does not have one."""
    if indices is None:
        return list(range(n))
    given = _listed(indices, kind)
    if not given:
        raise InputError(f"no {kind}s chosen; leave {kind}s out to have all {n}")
    return sorted({_index(index, n, kind, owner=owner) for index in given})


def _index(value: Any, n: int, kind: str, place: str = "", owner: str = "this model") -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise InputError(
            f"{place}{kind} {value!r} is {type(value).__name__}, not an integer; choose from {kind}s 0 to {n - 1}"
        )
    index = operator.index(value)
    if not 0 <= index < n:
        raise InputError(f"{place}{kind} {index} does not exist: {owner} has {kind}s 0 to {n - 1}")
    return index


def _listed(values: Any, kind: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values  # arrays and tensors
    if isinstance(values, int) and not isinstance(values, bool):
        return [values]
    # an iterator can be read once, and the choice is needed for each model
    if isinstance(values, str | bytes | Mapping | Iterator) or not isinstance(values, Iterable):
        pairs = " or (layer, head) pairs or names" if kind == "head" else ""
        raise InputError(f"{kind}s={values!r}: give a list of integers{pairs}, such as {kind}s=[0, 1]")
    return list(values)
