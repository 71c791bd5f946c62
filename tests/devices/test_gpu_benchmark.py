"""The benchmarks for GPUs run wherever torch has CUDA."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def printed_by(device, monkeypatch, capsys):
    """A benchmark and its arguments -> its output."""
    if device.name not in ("two", "gpu"):
        pytest.skip("one kind of CUDA is enough")

    def printed(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(BENCHMARKS)
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_analyses_and_kernels_of_one_layer(printed_by):
    small = ["--heads", "4", "--d-head", "8", "--lengths", "16", "24", "--rounds", "1", "--copied", "1024"]
    printed = printed_by("gpu.py", *small)
    assert printed.count("default measures, streamed") == printed.count("TripleMoments") == 2


def test_steps_of_whole_models(printed_by):
    assert printed_by("gpu_models.py", "--models", "tiny", "--lengths", "16", "24", "--rounds", "1").count("tiny") == 2
