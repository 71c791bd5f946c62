"""Fixtures that every floor's tests share."""

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of reference models and texts beside the checkout."""
    if not (SHARED / "models").is_dir():
        pytest.skip("reference models are not here: no directory ../shared/models")
    return SHARED
