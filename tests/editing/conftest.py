"""What the tests of this folder share beside tests/conftest.py."""

import pytest


@pytest.fixture
def model(family_model, backend):
    """A tiny Llama with grouped keys on either backend."""
    return family_model("llama", backend)
