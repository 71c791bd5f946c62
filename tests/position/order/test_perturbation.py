"""Disturbed order on the bundled model."""

import json

import numpy as np
import pytest
import torch
from declared import assert_declared

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.position.order import Perturbation, permute_positions, perturbation, swap_tokens
from tl_posgen.position.order.disturbance import CONDITIONS, conditions_for, disturb, draw, words_of
from tl_posgen.summary import jsonable

CUT = {"length": 48, "n_prompts": 4, "progress": False}
QUIET = {**CUT, "null_seeds": (), "n_draws": 1}
REFERENCE = {  # rise of the loss in nats with 5, 20 and 50 % moved, over any distance
    "tokens": [0.3627, 2.1377, 3.9501],
    "words": [0.3973, 0.7393, 1.9288],
    "positions": [0.0343, 0.3535, 1.0061],
    "key_positions": [-0.0133, 0.1855, 0.8778],
    "jitter": [0.0649, 0.3948, 0.7154],
    "position_part": [0.0185, 0.1877, 0.5952],
}


@pytest.fixture(scope="session")
def result(mini, alice):
    options = {"ratios": (0, 0.5), "reaches": ("adjacent", "uniform"), "n_draws": 1, "n_cloze": 4}
    return perturbation(mini, alice, **options, **CUT)


@pytest.fixture(scope="session")
def two_nulls(mini, alice):
    options = {"ratios": (0.05, 0.2), "conditions": ("words", "positions"), "reaches": ("uniform",), "n_cloze": 1}
    return perturbation(mini, alice, **options, **CUT, null_seeds=(0, 1))


@pytest.mark.slow
def test_the_bundled_model_has_its_reference_rises(mini, alice):
    found = perturbation(mini, alice, ratios=(0, 0.05, 0.2, 0.5), reaches=("uniform",), n_cloze=0, **QUIET)
    for condition, rises in REFERENCE.items():
        assert found.summary[f"{condition}_change"] == pytest.approx([0, *rises], abs=2e-4), condition
        places = [found.summary[f"{condition}_change_{place}"] for place in ("few", "many", "most")]
        assert places == found.summary[f"{condition}_change"][1:]
    assert "cloze_accuracy" not in found.dataset
    assert found.summary["cloze_items"] == 0
    assert len(found.findings()) == 4


def test_nothing_moved_changes_nothing(result):
    np.testing.assert_allclose(result.dataset.change.sel(ratio=0), 0, atol=1e-4)


def test_half_of_the_order_lost_costs_the_trained_model_loss(result):
    conditions = ["tokens", "words", "positions"]
    lost = result.dataset.change.sel(ratio=0.5, target="all", condition=conditions, reach="uniform")
    assert (lost > 0.05).all()


def test_the_asked_share_is_moved(result):
    swapped = result.dataset.moved.sel(condition=["tokens", "positions"], ratio=0.5)
    np.testing.assert_allclose(swapped, 0.5, atol=0.03)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_protected_places_stay_in_order(mini, alice, condition):
    tokens = to_prompts(mini, alice, length=32, n_prompts=1)[0]
    drawn = draw(mini, tokens, condition, "uniform", 0.5, seed=0, window=4, protected=[0, *range(24, 32)])
    read, _ = disturb(mini, tokens, condition, drawn)
    if condition == "words":  # words of other lengths may shift what lies between them
        assert torch.equal(read.sort().values, tokens.sort().values)
    else:
        assert torch.equal(read[24:], tokens[24:])
    assert not drawn.moved[24:].any()
    assert not drawn.moved[0]


def test_words_begin_at_white_space(mini):
    tokens = to_prompts(mini, "The extraordinarily small rabbit, perhaps.")[0]
    texts = token_strings(mini, tokens)
    words = ["".join(texts[start:stop]).strip() for start, stop in words_of(mini, tokens)]
    assert words[-4:] == ["extraordinarily", "small", "rabbit", "perhaps"]


def test_draws_of_one_seed_are_all_different_from_those_of_another(mini, alice):
    options = {"ratios": (0.5,), "conditions": ("positions",), "reaches": ("uniform",), "n_cloze": 0}
    both = [perturbation(mini, alice, **options, **CUT, null_seeds=(), n_draws=2, seed=seed) for seed in (0, 1)]
    each = np.concatenate([one.dataset.change_each.sel(target="all").values.ravel() for one in both])
    assert len(np.unique(each)) == 2 * 2 * 4
    tokens = to_prompts(mini, alice, length=48, n_prompts=4)[1]
    swaps = swap_tokens(48, 0.5, seed=(1 * 2 + 0) * 4 + 1, protected=[0, *range(36, 48)])
    loss = token_losses(mini, tokens[None], permute_positions(mini, swaps.permutation)).mean()
    expected = float(loss - token_losses(mini, tokens[None]).mean())
    second_prompt = both[1].dataset.change_each.sel(draw=0, prompt=1, target="all")
    assert float(second_prompt.squeeze()) == pytest.approx(expected, abs=1e-6)


def test_every_variable_is_declared(result, two_nulls):
    assert_declared(result)
    assert_declared(two_nulls)


@pytest.mark.slow
def test_every_figure_is_drawn_again_from_the_file(result, tmp_path):
    assert len(result.frame()) == len(CONDITIONS) * 2 * 2 * 3
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["perturbation"]
    assert loaded.dataset.equals(result.dataset)
    assert result.kinds == loaded.kinds == ["curves", "matched"]
    assert loaded.findings() == result.findings()
    for kind in result.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()


def test_curves_draw_the_rise_at_places_that_were_not_moved_and_the_cloze_with_its_chance(result):
    data, figure = result.dataset, result.plot("curves")
    named = [trace for trace in figure.data if trace.name == "P: index of q and k"]
    assert [trace.xaxis for trace in named] == ["x", "x2", "x3"]
    for trace, reach in zip(named, ("adjacent", "uniform"), strict=False):
        curve = data.sel(condition="positions", reach=reach, target="unmoved")
        np.testing.assert_array_equal(trace.y, curve.change)
        np.testing.assert_array_equal(trace.error_y.array, curve.change_high - curve.change)
    np.testing.assert_array_equal(named[2].y, data.cloze_accuracy.sel(condition="positions"))
    (chance,) = (trace for trace in figure.data if trace.name == "chance of the cloze")
    assert (list(chance.x), list(chance.y), chance.xaxis) == ([0, 50], [0.25, 0.25], "x3")
    grey = [trace for trace in figure.data if trace.name == "random init (seed 0)"]
    assert len(grey) == 3 * len(CONDITIONS)
    assert sum(bool(trace.showlegend) for trace in grey) == 1


def test_matched_draws_the_gap_to_the_index(result):
    figure = result.plot("matched")
    below = [trace for trace in figure.data if trace.name == "F: distances jittered" and trace.yaxis in ("y3", "y4")]
    gap = result.dataset.gap.sel(condition="jitter", target="unmoved")
    for trace, reach in zip(below, ("adjacent", "uniform"), strict=True):
        np.testing.assert_array_equal(trace.y, gap.sel(reach=reach))
    assert not any(trace.name.startswith("T:") for trace in figure.data)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ratios": (0.1, 1.5)}, "ratio 1.5"),
        ({"ratios": (-0.1,)}, "ratio -0.1"),
        ({"ratios": ()}, "ratios"),
        ({"conditions": ("letters",)}, "condition 'letters'"),
        ({"conditions": ()}, "condition"),
        ({"reaches": ()}, "reach"),
        ({"window": 0}, "window=0"),
        ({"clean": 1}, "clean 1"),
        ({"n_draws": 0}, "n_draws=0"),
        ({"n_cloze": -1}, "n_cloze=-1"),
        ({"n_prompts": 10**5}, "tokens in 1 text"),
        ({"length": 9999}, "9999.*512"),
        ({"conditions": ("tokens",), "heads": [0]}, "condition 'tokens'"),
        ({"heads": [9]}, "head 9"),
    ],
)
def test_bad_input_is_refused(mini, alice, wrong, named):
    with pytest.raises(InputError, match=named):
        perturbation(mini, alice, **{**CUT, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratios": "0.1"},
        {"ratios": 0.1},
        {"ratios": ("few",)},
        {"conditions": "tokens"},
        {"reaches": 8},
        {"window": 2.5},
        {"clean": "half"},
        {"n_draws": True},
        {"n_cloze": None},
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_types_are_refused_by_name(wrong):
    with pytest.raises(InputError, match=next(iter(wrong)).removesuffix("s")[:5]):
        Perturbation(**wrong)


def test_the_gap_is_to_the_index_condition(result):
    change = result.dataset.change
    np.testing.assert_allclose(result.dataset.gap, change - change.sel(condition="positions"), atol=1e-12)


def test_where_scores_know_no_distance_only_the_text_is_disturbed(family_model):
    model = family_model("gpt2")
    assert conditions_for(model, None) == ["tokens", "words"]
    for wanted in ({"conditions": ["positions"]}, {"conditions": None, "heads": [0]}):
        with pytest.raises(UnsupportedModelError, match="layer 0"):
            conditions_for(model, **wanted)


def test_chosen_heads_are_disturbed_alone(mini, alice):
    heads = [(0, 1), (2, 3)]
    options = {"ratios": (0.5,), "reaches": ("uniform",), "n_cloze": 1}
    found = perturbation(mini, alice, heads=heads, **options, **QUIET)
    assert found.summary["conditions"] == ["positions", "key_positions", "jitter", "position_part"]
    assert found.summary["tokens_change"] is None
    tokens = to_prompts(mini, alice, length=48, n_prompts=1)[0]
    swaps = swap_tokens(48, 0.5, seed=0, protected=[0, *range(36, 48)])
    hooks = permute_positions(mini, swaps.permutation, heads=heads)
    expected = float((token_losses(mini, tokens[None], hooks) - token_losses(mini, tokens[None])).mean())
    change = found.dataset.change_each.sel(condition="positions", prompt=0, target="all")
    assert float(change.squeeze()) == pytest.approx(expected, abs=1e-6)


def test_sentences_say_the_summary(result):
    json.dumps(jsonable(result.summary), allow_nan=False)
    own, null = result.summary, result.null_summary
    *rises, gaps, cloze = result.findings()
    assert len(rises) == 3
    for sentence, condition in zip(rises, ("tokens", "words", "positions"), strict=True):
        assert f"perplexity by {own[f'{condition}_perplexity_most']:.2f} at 50% moved" in sentence
        assert f"({own[f'{condition}_change_most']:+.3f} [" in sentence
        assert f"random init {null[f'{condition}_perplexity_most']:.2f})" in sentence
        assert np.exp(own[f"{condition}_change_most"]) == pytest.approx(own[f"{condition}_perplexity_most"])
    assert f"position part alone {own['position_part_gap_many']:+.3f} [" in gaps
    assert f"accuracy {own['cloze_accuracy_least']:.0%} (random init {null['cloze_accuracy_least']:.0%})" in cloze
    assert "cloze of 4 passages" in cloze
    assert "chance 25%" in cloze
    change = own["jitter_cloze_log_likelihood_change_most"]
    assert f"jitter {own['jitter_cloze_accuracy_most']:.0%} [" in cloze
    assert f", {change:+.2f}; position part" in cloze
    log_p = result.dataset.cloze_log_likelihood.sel(condition="jitter")
    assert change == pytest.approx(float(log_p.sel(ratio=0.5) - log_p.sel(ratio=0)))


def test_the_rise_is_set_beside_proportion_where_it_was_measured_twice(two_nulls):
    own = two_nulls.summary
    assert own["words_fold"] == own["words_change_many"] / own["words_change_few"]
    assert own["fold_proportional"] == pytest.approx(4)
    (words, _, _) = two_nulls.findings()
    assert words.endswith(f"the rise in nats grows {own['words_fold']:.1f}-fold (proportional: 4.0).")


def test_findings_stand_without_a_null_and_with_several(two_nulls):
    own, null = two_nulls.summary, two_nulls.null_summary
    spread = null.spread("words_perplexity_few")
    assert f"random init {null['words_perplexity_few']:.2f} ± {spread:.2f})" in two_nulls.findings()[0]
    alone = two_nulls.measure.findings(own, None)
    assert len(alone) == len(two_nulls.findings())
    assert all("no null measured" in sentence for sentence in alone)


def test_one_prompt_has_no_interval(mini):
    options = {"ratios": (0, 0.5), "conditions": ("positions", "jitter"), "reaches": ("uniform",), "n_draws": 1}
    found = perturbation(mini, torch.arange(24)[None] + 300, **options, null_seeds=(), progress=False)
    assert found.dataset.change_low.isnull().all()
    assert found.summary["cloze_items"] == 0  # 24 tokens hold no passage of 40 words
    assert f"({found.summary['positions_change_most']:+.3f} nats; no null measured)" in found.findings()[0]
    json.dumps(jsonable(found.summary), allow_nan=False)
    assert found.plot("curves").data[0].y.tolist() == found.dataset.change.sel(target="unmoved")[0, 0].values.tolist()


def test_the_short_table_fits_a_terminal(result):
    table = result.table()
    assert table.shape == (len(CONDITIONS), 9)
    assert (table[table.condition == "positions"]["less P"] == 0).all()
    assert table.cloze.tolist() == result.dataset.cloze_accuracy.sel(ratio=0.5).values.tolist()
