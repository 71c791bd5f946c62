"""Variables of many layers, computed of all their heads at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tl_posgen.core.measure import Measure


def of_all_layers(
    measure: Measure, layer_sums: Sequence[Any], variables_of: Callable[[Any], Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return the variables of each layer by name; of those with the same pairs they are computed at once.

    Args:
        measure: that declares the variables.
        layer_sums: `PairMoments` of each layer, or another class with `pairs`, `n_heads` and `joined`.
        variables_of: from the joined ones to the variables of all heads.
    """
    alike: dict[Any, list[int]] = {}
    for number, sums in enumerate(layer_sums):
        alike.setdefault(sums.pairs, []).append(number)
    values: list[dict[str, Tensor]] = [{} for _ in layer_sums]
    for numbers in alike.values():
        group = [layer_sums[number] for number in numbers]
        for name, of_heads in variables_of(type(group[0]).joined(group)).items():
            axis = measure.variables[name].dims.index("head") - 1  # the layer is left out
            of_layers = of_heads.split([sums.n_heads for sums in group], axis)
            for number, of_layer in zip(numbers, of_layers, strict=True):
                values[number][name] = of_layer
    return values
