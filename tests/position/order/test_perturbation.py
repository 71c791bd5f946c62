"""Disturbed order on the bundled model."""

import numpy as np
import pytest
import torch

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.hooks import permute_positions
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.position.order import Perturbation, cloze, swap_tokens
from tl_posgen.position.order.hooks import CONDITIONS, conditions_for, disturb, draw, words_of
from tl_posgen.position.order.perturbation import WORDS

CUT = {"length": 48, "n_prompts": 2, "progress": False}
QUIET = {**CUT, "nulls": 0}
ONE = {"ratios": (0.5,), "reaches": ("uniform",)}


@pytest.fixture(scope="session")
def result(mini, alice):
    measure = Perturbation(ratios=(0, 0.5), reaches=("adjacent", "uniform"), n_cloze=4, cloze_conditions=None)
    return measure(mini, alice, **{**CUT, "n_prompts": 4})


@pytest.mark.longer
def test_nothing_moved_changes_nothing_and_half_of_the_order_costs_loss(result):
    np.testing.assert_allclose(result.trained["change"].sel(ratio=0), 0, atol=1e-4)
    for condition in ("tokens", "words", "positions"):
        assert result.numbers("change", condition=condition, ratio=0.5).value > 0.05
    swapped = result.trained["moved"].sel(condition=["tokens", "positions"], ratio=0.5)
    np.testing.assert_allclose(swapped.mean(("draw", "prompt")), 0.5, atol=0.03)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_protected_places_stay_in_order(mini, alice, condition):
    tokens = to_prompts(mini, alice, length=32, n_prompts=1)[0]
    drawn = draw(session_of(mini), tokens, condition, "uniform", 0.5, seed=0, window=4, protected=[0, *range(24, 32)])
    read = disturb(session_of(mini), tokens[None], condition, [drawn])[0][0]
    if condition == "words":  # words of other lengths may shift what lies between them
        assert torch.equal(read.sort().values, tokens.sort().values)
    else:
        assert torch.equal(read[24:], tokens[24:])
    assert not drawn.moved[24:].any()
    assert not drawn.moved[0]


def test_words_begin_at_white_space(mini):
    tokens = to_prompts(mini, "The extraordinarily small rabbit, perhaps.")[0]
    texts = token_strings(mini, tokens)
    words = ["".join(texts[start:stop]).strip() for start, stop in words_of(session_of(mini), tokens)]
    assert words[-4:] == ["extraordinarily", "small", "rabbit", "perhaps"]


def test_draws_of_one_seed_are_all_different_from_those_of_another(mini, alice):
    measure = Perturbation(**ONE, n_draws=2, conditions=("positions",), n_cloze=0)
    both = [measure(mini, alice, **QUIET, seed=seed).trained["change"] for seed in (0, 1)]
    assert len(np.unique(np.concatenate([one.sel(target="all").values.ravel() for one in both]))) == 2 * 2 * 2
    tokens = to_prompts(mini, alice, length=48, n_prompts=2)[1]
    swaps = swap_tokens(48, 0.5, seed=(1 * 2 + 0) * 2 + 1, protected=[0, *range(36, 48)])
    difference = token_losses(mini, tokens[None], permute_positions(mini, swaps.permutation))
    difference = (difference - token_losses(mini, tokens[None]))[0]
    masks = {"all": slice(None), "unmoved": ~swaps.moved[1:], "suffix": slice(35, None)}
    second_prompt = both[1].sel(draw=0, prompt=1).squeeze()
    for target, mask in masks.items():
        assert float(second_prompt.sel(target=target)) == pytest.approx(float(difference[mask].mean()), abs=1e-6)


@pytest.mark.longer
def test_tokens_are_coloured_by_the_change_of_their_loss(mini, alice, result):
    tokens = to_prompts(mini, alice, length=48, n_prompts=1)[0]
    swaps = swap_tokens(48, 0.5, seed=0, protected=[0, *range(36, 48)])
    read = tokens[swaps.permutation]
    shown = result.trained.sel(condition="tokens")
    assert shown["token_text"].values.tolist() == token_strings(mini, read[1:])
    change = (token_losses(mini, read[None]) - token_losses(mini, tokens[None]))[0]
    np.testing.assert_allclose(shown["token_change"], change, atol=1e-6)
    assert result.token_labels()[3].startswith(f"{WORDS['key_positions']}, 50% moved: ")
    assert f"{float(shown['token_change'][5]):.4f}".rstrip("0") in result.show(0).local_src


@pytest.mark.longer
def test_random_inits_are_given_the_first_items_of_a_long_cloze(mini, alice, monkeypatch):
    measure = Perturbation(**ONE, n_draws=1, n_cloze=4, conditions=("words",))
    every = measure(mini, alice, **CUT)
    monkeypatch.setattr(cloze, "ITEMS_OF_INITS", 2)
    found = measure(mini, alice, **CUT)
    for one, n in ((found.trained, 4), (found.null, 2)):
        whole = (every.trained if n == 4 else every.null)["cloze_log_likelihood"]
        np.testing.assert_allclose(one["cloze_log_likelihood"].isel(item=slice(n)), whole.isel(item=slice(n)))
        assert one["cloze_accuracy"].isel(item=slice(n, None)).isnull().all()
    assert every.null["cloze_accuracy"].notnull().all()
    assert "A cloze of 4 passages of the text (random init 2), 50% of the context moved" in " ".join(found.findings())


def test_where_scores_know_no_distance_only_the_text_is_disturbed(family_model):
    model = family_model("gpt2")
    assert conditions_for(session_of(model), None) == ["tokens", "words"]
    for wanted in ({"conditions": ["positions"]}, {"conditions": None, "heads": (0, 0)}):
        with pytest.raises(UnsupportedModelError, match="layer 0"):
            conditions_for(session_of(model), **wanted)


def test_chosen_heads_are_disturbed_alone(mini, alice):
    heads = [(0, 1), (2, 3)]
    found = Perturbation(**ONE, n_draws=1, n_cloze=1)(mini, alice, heads=heads, **QUIET)
    assert found.trained["condition"].values.tolist() == ["positions", "key_positions", "jitter", "position_part"]
    tokens = to_prompts(mini, alice, length=48, n_prompts=1)[0]
    swaps = swap_tokens(48, 0.5, seed=0, protected=[0, *range(36, 48)])
    hooks = permute_positions(mini, swaps.permutation, heads=heads)
    expected = float((token_losses(mini, tokens[None], hooks) - token_losses(mini, tokens[None])).mean())
    change = found.trained["change"].sel(condition="positions", prompt=0, target="all")
    assert float(change.squeeze()) == pytest.approx(expected, abs=1e-6)


def test_one_prompt_has_no_interval(mini):
    options = {"ratios": (0, 0.5), "conditions": ("positions", "jitter"), "reaches": ("uniform",), "n_draws": 1}
    found = Perturbation(**options)(mini, torch.arange(24)[None] + 300, nulls=0, progress=False)
    change = found.numbers("change", condition="positions", ratio=0.5)
    assert np.isnan(change.low)
    assert "cloze_accuracy" not in found.trained  # 24 tokens hold no passage of 40 words
    assert f"{change.value:+.3f} at 50% moved" in found.findings()[0]
    unmoved = found.trained["change"].sel(target="unmoved", condition="positions", reach="uniform").squeeze()
    np.testing.assert_allclose(found.plot().data[0].y, unmoved)
