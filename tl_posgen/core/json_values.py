"""Values as JSON can hold them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def jsonable(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinity, which JSON lacks, become null, arrays lists, others words.

    Example:
        >>> jsonable({"r": np.float32(0.5), "curve": np.array([1.0, np.nan]), 3: (True, None)})
        {'r': 0.5, 'curve': [1.0, None], '3': [True, None]}
    """
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    return [jsonable(one) for one in value] if isinstance(value, Sequence) else str(value)
