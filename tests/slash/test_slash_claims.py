"""The claims on slash heads: verdicts at their criteria; claim 4 by all three bands, under both ways of making them."""

import numpy as np
import pytest
from made_up import dataset_of, result_of

from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash import BandAblation
from tl_posgen.slash.claims import combined, frequencies, frequencies_by, schemes_of, training
from tl_posgen.slash.slash_toy import SlashToy

HELD = (0.21, 0.55, 1.03), 0.08


def ablation(drop, low_alone, planes=(5, 5, 6), dominant=True):
    """Of one head, that scores 0.2 unchanged: the shares that are left."""
    names = ["unchanged", *(f"drop {band}, thirds" for band in BANDS), "keep low, thirds", "no_rope"]
    scores = 0.2 * np.array([1, *drop, low_alone, 0.1])
    of_head = ("condition", "layer", "head")
    variables = {
        "score": ((*of_head, "prompt"), np.repeat(scores, 4).reshape(6, 1, 1, 4)),
        "dominant": ((*of_head, "short_distance"), np.full((6, 1, 1, 1), dominant)),
        "loss": (("condition", "prompt"), np.ones((6, 4))),
        "n_planes": (("condition", "model_layer"), np.array([16, *planes, planes[2], 16])[:, None]),
    }
    return result_of(BandAblation(), dataset_of(variables, condition=names))


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
        score, change = measure.slash_score(own, condition), measure.loss_change(own, condition)
        assert f"{score.with_interval:.2f} (loss {change.with_interval:+.2f})" in found.measured
        assert f"{score.of_inits.plain:.2f} (loss {change.of_inits.plain:+.2f})" in found.null
    assert "disagree" not in found.measured


@pytest.mark.slow
def test_schemes_that_disagree_are_named_first(mini, alice):
    result = BandAblation()(mini, alice, length=256, n_prompts=2, null_seeds=(), progress=False)
    each = {scheme: frequencies_by(result, scheme) for scheme in ("thirds", "wavelength")}
    assert each["thirds"] != each["wavelength"]
    found = frequencies(result)
    assert found.verdict == combined([*each.values()]) == "partly"
    words = f"the two ways of making bands disagree: {each['thirds']} by thirds, {each['wavelength']} by wavelength"
    assert found.measured.startswith(words)


def test_where_schemes_disagree_one_that_holds_is_a_part():
    assert combined(["held", "held"]) == "held"
    assert combined(["not held", "held"]) == "partly"
    assert combined(["not held", "partly"]) == "not held"
    assert combined([]) == "open"


@pytest.mark.parametrize(
    ("trained", "unseen", "verdict"),
    [(0.9, 0.9, "held"), (0.5, 0.5, "held"), (0.9, 0.4, "partly"), (0.4, 0.9, "not held")],
)
def test_the_toy_has_to_keep_its_head_in_every_seed_and_on_unseen_features(trained, unseen, verdict):
    scores = [[[0.02, trained], [0.02, 0.95]], [[0.02, unseen], [0.02, 0.96]]]
    variables = {
        "score": (("features", "seed", "step"), scores),
        "r1": (("side", "seed", "step"), np.full((2, 2, 2), 0.9)),
        "uniform": (("distance",), np.full(48, 0.03)),
    }
    labels = {"features": ["trained", "unseen"], "step": [0, 500], "distance": range(48)}
    found = training(result_of(SlashToy(seeds=(0, 1), steps=500), dataset_of(variables, **labels)))
    assert found.verdict == verdict
    assert f"{(unseen + 0.96) / 2:.2f} on unseen ones (least {unseen:.2f})" in found.measured
    assert found.null == "before training 0.020, uniform attention 0.030"
