"""The claims on slash heads: verdicts at their criteria; claim 4 by all three bands, under both ways of making them."""

import numpy as np
import pytest
from declared import result_of

from tl_posgen.report.intervals import ENDS
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.claims import frequencies, frequencies_by, schemes_of, training


def summary(drop, low_alone, planes=(5, 5, 6), heads=9):
    """A summary of scores left, the unchanged one being 1."""
    names = ["unchanged", *(f"drop {band}, thirds" for band in BANDS), "keep low, thirds", "no_rope"]
    scores = [0.2, *(0.2 * left for left in drop), 0.2 * low_alone, 0.02]
    return {
        "conditions": names,
        "slash_score": scores,
        "slash_heads": [heads] * 6,
        "n_planes": [16, *planes, planes[2], 16],
    }


@pytest.mark.parametrize(
    ("drop", "low_alone", "verdict"),
    [
        ((0.21, 0.55, 1.03), 0.08, "held"),
        ((0.21, 0.55, 0.71), 0.11, "partly"),  # low costs .29, the others .62 in the mean
        ((0.21, 0.98, 1.00), 0.08, "partly"),  # the medium band makes nothing of it
        ((0.21, 0.55, 1.00), 0.60, "partly"),  # the low band makes much of it alone
        ((0.45, 0.59, 0.62), 0.16, "not held"),  # all cost alike
        ((1.0, 1.0, 1.0), 1.0, "not held"),  # none costs anything
    ],
)
def test_one_scheme_is_judged_by_all_three_bands(drop, low_alone, verdict):
    assert frequencies_by(summary(drop, low_alone), "thirds") == verdict


def test_nothing_is_judged_without_slash_heads_or_with_an_empty_band():
    held = (0.21, 0.55, 1.03), 0.08
    assert frequencies_by(summary(*held, heads=0), "thirds") == "open"
    assert frequencies_by(summary(*held, planes=(8, 8, 0)), "thirds") == "open"


def test_the_words_say_all_bands_of_the_schemes_that_were_measured(bands_of_four):
    result = bands_of_four
    own = result.summary
    assert schemes_of(own) == ["thirds"]
    found = frequencies(result)
    assert found.verdict == frequencies_by(own, "thirds")
    data = result.dataset.set_index(condition="condition")
    for condition in (*(f"drop {band}, thirds" for band in BANDS), "keep low, thirds", "no_rope"):
        score, change = (
            " ".join([format(value, form), f"[{low:{form}}, {high:{form}}]"])
            for name, form in (("slash_score", ".2f"), ("loss_change", "+.2f"))
            for value, low, high in [[float(data[f"{name}{end}"].sel(condition=condition)) for end in ENDS]]
        )
        assert f"{score} (loss {change})" in found.measured
    assert "disagree" not in found.measured
    np.testing.assert_allclose(own["n_planes"], data["n_planes"].mean("model_layer"))


@pytest.mark.slow
def test_schemes_that_disagree_are_named_first(mini, alice):
    from tl_posgen.slash import band_ablation

    result = band_ablation(mini, alice, length=256, n_prompts=2, null_seeds=(), progress=False)
    each = {scheme: frequencies_by(result.summary, scheme) for scheme in ("thirds", "wavelength")}
    assert each["thirds"] != each["wavelength"]
    found = frequencies(result)
    assert found.verdict == "partly"
    said = f"the two ways of making bands disagree: {each['thirds']} by thirds, {each['wavelength']} by wavelength"
    assert found.measured.startswith(said)


@pytest.mark.parametrize(
    ("trained", "unseen", "verdict"),
    [(0.9, 0.9, "held"), (0.5, 0.5, "held"), (0.9, 0.4, "partly"), (0.4, 0.9, "not held")],
)
def test_the_toy_has_to_keep_its_head_in_every_seed_and_on_unseen_features(trained, unseen, verdict):
    least = {"score_trained_least": trained, "score_unseen_least": unseen, "steps": 500}
    scores = {"score_trained_mean": 0.95, "score_unseen_mean": 0.93, "score_at_start": 0.02, "uniform": 0.03}
    own = {"seeds": 3, "distance": 3, "r1_q_end_mean": 0.9, "r1_k_end_mean": 0.8, **scores, **least}
    judged = training(result_of(own))
    assert judged.verdict == verdict
    assert f"0.93 on unseen ones (least {unseen:.2f})" in judged.measured
    assert judged.null.startswith("before training 0.020")
