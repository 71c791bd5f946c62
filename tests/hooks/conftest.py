"""Models for the tests of this folder: every tiny family, saved once, loaded once per backend."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/families.py, whatever pytest's import mode

from families import save_family

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.loading.load import load_model


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """Return a function (name, backend) -> tiny model, one object for the whole session: do not change it."""

    @cache
    def made(name: str, backend: str):
        return load_model(save_family(name, tmp_path_factory.mktemp(name)), backend=backend)

    def model(name: str, backend: str = "auto"):
        if backend == "hooked":
            try:
                hooked_parts()
            except ModelError as error:
                pytest.skip(str(error))
        return made(name, backend)

    return model


@pytest.fixture(scope="session")
def llama(load):
    return load("llama")
