"""Values that the annotation of an option allows, and values that it does not, drawn by hypothesis."""

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pandas as pd
import torch
from hypothesis import strategies as st

from tl_posgen.core.options import Each, Within

HUGE = 10**30
KINDLESS = [object(), b"x", 1j, ..., {1}, np.zeros((3, 2)), torch.ones(2, 2), pd.DataFrame({"a": [1, 2]})]
SAMPLES = {  # of each kind; whatever kind an option is not of is a wrong type
    "none": st.none(),
    "truth": st.booleans(),
    "number": st.sampled_from([0, 1, -1, 0.5, HUGE]),
    "word": st.sampled_from(["", "0", "no such word", "a\nb", "\ud800"]),
    "list": st.sampled_from([[], [0], (0.5,), ["x"], [None], [[0]]]),
    "mapping": st.sampled_from([{}, {"a": 1}]),
    "other": st.sampled_from(KINDLESS),
}


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union; else the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in members(part)]
    return [annotation]


def is_drawn(annotation: Any) -> bool:
    """Whether an annotation is made of numbers, words, truths and None, and of lists of these."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType, Sequence):
        return all(map(is_drawn, inside))
    return origin is Literal or annotation in (int, float, bool, str, type(None))


def kind_of(annotation: Any) -> str:
    """The entry of `SAMPLES` that an annotation without alternatives is of."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kinds = {kind_of(one) for one in members(inside[0])}
        assert len(kinds) == 1
        return kinds.pop()
    if origin is Literal:
        return "word"
    if isinstance(origin, type):
        return "mapping" if issubclass(origin, Mapping) else "list"
    return {type(None): "none", bool: "truth", int: "number", float: "number", str: "word"}[annotation]


def constraint(annotation: Any, of: type) -> Any:
    """The constraint of this class that an annotation carries; None without one."""
    return next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, of)), None)


def plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def right(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation allows."""
    return st.one_of(*map(right_of_member, members(annotation)))


def right_of_member(annotation: Any) -> st.SearchStrategy[Any]:
    kind, base = kind_of(annotation), plain(annotation)
    if kind == "list":
        items = right(get_args(base)[0])
        each = constraint(annotation, Each) or Each(0, once=False)
        lists = st.lists(items, min_size=each.least, max_size=3, unique=each.once)
        return lists | lists.map(tuple)
    if kind == "number":
        limits = constraint(annotation, Within)
        low, high = (-9, 9) if limits is None else (max(limits.low, -9), min(limits.high, max(limits.low, 0) + 9))
        whole = st.integers(int(np.ceil(low)), int(np.floor(high)))
        numbers = whole | whole.map(np.int64)
        if base is not int:
            numbers |= st.floats(low, high) | st.floats(low, high).map(np.float64)
        return numbers if limits is None else numbers.filter(lambda value: inside(value, limits))
    return st.sampled_from(get_args(annotation)) if get_origin(annotation) is Literal else SAMPLES[kind]


def inside(value: Any, limits: Within) -> bool:
    above = value > limits.low or (value == limits.low and "low" not in limits.excluded)
    return above and (value < limits.high or (value == limits.high and "high" not in limits.excluded))


def wrong(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation does not allow: of another type, out of its range, NaN, huge; lists with such an entry,
    empty ones, and those with an entry twice where that is not allowed."""
    every = members(annotation)
    kinds = [kind_of(one) for one in every]
    of_another_kind = [samples for kind, samples in SAMPLES.items() if kind not in kinds]
    of_its_kind = [wrong_of_member(one) for one, kind in zip(every, kinds, strict=True) if kinds.count(kind) == 1]
    return st.one_of(*of_another_kind, *(one for one in of_its_kind if one is not None))


def wrong_of_member(annotation: Any) -> st.SearchStrategy[Any] | None:
    """Values of the right kind that are not allowed; None where all are."""
    kind, base = kind_of(annotation), plain(annotation)
    if get_origin(annotation) is Literal:
        return SAMPLES["word"]
    if kind == "list":
        entry = get_args(base)[0]
        found = [st.tuples(wrong(entry)).map(list)]
        if each := constraint(annotation, Each):
            found += [right(entry).map(lambda value: [value, value])] if each.once else []
            found += [st.just([]), st.just(())] if each.least else []
        return st.one_of(*found)
    if kind == "number":
        limits = constraint(annotation, Within)
        values: list[Any] = [HUGE, -HUGE] + ([0.5, np.float64(1.5)] if base is int else [])
        if limits is not None:
            values += [float("nan"), float("inf"), float("-inf"), np.float32("nan")]
            values += [limits.low - 1] if np.isfinite(limits.low) else []
            values += [limits.high + 1] if np.isfinite(limits.high) else []
            values += [limits.low] if "low" in limits.excluded else []
            values += [limits.high] if "high" in limits.excluded else []
        return st.sampled_from(values)
    return None
