"""Arithmetic of products: full precision inside, the user's choice again outside, by either of torch's interfaces."""

import subprocess
import sys
from threading import Barrier, Thread

import pytest
import torch

from tl_posgen.arithmetic import TF32, full_precision, rounding_unit, row_ranges, tf32_allowed

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


CHOICES = {
    "cuda, newer": "matmul.fp32_precision = 'tf32'",
    "cuda, older": "matmul.allow_tf32 = True",
    "older, then not on cuda": "torch.set_float32_matmul_precision('high'); matmul.fp32_precision = 'ieee'",
    "all, newer": "torch.backends.fp32_precision = 'tf32'",
    "none": "pass",
}
STATE = """
def state():
    return [matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, torch.backends.fp32_precision]
"""


@pytest.mark.slow
def test_of_two_threads_the_last_that_leaves_ends_full_precision():
    torch.set_float32_matmul_precision("high")
    both_inside, one_left, seen = Barrier(2, timeout=30), Barrier(2, timeout=30), []

    def first():
        with full_precision():
            both_inside.wait()
        one_left.wait()

    def second():
        with full_precision():
            both_inside.wait()
            one_left.wait()
            seen.append((torch.get_float32_matmul_precision(), tf32_allowed()))

    threads = [Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [("highest", False)]
    assert (torch.get_float32_matmul_precision(), tf32_allowed()) == ("high", True)


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch 2.9 has the newer interface")
def test_either_interface_is_as_before_afterwards():
    """Each choice in a process of its own, as torch refuses to mix both: children of one that has imported torch."""
    lines = [
        "import os, torch; from tl_posgen.arithmetic import full_precision, tf32_allowed",
        f"for choice, words in {[(choice, of_choice(choice)) for choice in CHOICES]}:",
        "    if os.fork() == 0:",
        "        exec(words)",
        "        os._exit(0)",
        "    assert os.wait()[1] == 0, choice",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def of_choice(choice: str) -> str:
    """What is asserted where a user has chosen so."""
    lines = (
        f"matmul = torch.backends.cuda.matmul{STATE}",
        f"{CHOICES[choice]}",
        "before = state()",
        "with full_precision(): assert not tf32_allowed() and state()[0] in ('none', 'ieee')",
        "assert state() == before, (before, state())",
        "torch.backends.fp32_precision = 'ieee'",
        f"assert tf32_allowed() == {choice in ('cuda, newer', 'cuda, older')}",
    )
    return "\n".join(lines)


def test_the_unit_of_rounding_is_that_of_the_products():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert rounding_unit(torch.bfloat16, cuda) == 2.0**-7
    assert rounding_unit(torch.float64, cuda) == rounding_unit(torch.float32, cuda) == 2.0**-23
    torch.set_float32_matmul_precision("high")
    assert rounding_unit(torch.float32, cuda) == TF32 > rounding_unit(torch.float32, cpu)
    assert rounding_unit(torch.bfloat16, cuda) == 2.0**-7


@pytest.mark.parametrize(("n", "row", "step"), [(13, 40, 2), (1, 1, 100), (5, 1000, 1), (4, 25, 4), (0, 0, 1)])
def test_ranges_of_rows_cover_them_all_once(n, row, step):
    ranges = list(row_ranges(n, row, at_once=100))
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(n))
    assert all(stop - start == step for start, stop in ranges[:-1])
