"""Disturbed order on the bundled model."""

import numpy as np
import pytest
import torch

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.perturbation import ARMS, perturb, perturbation, words_of
from tl_posgen.models.tokens import bundled_text, to_prompts, token_strings

OPTIONS = {"length": 48, "n_prompts": 2, "seeds": (0,), "progress": False}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return perturbation(mini, bundled_text(), ratios=(0, 0.5), reaches=("adjacent", "uniform"), **OPTIONS)


def test_nothing_moved_changes_nothing(result):
    np.testing.assert_allclose(result.dataset.change.sel(ratio=0), 0, atol=1e-4)


def test_half_of_the_order_lost_costs_the_trained_model_loss(result):
    lost = result.dataset.change.sel(ratio=0.5, target="all", arm=["tokens", "words", "positions"], reach="uniform")
    assert (lost > 0.05).all()


def test_the_asked_share_is_moved(result):
    swapped = result.dataset.moved.sel(arm=["tokens", "positions"], ratio=0.5)
    np.testing.assert_allclose(swapped, 0.5, atol=0.03)


@pytest.mark.parametrize("arm", ARMS)
def test_protected_places_stay_in_order(mini, arm):
    tokens = to_prompts(mini, bundled_text(), length=32, n_prompts=1)[0]
    done = perturb(mini, tokens, arm, "uniform", 0.5, seed=0, window=4, protected=[0, *range(24, 32)])
    if arm == "words":  # words of other lengths may shift what lies between them
        assert torch.equal(done.tokens.sort().values, tokens.sort().values)
    else:
        assert torch.equal(done.tokens[24:], tokens[24:])
    assert not done.moved[24:].any()
    assert not done.moved[0]


def test_words_begin_at_white_space(mini):
    tokens = to_prompts(mini, "The extraordinarily small rabbit, perhaps.")[0]
    texts = token_strings(mini, tokens)
    words = ["".join(texts[start:stop]).strip() for start, stop in words_of(mini, tokens)]
    assert words[-4:] == ["extraordinarily", "small", "rabbit", "perhaps"]


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("curves", "matched"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert len(result.frame()) == len(ARMS) * 2 * 2 * 3
    assert load(result.save(tmp_path / "r.nc"))["perturbation"].dataset.equals(result.dataset)


@pytest.mark.parametrize(
    "wrong", [{"ratios": (0.1, 1.5)}, {"arms": ("letters",)}, {"reaches": ()}, {"seeds": ()}, {"n_prompts": 10**5}]
)
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        perturbation(mini, bundled_text(), **{**OPTIONS, **wrong})
