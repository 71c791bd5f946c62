"""Arithmetic of products: full precision inside, the user's choice again outside, by either of torch's interfaces."""

import subprocess
import sys

import pytest
import torch

from tl_posgen.arithmetic import TF32, full_precision, rounding_unit, tf32_allowed

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_of_full_precision_inside_and_as_before_outside(precision):
    torch.set_float32_matmul_precision(precision)
    inside = []

    @full_precision()
    def fail():
        inside.append((torch.get_float32_matmul_precision(), tf32_allowed()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [("highest", False)]
    assert torch.get_float32_matmul_precision() == precision
    assert tf32_allowed() == (precision != "highest")


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch 2.9 has the newer interface")
def test_the_newer_interface_is_respected_too():
    """In a process of its own: torch refuses to mix both."""
    lines = (
        "import torch; from tl_posgen.arithmetic import full_precision, tf32_allowed",
        "matmul = torch.backends.cuda.matmul; matmul.fp32_precision = 'tf32'; assert tf32_allowed()",
        "with full_precision(): assert matmul.fp32_precision == 'ieee' and not tf32_allowed()",
        "assert matmul.fp32_precision == 'tf32'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_the_unit_of_rounding_is_that_of_the_products():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert rounding_unit(torch.bfloat16, cuda) == 2.0**-7
    assert rounding_unit(torch.float64, cuda) == rounding_unit(torch.float32, cuda) == 2.0**-23
    torch.set_float32_matmul_precision("high")
    assert rounding_unit(torch.float32, cuda) == TF32 > rounding_unit(torch.float32, cpu)
    assert rounding_unit(torch.bfloat16, cuda) == 2.0**-7
