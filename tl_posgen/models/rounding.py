"""Rounding of a model's arithmetic, where it may be why a proof fails."""

import torch


def rounding_remedy(dtype: torch.dtype, device: torch.device, *, is_tf32: bool = False) -> str:
    """Say what removes the rounding of a model of this dtype on this device, as a sentence behind another; "" where
    nothing does.

    Args:
        is_tf32: whether the error is as small as TF32's.

    Example:
        >>> rounding_remedy(torch.bfloat16, torch.device("cpu"))
        ' Or rounding in bfloat16: load the model with dtype="float32".'
        >>> rounding_remedy(torch.float32, torch.device("cpu"))
        ''
    """
    if dtype.itemsize < torch.float32.itemsize:
        return f' Or rounding in {str(dtype).removeprefix("torch.")}: load the model with dtype="float32".'
    if is_tf32 and dtype == torch.float32 and device.type == "cuda":
        return (
            " Or rounding to TF32, which CUDA may multiply float32 matrices in: call "
            'torch.set_float32_matmul_precision("highest") before the pass.'
        )
    return ""
