"""What the tests of this folder share beside tests/conftest.py."""

import pytest

from tl_posgen.prompt import Reference, reference_of


@pytest.fixture(scope="session")
def reference(mini) -> Reference:
    """Means of the bundled model over a little of the bundled book."""
    return reference_of(mini, length=48, n_prompts=2)
