"""The claims on slash heads: verdicts at their criteria; claim 4 by all three bands, under both ways of making them."""

import numpy as np
import pytest
from made_up import NOT_HELD, around, dataset_of, result_of, verdicts_beside_nulls

from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash import BandAblation, Cone, Slash, SlashTransfer
from tl_posgen.slash.claims import (
    CLAIMS,
    combined,
    far_away,
    frequencies,
    frequencies_by,
    of_the_axis,
    on_a_cone,
    onto_the_axis,
    random_tokens,
    rank_one,
    schemes_of,
    training,
)
from tl_posgen.slash.slash_toy import SlashToy

HELD = (0.21, 0.55, 1.03), 0.08


def ablation(drop, low_alone, planes=(5, 5, 6), dominant=True, beside=(1.0, 1.0, 1.0)):
    """Of one head, that scores 0.2 unchanged: the shares that are left, and those of a random init."""
    own = shares_of(drop, low_alone, planes, dominant)
    return result_of(BandAblation(), own, *([] if beside is None else [shares_of(beside, 1.0, planes, False)]))


def shares_of(drop, low_alone, planes, dominant):
    names = ["unchanged", *(f"drop {band}, thirds" for band in BANDS), "keep low, thirds", "no_rope"]
    scores = 0.2 * np.array([1, *drop, low_alone, 0.1])
    of_head = ("condition", "layer", "head")
    variables = {
        "score": ((*of_head, "prompt"), np.repeat(scores, 4).reshape(6, 1, 1, 4)),
        "dominant": ((*of_head, "short_distance"), np.full((6, 1, 1, 1), dominant)),
        "loss": (("condition", "prompt"), np.ones((6, 4))),
        "n_planes": (("condition", "model_layer"), np.array([16, *planes, planes[2], 16])[:, None]),
    }
    return dataset_of(variables, condition=names)


@pytest.mark.parametrize(
    ("drop", "low_alone", "verdict"),
    [
        (*HELD, "held"),
        ((0.21, 0.55, 0.71), 0.11, "partly"),  # low costs .29, the others .62 in the mean
        ((0.21, 0.98, 1.00), 0.08, "partly"),  # the medium band makes nothing of it
        ((0.21, 0.55, 1.00), 0.60, "partly"),  # the low band makes much of it alone
        ((0.45, 0.59, 0.62), 0.16, "not held"),  # all cost alike
        ((1.0, 1.0, 1.0), 1.0, "not held"),  # none costs anything
    ],
)
def test_one_scheme_is_judged_by_all_three_bands(drop, low_alone, verdict):
    assert frequencies_by(ablation(drop, low_alone), "thirds") == verdict


def test_bands_are_judged_beside_a_null():
    assert frequencies_by(ablation(*HELD, beside=None), "thirds") == "open"
    assert frequencies_by(ablation(*HELD, beside=(0.2, 0.2, 0.9)), "thirds") == "not held"


def test_nothing_is_judged_without_slash_heads_or_with_an_empty_band():
    assert frequencies_by(ablation(*HELD, dominant=False), "thirds") == "open"
    assert frequencies_by(ablation(*HELD, planes=(8, 8, 0)), "thirds") == "open"


def test_the_words_have_all_bands_of_the_schemes_that_were_measured(report):
    result = report["band_ablation"]
    own, measure = result.numbers, result.measure
    assert schemes_of(result) == ["thirds"]
    found = frequencies(result)
    assert found.verdict == frequencies_by(result, "thirds")
    for condition in (*(f"drop {band}, thirds" for band in BANDS), "keep low, thirds", "no_rope"):
        score, change = measure.slash_score(own, condition), measure.rise(own, condition)
        assert f"{score.with_interval:.2f} (loss {change.with_interval:+.2f})" in found.measured
        assert f"{score.of_inits.plain:.2f} (loss {change.of_inits.plain:+.2f})" in found.null.removeprefix(
            "random init: "
        )
    assert "disagree" not in found.measured


@pytest.mark.slow
def test_schemes_that_disagree_are_named_first(mini, alice):
    result = BandAblation(schemes=("thirds", "wavelength"))(mini, alice, length=256, n_prompts=4, progress=False)
    each = {scheme: frequencies_by(result, scheme) for scheme in ("thirds", "wavelength")}
    assert each["thirds"] != each["wavelength"]
    found = frequencies(result)
    assert combined([*each.values()]) == "partly"
    assert found.verdict in ("partly", "not held")  # the latter where a null does as well
    words = f"the two ways of making bands disagree: {each['thirds']} by thirds, {each['wavelength']} by wavelength"
    assert found.measured.startswith(words)


def test_where_schemes_disagree_one_that_holds_is_a_part():
    assert combined(["held", "held"]) == "held"
    assert combined(["not held", "held"]) == "partly"
    assert combined(["not held", "partly"]) == "not held"
    assert combined([]) == "open"


@pytest.mark.parametrize(
    ("trained", "unseen", "before", "verdict"),
    [
        (0.9, 0.9, 0.02, "held"),
        (0.5, 0.5, 0.02, "held"),
        (0.9, 0.4, 0.02, "partly"),
        (0.4, 0.9, 0.02, "not held"),
        (0.9, 0.9, 0.9, "not held"),  # no better than before training, its null
    ],
)
def test_the_toy_has_to_keep_its_head_in_every_seed_and_on_unseen_features(trained, unseen, before, verdict):
    scores = [[[before, trained], [before, 0.95]], [[before, unseen], [before, 0.96]]]
    variables = {
        "score": (("features", "seed", "step"), scores),
        "r1": (("side", "seed", "step"), np.full((2, 2, 2), 0.9)),
        "uniform": (("distance",), np.full(48, 0.03)),
    }
    labels = {"features": ["trained", "unseen"], "step": [0, 500], "distance": range(48)}
    found = training(result_of(SlashToy(seeds=(0, 1), steps=500), dataset_of(variables, **labels)))
    assert found.verdict == verdict
    assert f"{(unseen + 0.96) / 2:.2f} on unseen ones (least {unseen:.2f})" in found.measured
    assert found.null == f"before training {before:.3f}, uniform attention 0.030"
    assert ("+0.00 from before training 0.90" in found.margin) == (before == 0.9)


def cone(cosine=0.8, gains=(2.0, 2.0), alone=0.5, rest=0.1, r1=0.95, dominant=True):
    """Of one head, dominant or not, with a slash score of .5, .1 of it that of uniform attention."""
    heads = ("tokens", "layer", "head")
    scores = [0.5, 0.1 + 0.4 * alone, 0.1 + 0.4 * rest]
    variables = {
        "cosine": (("layer", "tokens", "end"), [[around(cosine, 0.05)] * 2]),
        "gain": (("side", "end"), [around(gain, 0.1) for gain in gains]),
        "r1": (("tokens", "side", "layer", "head", "end"), [[[[around(r1, 0.01)]]] * 2] * 2),
        "best_score": (("tokens", "input", "layer", "head", "prompt"), [[[[[one] * 4]] for one in scores]] * 2),
        "best_uniform": (heads, [[[0.1]]] * 2),
        "best_distance": (heads, [[[1]]] * 2),
        "dominant": (heads, [[[dominant]]] * 2),
    }
    return dataset_of(variables, input=["measured", "axis only", "off axis"], side=["q", "k"])


@pytest.mark.parametrize(
    ("judge", "own", "init", "verdict"),
    [
        (on_a_cone, cone(0.8), cone(0.4), "held"),
        (on_a_cone, cone(0.6), cone(0.4), "partly"),
        (on_a_cone, cone(0.38), cone(0.42), "not held"),
        (on_a_cone, cone(np.nan), cone(0.4), "open"),
        (onto_the_axis, cone(gains=(2.2, 2.2)), cone(gains=(1, 1)), "held"),
        (onto_the_axis, cone(gains=(2.2, 1.7)), cone(gains=(1, 1)), "partly"),
        (onto_the_axis, cone(gains=(2.2, 1.3)), cone(gains=(1, 1)), "detectable"),
        (onto_the_axis, cone(gains=(2.2, 1)), cone(gains=(1, 1)), "detectable"),
        (onto_the_axis, cone(gains=(1.1, 1)), cone(gains=(1, 1)), "not held"),
        (of_the_axis, cone(alone=1.45, rest=0.2), cone(), "held"),  # a ratio, not a share
        (of_the_axis, cone(alone=0.8, rest=0.6), cone(dominant=False), "partly"),  # a null without dominant heads
        (of_the_axis, cone(alone=0.8, rest=0.1), cone(alone=0.9, rest=0.1), "not held"),
        (of_the_axis, cone(alone=0.5, rest=0.6), cone(dominant=False), "not held"),
        (of_the_axis, cone(alone=0.3, rest=0.1), cone(dominant=False), "not held"),
        (rank_one, cone(r1=0.92), cone(r1=0.8), "held"),
        (rank_one, cone(r1=0.83), cone(r1=0.8, dominant=False), "partly"),
        (rank_one, cone(r1=0.83), cone(r1=0.825, dominant=False), "not held"),  # the interval reaches it
        (rank_one, cone(r1=0.83, dominant=False), cone(r1=0.8), "open"),
    ],
)
def test_each_part_of_the_cone_is_judged_by_itself(judge, own, init, verdict):
    assert judge(result_of(Cone(), own, init)).verdict == verdict


@pytest.mark.slow
def test_parts_of_the_cone_have_verdicts_on_a_real_model(mini, alice):
    result = Cone()(mini, alice, length=64, n_prompts=4, progress=False)
    found = [judge(result) for judge in (on_a_cone, onto_the_axis)]
    assert [one.verdict for one in found] == ["not held", "held"]
    assert all("not defined" not in one.margin for one in found)


def long_slashes(counts, n=128, window=128):
    """Of two heads, at how many long distances each is dominant without the first token."""
    variables = {
        "n_long": (("tokens", "layer", "head"), [[[9, 9]], [counts]]),  # with the first token all would be
        "score": (("layer", "head", "distance"), np.ones((1, 2, n))),
        "uniform": (("layer", "distance"), [np.where(np.arange(n) < window, 0.01, 0.0)]),
    }
    return dataset_of(variables, tokens=["all", "without first"], distance=range(n))


@pytest.mark.parametrize(
    ("n_long", "of_init", "n", "window", "verdict"),
    [
        ([1, 3], [0, 0], 128, 128, "held"),
        ([1, 0], [0, 2], 128, 128, "not held"),
        ([0, 0], [0, 0], 128, 128, "not held"),
        ([0, 0], [0, 0], 99, 128, "open"),
        ([0, 0], [0, 0], 128, 20, "open"),  # no key lies so far back
    ],
)
def test_long_slashes_are_counted_beside_random_init(n_long, of_init, n, window, verdict):
    found = far_away(result_of(Slash(), *(long_slashes(counts, n, window) for counts in (n_long, of_init))))
    assert found.verdict == verdict
    if verdict != "open":
        expected = f"{np.count_nonzero(n_long)} of 2 heads at 50 tokens or further, without the first token"
        assert found.measured == expected


def transfer(*rs, n=(1, 1)):
    """r of text with random tokens at D = 1 and 2, and how many heads are dominant on text there."""
    counts = np.tile(n, (2, 2, 1))
    variables = {
        "pearson": (("tokens", "short_distance", "end"), [[around(r, 0.01) for r in rs]] * 2),
        "jaccard": (("tokens", "short_distance"), np.ones((2, 2))),
        "n_dominant": (("tokens", "source", "short_distance"), counts),
    }
    return dataset_of(variables, source=["natural", "random"], short_distance=[1, 2])


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        (transfer(0.95, 0.92), "held"),
        (transfer(0.95, 0.7), "partly"),  # at every distance where heads are dominant
        (transfer(0.95, 0.7, n=(1, 0)), "held"),
        (transfer(0.95, 0.4), "not held"),
        (transfer(0.95, 0.92, n=(0, 0)), "open"),
    ],
)
def test_random_tokens_are_judged_at_every_distance_where_heads_are_dominant(own, verdict):
    assert random_tokens(result_of(SlashTransfer(), own, transfer(0.2, 0.3))).verdict == verdict


def test_a_null_as_good_at_one_distance_decides():
    found = random_tokens(result_of(SlashTransfer(), transfer(0.95, 0.92), transfer(0.2, 0.92)))
    assert (found.verdict, found.margin.split("; ")[1]) == (
        "not held",
        "r at D = 2 0.92, +0.02 from 0.90 (low end 0.91, -0.01 from random init 0.92)",
    )


BEYOND = {  # by claim: numbers beyond all thresholds, and a random init that is far from them
    "1": result_of(SlashTransfer(), transfer(0.95, 0.92), transfer(0.2, 0.3)),
    "2": result_of(Cone(), cone(r1=0.95), cone(r1=0.8)),
    "3a": result_of(Cone(), cone(0.8), cone(0.4)),
    "3b": result_of(Cone(), cone(gains=(2.2, 2.2)), cone(gains=(1, 1))),
    "3c": result_of(Cone(), cone(alone=0.9, rest=0.1), cone()),
    "4": ablation(*HELD),
    "6": result_of(Slash(), long_slashes([1, 3]), long_slashes([0, 0])),
}


@pytest.mark.parametrize("claim", [one for one in CLAIMS if one.number != 5], ids=lambda one: one.name)
def test_no_claim_holds_where_a_null_does_as_well(claim):
    assert verdicts_beside_nulls(claim, BEYOND[str(claim.number)]) == NOT_HELD
