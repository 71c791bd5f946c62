"""What the tests of slash measures share, made once a session."""

from functools import partial

import pytest

import tl_posgen
from tl_posgen.core.measure import with_token_variants
from tl_posgen.core.result import Result, joined
from tl_posgen.core.sums import Sums
from tl_posgen.models import run_capture
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


@pytest.fixture(scope="session")
def by_hand():
    """(measure, model, rows of token ids) -> its result, from `of_layer` and `finish` alone."""

    def measured(measure, model, rows):
        sums = Sums(measure.variables, measure.labels())

        def consumer(layer, number):
            layer.prompt = number
            sums.add_layer(layer, with_token_variants(measure.of_layer(layer)))

        for number, row in enumerate(rows):
            run_capture(model, row[None], partial(consumer, number=number), measure.needs)
        return Result(measure, joined(measure, {"trained": measure.finish(sums)}, ["model"]))

    return measured
