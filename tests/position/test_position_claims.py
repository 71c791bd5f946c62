"""Claims and sentences of one measure speak by one rule: the first token, and which part of the text."""

import math
from dataclasses import replace

import pytest
import torch
from declared import result_of

from tl_posgen import analyze
from tl_posgen.core.claim import threshold
from tl_posgen.position import dummy_distance, length_extrapolation, variance
from tl_posgen.position.claims import controlled_distance, downstream, left_over, length_claim, planes


@pytest.fixture(scope="module")
def report(mini, alice):
    measures = ["residual", "across_prompts"]
    return analyze(mini, alice, measures=measures, length=32, n_prompts=4, null_seeds=(), progress=False)


SHOWN = (("share", ""), ("top_share", ""), ("share", "_low"), ("share", "_high"))


def test_what_is_left_over_is_judged_and_said_without_the_first_token(report):
    measured = left_over(report["residual"], report["across_prompts"]).measured
    assert measured.startswith("first token left out")
    own = report["residual"].summary
    share, top, low, high = (own[f"{name}_without_first_token{end}"] for name, end in SHOWN)
    assert f"leaves {share:.0%} [{low:.0%}, {high:.0%}] of the variance within rows" in measured
    assert f"{top:.0%} of that in one direction" in measured
    sentences = " ".join(report["residual"].findings())
    assert f"without the first token {share:.0%}" in sentences
    assert f"One singular direction holds {top:.0%}" in sentences


def test_the_loss_beyond_is_the_mean_over_all_segments_in_claim_and_sentence(mini_bridge, alice):
    options = {"inside": 16, "times": 3, "n_prompts": 2, "null_seeds": (), "progress": False}
    result = length_extrapolation(mini_bridge, alice, **options)
    data, measured = result.dataset, length_claim(result).measured
    loss = float(data["loss_segment"].sel(condition="lm_infinite").isel(segment=[1, 2]).mean())
    assert f"loss {loss:.2f}" in measured
    assert "mean from the training length to 3 times it" in measured
    assert any(f"LM-Infinite, beyond the training length: loss {loss:.2f}" in said for said in result.findings())


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ({"within_noise_lm_infinite": 1.0, "within_noise_vanilla": 0.5}, "held"),
        ({"within_noise_lm_infinite": 0.8, "within_noise_vanilla": 0.5}, "partly"),
        ({"within_noise_lm_infinite": 1.0, "within_noise_vanilla": 1.0}, "not held"),
        ({"within_noise_lm_infinite": math.nan, "within_noise_vanilla": 0.5}, "open"),
        ({"within_noise_lm_infinite": None, "within_noise_vanilla": None}, "open"),  # nothing beyond
        ({"within_noise_vanilla": 0.5}, "open"),
    ],
)
def test_outputs_beyond_are_judged_where_they_were_measured(own, verdict):
    numbers = {f"{name}_{of}": 1.0 for name in ("loss_beyond", "rise") for of in ("lm_infinite", "vanilla")}
    measured = [name.removeprefix("within_noise_") for name in own]
    own |= {**numbers, "conditions": measured, "times": 4, "loss_inside": 2.0}
    found = length_claim(result_of(own, own | {"within_noise_vanilla": 0.9}))
    assert found.verdict == verdict
    assert found.null.endswith("at most a tenth of heads leave theirs: only a trained model can show the claim") == (
        verdict != "open" or (own.get("within_noise_lm_infinite", 0) is not None and "within_noise_lm_infinite" in own)
    )


def plane_numbers(trained, random):
    """r and interaction of trained weights and of a random init."""
    numbers = {"additive_trained": 0.1, "additive_random_init": 0.0, "additive_shuffled": 0.0}
    for kind, (r, share) in {"trained": trained, "random_init": random, "shuffled": (0.1, 0.5)}.items():
        numbers |= {f"pearson_without_first_token_{kind}": r, f"interaction_without_first_token_{kind}": share}
    return numbers


@pytest.mark.parametrize(
    ("trained", "random", "verdict", "without_training"),
    [
        ((0.8, 0.2), (0.2, 0.5), "held", False),
        ((0.8, 0.2), (0.7, 0.5), "held", True),
        ((0.3, 0.2), (0.7, 0.5), "partly", False),  # r decided it
        ((0.8, 0.4), (0.2, 0.5), "not held", False),
        ((math.nan, 0.2), (0.2, 0.5), "open", False),
        ((0.8, 0.2), (None, None), "open", False),
    ],
)
def test_planes_are_judged_by_r_and_by_the_interaction_beside_random_init(trained, random, verdict, without_training):
    found = planes(result_of(plane_numbers(trained, random)), result_of({"exact_error": 1e-6}))
    assert found.verdict == verdict
    assert found.null.endswith("holds without training too: the verdict rests on the interaction") == without_training


def test_the_refit_is_told_from_its_lowest_to_its_highest_distance_that_has_one():
    out = "_without_first_token"
    own = {f"{name}{out}": 0.8 for name in ("additive_r", "key_part_r", "distance_share")} | {"additive_r": 0.9}
    own |= {"distances": [0, 8, 64, 256], f"refit_r{out}": [0.9, math.nan, 0.3, 0.7]}
    assert "against c, r 0.30 at 64 to 0.90 at 0" in controlled_distance(result_of(own)).measured
    assert (
        "against c, r not defined" in controlled_distance(result_of(own | {f"refit_r{out}": [math.nan] * 4})).measured
    )


@pytest.mark.slow
def test_the_key_part_is_judged_without_the_first_token_and_above_random_init(mini, alice):
    result = dummy_distance(mini, alice, length=64, n_prompts=2, limits=(8,), progress=False)
    r = result.summary["key_part_r_without_first_token"]
    found = controlled_distance(result)
    assert found.verdict == threshold(r, 0.95, 0.75) == "partly"
    assert f"key part's r is {r:.2f} [" in found.measured
    assert controlled_distance(replace(result, nulls=(result.dataset,))).verdict == "not held"


def test_nothing_is_judged_of_scores_in_which_nothing_rotates(family_model):
    found = dummy_distance(family_model("bloom", "bridge"), torch.arange(2, 26)[None], limits=(4,), progress=False)
    assert controlled_distance(found).verdict == "open"


def test_no_two_measures_call_a_number_interaction():
    labels = [one.label for one in dummy_distance.variables.values()]
    assert "distance × key" in labels
    assert not [label for label in labels if "interaction" in label]
    assert "interaction" in [one.label for one in variance.variables.values()]


def cloze_of(few, many, whole=0.8, items=40, width=0.01):
    accuracies = {"cloze_accuracy_least": whole}
    for place, value in (("few", few), ("many", many)):
        key = f"words_cloze_accuracy_{place}"
        accuracies |= {key: value, f"{key}_low": value - width, f"{key}_high": value + width}
    return {"cloze_items": items, "cloze_chance": 0.25, "ratio_few": 0.05, "ratio_many": 0.2, **accuracies}


@pytest.mark.parametrize(
    ("own", "null", "verdict"),
    [
        (cloze_of(0.795, 0.7), 0.3, "held"),
        (cloze_of(0.795, 0.79), 0.3, "partly"),
        (cloze_of(0.75, 0.7), 0.3, "not held"),
        (cloze_of(0.785, 0.7), 0.3, "open"),
        (cloze_of(0.75, 0.7, width=0.1), 0.3, "open"),
        (cloze_of(0.795, 0.7), 0.8, "open"),
        (cloze_of(0.795, 0.7, whole=0.25), 0.1, "open"),
        (cloze_of(0.795, 0.7, items=0), 0.3, "open"),
    ],
)
def test_downstream_scores_are_judged_by_what_two_points_make(own, null, verdict):
    assert downstream(result_of(own, cloze_of(null, null, whole=null))).verdict == verdict
