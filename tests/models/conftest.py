"""Models for the tests of this folder: every tiny family, saved once, loaded once per backend."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/families.py, whatever pytest's import mode

from families import save_family

from tl_posgen.errors import ModelError
from tl_posgen.models.convert import hooked_parts
from tl_posgen.models.load import load_model


@cache
def why_no_hooked() -> str | None:
    try:
        hooked_parts()
    except ModelError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def family_directory(tmp_path_factory):
    """name -> the directory of that tiny model."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def directory(name: str) -> Path:
        return save_family(name, root / name)

    return directory


@pytest.fixture(scope="session")
def family_model(family_directory):
    """(name, backend) -> that tiny model, one object for the whole session: leave it as it is."""

    @cache
    def load(name: str, backend: str):
        return load_model(family_directory(name), backend=backend)

    def model(name: str, backend: str):
        if backend == "hooked" and why_no_hooked():
            pytest.skip(why_no_hooked())
        return load(name, backend)

    return model


@pytest.fixture(params=["hooked", "bridge"])
def backend(request) -> str:
    if request.param == "hooked" and why_no_hooked():
        pytest.skip(why_no_hooked())
    return request.param


@pytest.fixture
def llama(family_model, backend):
    """A tiny Llama with grouped keys on either backend."""
    return family_model("llama", backend)
