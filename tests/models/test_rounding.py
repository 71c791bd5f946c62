"""Rounding is named where it may be why a proof fails, with what removes it."""

import pytest
import torch

from tl_posgen.cli.options import name_options
from tl_posgen.models.rounding import rounding_remedy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # a name: no device is needed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_names_the_option_of_load_model_and_of_the_command_line(dtype):
    remedy = rounding_remedy(getattr(torch, dtype), CPU)
    assert remedy == f' Or rounding in {dtype}: load the model with dtype="float32".'
    assert name_options(remedy, "three-axis").endswith("load the model with --dtype float32.")


def test_tf32_is_named_on_cuda_only_and_of_float32_only():
    assert "rounding to TF32" in rounding_remedy(torch.float32, CUDA, is_tf32=True)
    assert rounding_remedy(torch.float32, CUDA, is_tf32=False) == ""
    assert rounding_remedy(torch.float32, CPU, is_tf32=True) == ""
    assert rounding_remedy(torch.float64, CUDA, is_tf32=True) == ""
