"""Forward passes of slash measures: every prompt goes through each model once, every random init is built once."""

from collections import Counter

import pytest

import tl_posgen
from tl_posgen.core import null_models
from tl_posgen.models import geometry_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import BandAblation, Cone, Slash, SlashPlanes, SlashTransfer
from tl_posgen.slash.slash_ablation import ablations
from tl_posgen.slash.slash_transfer import random_prompts

CUT = {"length": 8, "n_prompts": 2}


@pytest.fixture
def passes():
    """(model's number, the prompt) -> how often it went through."""
    return Counter()


@pytest.fixture
def watch(passes):
    """Counts the prompts of a model from now on."""
    handles = []

    def start(model, number):
        def see(_module, args):
            passes.update((number, tuple(row.tolist())) for row in args[0])

        handles.append(model.embed.register_forward_pre_hook(see))

    yield start
    for handle in handles:
        handle.remove()


def prove(model):
    """Make the passes of the proofs, which are not counted."""
    geometry_of(model)
    session_of(model).cached_difference()


@pytest.mark.slow
def test_every_prompt_goes_through_once_and_every_random_init_is_built_once(
    family_model, alice, monkeypatch, passes, watch
):
    llama, built, random_like = family_model("llama"), [], null_models.random_like
    prove(llama)

    def count(model, seed):
        made = random_like(model, seed)
        prove(made)
        built.append(seed)
        watch(made, seed)
        return made

    monkeypatch.setattr(null_models, "random_like", count)
    watch(llama, "own")
    options = (Slash(), SlashPlanes(), Cone(), SlashTransfer(), BandAblation())
    report = tl_posgen.analyze(llama, alice, measures=options, null_seeds=(5,), progress=False, **CUT)
    assert set(report) >= {"slash", "slash_planes", "cone", "slash_transfer", "band_ablation"}
    assert built == [5]
    text = to_prompts(llama, alice, **CUT)
    drawn = random_prompts(text, llama.cfg.d_vocab, seed=0)
    n_conditions = len(ablations(("thirds",), 8))  # the unchanged one too: its scores by prompt
    expected = {}
    for model in ("own", 5):
        expected |= {(model, tuple(prompt.tolist())): 1 + n_conditions for prompt in text}
        expected |= {(model, tuple(prompt.tolist())): 1 for prompt in drawn}
    assert passes == expected
    assert n_conditions == 14
