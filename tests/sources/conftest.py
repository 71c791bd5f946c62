"""Shared by the tests of this folder: the sources measure of the mini model, beside a random init."""

import pytest

from tl_posgen.core.engine import analyze


@pytest.fixture(scope="session")
def report(mini, alice):
    """Sources and the variance of the same four prompts of 64 tokens."""
    cut = {"length": 64, "n_prompts": 4, "null_seeds": (0,), "progress": False}
    return analyze(mini, alice, measures=["sources", "variance"], **cut)


@pytest.fixture(scope="session")
def result(report):
    return report["sources"]
