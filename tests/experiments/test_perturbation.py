"""Disturbed order on the bundled model."""

import numpy as np
import pytest
import torch
from families import save_family

from tl_posgen import load, load_model
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.perturbation import ARMS, arms_for, disturbed, drawn, perturbation, words_of
from tl_posgen.models.tokens import bundled_text, to_prompts, token_strings
from tl_posgen.report.words import perturbation as words

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
    draw = drawn(mini, tokens, arm, "uniform", 0.5, seed=0, window=4, protected=[0, *range(24, 32)])
    read, _ = disturbed(mini, tokens, arm, draw)
    if arm == "words":  # words of other lengths may shift what lies between them
        assert torch.equal(read.sort().values, tokens.sort().values)
    else:
        assert torch.equal(read[24:], tokens[24:])
    assert not draw.moved[24:].any()
    assert not draw.moved[0]


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
    ("wrong", "named"),
    [
        ({"ratios": (0.1, 1.5)}, "ratio 1.5"),
        ({"ratios": (-0.1,)}, "ratio -0.1"),
        ({"ratios": ()}, "ratios"),
        ({"arms": ("letters",)}, "arm 'letters'"),
        ({"reaches": ()}, "reach"),
        ({"window": 0}, "window 0"),
        ({"clean": 1}, "clean 1"),
        ({"seeds": ()}, "seeds"),
        ({"n_prompts": 10**5}, "tokens in 1 text"),
        ({"length": 9999}, "9999 tokens: .*512"),
    ],
)
def test_bad_input_is_refused(mini, wrong, named):
    with pytest.raises(InputError, match=named):
        perturbation(mini, bundled_text(), **{**OPTIONS, **wrong})


def test_the_gap_is_to_the_index_arm(result):
    change = result.dataset.change
    np.testing.assert_allclose(result.dataset.gap, change - change.sel(arm="positions"), atol=1e-12)


def test_where_scores_know_no_distance_only_the_text_is_disturbed(tmp_path):
    model = load_model(save_family("gpt2", tmp_path))
    assert arms_for(model, None) == ["tokens", "words"]
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        arms_for(model, ["positions"])


def test_words_set_index_and_features_side_by_side(result):
    *rises, gaps = words.found(result)
    assert len(rises) == 3
    assert all("at 50% moved" in sentence for sentence in rises)
    assert all("random init" in sentence for sentence in [*rises, gaps])
    assert "position part" in gaps


def test_the_short_table_fits_a_terminal(result):
    table = words.table(result.dataset)
    assert table.shape == (len(ARMS), 8)
    assert (table[table.arm == "positions"].less_P == 0).all()
