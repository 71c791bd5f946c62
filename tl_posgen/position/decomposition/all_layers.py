"""Variables of many layers, computed of all their heads at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tl_posgen.core.measure import Measure


def of_all_layers(
    measure: Measure, found: Sequence[Any], variables_of: Callable[[Any], Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return the variables of each layer by name; of those with the same pairs they are computed at once.

    Args:
        measure: that declares the variables.
        found: `PairMoments` of each layer, or another class with `pairs`, `n_heads` and `joined`.
        variables_of: from the joined ones to the variables of all heads.
    """
    alike: dict[Any, list[int]] = {}
    for number, one in enumerate(found):
        alike.setdefault(one.pairs, []).append(number)
    values: list[dict[str, Tensor]] = [{} for _ in found]
    for numbers in alike.values():
        some = [found[number] for number in numbers]
        for name, of_heads in variables_of(type(some[0]).joined(some)).items():
            axis = measure.variables[name].dims.index("head") - 1  # the layer is left out
            parts = of_heads.split([one.n_heads for one in some], axis)
            for number, part in zip(numbers, parts, strict=True):
                values[number][name] = part
    return values
