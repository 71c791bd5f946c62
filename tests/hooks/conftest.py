"""What the tests of this folder share beside tests/conftest.py."""

import pytest


@pytest.fixture
def llama(family_model):
    """A tiny Llama with grouped keys."""
    return family_model("llama")


@pytest.fixture
def model(family_model, backend):
    """The same on either backend."""
    return family_model("llama", backend)
