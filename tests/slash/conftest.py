"""What the tests of slash measures share, made once a session."""

import pytest

import tl_posgen
from tl_posgen.slash import BandAblation, SlashAblation

THIRDS = {"schemes": ["thirds"]}  # half of the conditions
MEASURES = ["slash", "slash_planes", SlashAblation(**THIRDS), "slash_transfer", "cone", BandAblation(**THIRDS), "loss"]
LONG = {"length": 64, "n_prompts": 2, "progress": False}
SINGLE = {"length": 80, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="session")
def report(mini, alice):
    """Every measure on two prompts of 64 tokens, with one random init; cone and planes are in `single`."""
    measures = ["slash", SlashAblation(**THIRDS), "slash_transfer", BandAblation(**THIRDS)]
    return tl_posgen.analyze(mini, alice, measures=measures, **LONG)


@pytest.fixture(scope="session")
def single(mini, alice):
    """Cone and planes on one prompt of 80 tokens, with one random init."""
    return tl_posgen.analyze(mini, alice, measures=["slash", "slash_planes", "cone"], **SINGLE)


@pytest.fixture(scope="session")
def small(family_model, alice):
    """Every measure of a tiny model on one short prompt, with one random init."""
    return tl_posgen.analyze(family_model("llama"), alice, measures=MEASURES, length=24, n_prompts=1, progress=False)


@pytest.fixture(params=["bundled", "stories"])
def trained(request, mini, alice):
    """A trained model and a text."""
    if request.param == "bundled":
        return mini, alice
    return request.getfixturevalue("stories"), request.getfixturevalue("tinystories")
