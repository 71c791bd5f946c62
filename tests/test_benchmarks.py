"""What `make profile` counts is named by strings, which no type checker sees."""

import subprocess
import sys
from pathlib import Path

import pytest

PARTS = Path(__file__).parent.parent / "benchmarks" / "parts.py"


@pytest.mark.slow
def test_the_profile_of_an_analysis_counts_every_part():
    done = subprocess.run([sys.executable, PARTS, "--length", "16"], capture_output=True, text=True, check=True)
    parts = {line[:24].strip() for line in done.stdout.splitlines()[1:]}
    assert {"forward passes", "proof of each pass", "null models made", "variance", "sums over prompts"} <= parts
