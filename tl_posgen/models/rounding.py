"""Rounding of a model's arithmetic, where it may be why a proof fails."""

import torch


def rounding_remedy(dtype: torch.dtype) -> str:
    """Say what removes the rounding of a model in half precision, as a sentence behind another; "" for wider dtypes.

    Example:
        >>> rounding_remedy(torch.bfloat16)
        ' Or rounding in bfloat16: load the model with dtype="float32".'
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return ""
    return f' Or rounding in {str(dtype).removeprefix("torch.")}: load the model with dtype="float32".'
