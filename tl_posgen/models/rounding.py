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
    if is_tf32 and dtype == torch.float32 and device.type == "cuda" and multiplies_in_tf32():
        return (
            " Here it is rounding to TF32, in which CUDA multiplies float32 matrices now: call "
            'torch.set_float32_matmul_precision("highest") before the model is loaded.'
        )
    return ""


def multiplies_in_tf32() -> bool:
    """Tell whether CUDA's products of float32 matrices are rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9; the older names raise where this one was set
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32
