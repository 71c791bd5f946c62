"""Rounding is named where it may be why a proof fails, with what removes it."""

import pytest
import torch

from tl_posgen.cli.options import name_options
from tl_posgen.models.rounding import rounding_remedy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # a name: no device is needed


@pytest.fixture(params=["set_float32_matmul_precision", "allow_tf32", "fp32_precision"])
def _tf32(request):
    """TF32 in each of the ways in which torch takes it."""
    matmul = torch.backends.cuda.matmul
    if request.param == "fp32_precision" and not hasattr(matmul, request.param):
        pytest.skip("this torch has no fp32_precision")
    if request.param == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        setattr(matmul, request.param, True if request.param == "allow_tf32" else "tf32")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_names_the_option_of_load_model_and_of_the_command_line(dtype):
    remedy = rounding_remedy(getattr(torch, dtype), CPU)
    assert remedy == f' Or rounding in {dtype}: load the model with dtype="float32".'
    assert name_options(remedy, "three-axis").endswith("load the model with --dtype float32.")


@pytest.mark.usefixtures("_tf32")
def test_tf32_is_named_on_cuda_only_and_of_float32_only():
    assert "rounding to TF32" in rounding_remedy(torch.float32, CUDA, is_tf32=True)
    assert rounding_remedy(torch.float32, CUDA, is_tf32=False) == ""
    assert rounding_remedy(torch.float32, CPU, is_tf32=True) == ""
    assert rounding_remedy(torch.float64, CUDA, is_tf32=True) == ""


def test_full_precision_has_no_remedy():
    assert rounding_remedy(torch.float32, CUDA, is_tf32=True) == ""
