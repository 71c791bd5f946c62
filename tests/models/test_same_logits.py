"""Rounding is named where it may be why a proof fails, with what removes it."""

import pytest
import torch

from tl_posgen.cli.commands import name_options
from tl_posgen.models.same_logits import rounding_remedy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_names_the_option_of_load_model_and_of_the_command_line(dtype):
    remedy = rounding_remedy(getattr(torch, dtype))
    assert remedy == f' Or rounding in {dtype}: load the model with dtype="float32".'
    assert name_options(remedy, "three-axis").endswith("load the model with --dtype float32.")


def test_wider_dtypes_have_no_remedy():
    assert rounding_remedy(torch.float32) == rounding_remedy(torch.float64) == ""
