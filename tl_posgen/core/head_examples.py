"""Examples of heads: which are shown, and what a measure keeps of them on one prompt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.core.measure import LABELS
from tl_posgen.core.run import Run
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.tokens import token_strings

_MOST_CHOSEN = 6  # heads that are all shown where the user chose them
Pick = tuple[int, int, str]  # layer, head, why


def pick_heads(values: pd.Series, n: int, why: tuple[str, str], chosen: Any = None) -> list[Pick]:
    """Return (layer, head, why) of the n heads with the highest values, and of the n with the lowest; all where the
    user has chosen a few heads."""
    ranked = values.dropna().sort_values(ascending=False)
    heads = [(int(layer), int(head)) for layer, head in ranked.index.to_list()]
    if chosen is not None and len(heads) <= _MOST_CHOSEN:
        return [(*head, "chosen") for head in heads]
    n = max(1, min(n, len(heads) // 2))
    highest = [(*head, why[0]) for head in heads[:n]]
    return highest + [(*head, why[1]) for head in heads[-n:] if head not in heads[:n]]


def head_examples(
    run: Run,
    row: Int[Tensor, " pos"],
    n: int,
    picks: Sequence[Pick],
    of_layer: Callable[[LayerCapture], Mapping[str, Tensor]],
    **where: Any,
) -> xr.Dataset:
    """Return the picked heads of one prompt along "example", with layer, head and why, and the texts of its first n
    tokens along "key".

    Args:
        of_layer: from a captured layer to arrays [head, *dims of the variable, "example" left out] by name.
        where: layers and heads that are captured; the picked heads if left out.
    """
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    chosen = {(layer, head) for layer, head, _ in picks}

    def keep(layer: LayerCapture) -> None:
        arrays = {name: array.cpu().numpy() for name, array in of_layer(layer).items()}
        for place, head in enumerate(layer.heads):
            if (layer.layer, head) in chosen:
                found[layer.layer, head] = {name: array[place].copy() for name, array in arrays.items()}

    if picks:
        run_capture(run.session, row[None], keep, **(where or {"heads": [*chosen]}))
    labels: dict[str, Any] = {**LABELS, **run.measure.labels()}
    data = {}
    for name, variable in run.measure.variables.items():
        if "example" in variable.dims:
            inner = tuple(dim for dim in variable.dims if dim != "example")
            empty = np.zeros((0, *(len(labels.get(dim, range(n))) for dim in inner)))
            values = np.stack([found[layer, head][name] for layer, head, _ in picks]) if picks else empty
            data[name] = (("example", *inner), values)
    used = {dim for dims, _ in data.values() for dim in dims}
    coords: dict[str, Any] = {dim: list(one) for dim, one in labels.items() if dim in used}
    coords["example"] = np.arange(len(picks))
    coords |= {name: ("example", [one[at] for one in picks]) for at, name in enumerate(("layer", "head", "why"))}
    coords["token"] = ("key", np.array(token_strings(run.session, row[:n]), dtype=object))  # numpy's texts lose NULs
    return xr.Dataset(data, coords)
