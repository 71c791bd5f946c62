"""The benchmark for GPUs runs wherever torch has CUDA."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_the_benchmark_prints_analyses_and_kernels(device, monkeypatch, capsys):
    if device.name != "two":
        pytest.skip("one kind of CUDA is enough")
    small = ["--heads", "4", "--d-head", "8", "--lengths", "16", "24", "--rounds", "1", "--copied", "1024"]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), *small])
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("default measures, streamed") == printed.count("TripleMoments") == 2
