"""What the tests of this folder share beside tests/conftest.py."""

import pytest

from tl_posgen.models.loading.load import load_model


@pytest.fixture
def llama(family_model, backend):
    """A tiny Llama with grouped keys on either backend."""
    return family_model("llama", backend)


@pytest.fixture
def model(family_directory, backend):
    """Such a model of the test's own, to change."""
    return load_model(family_directory("llama"), backend)
