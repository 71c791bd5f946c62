"""The three-axis measure and the mean-key split: what is collected of real models, and what is said."""

import numpy as np
import pytest
import torch
from captures import collected

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.session import session_of
from tl_posgen.position.decomposition import MeanKey, ThreeAxis
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.decomposition.three_axis import fit_capture, shuffled, weighting

MEASURE = "three_axis"

QUICK = {"nulls": 0, "progress": False}
WITHOUT_FIRST = {"tokens": "without first"}
NEAR = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.05)


def test_scores_beyond_float32_are_not_called_constant(small_model):
    huge = [("blocks.0.attn.hook_q", lambda q, hook: q * 1e21)]
    how = {"layers": [0], "fwd_hooks": huge, **QUICK}
    (said,) = ThreeAxis()(small_model, "Down, down, down. Would it end?", **how).sentences
    assert said.endswith("scores are so large that their squares are no finite numbers in float32.")


def test_fits_of_a_layer_are_those_of_its_scores(single, capture):
    fit = fit_three_axis(pair_moments_from_scores(capture.scores()))
    found = single["three_axis"].sel(tokens="all", layer=1)
    np.testing.assert_allclose(found["r"], fit.r, atol=1e-6)
    np.testing.assert_allclose(found["r_within_rows"], fit.r_within_rows, atol=1e-6)
    for name in "abc":
        np.testing.assert_allclose(found[name], getattr(fit, name), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        *({"ridge": 5.0}, {"gauge": "flat_distance"}, {"weights": (8, 3, 0.05)}),
        *({"weights": "attention"}, {"weights": "attention", "ridge": 0.1}),
    ],
)
def test_options_change_the_fit_that_they_name(capture, options):
    found, fit = collected(ThreeAxis(**options), capture), fit_capture(capture, **options)[0]
    np.testing.assert_allclose(found["r"].sel(tokens="all").squeeze("layer"), fit.r)
    np.testing.assert_allclose(found["a"].squeeze("layer"), fit.a)
    usual = collected(ThreeAxis(), capture)
    assert not np.allclose(found["a"], usual["a"], equal_nan=True)


@pytest.mark.parametrize("weights", [NEAR, "attention"], ids=str)
def test_weighted_fits_are_those_of_the_scores_weighted_alike(capture, weights):
    """By distance and by pair must agree where the weights of pairs are those of distances."""
    scores = capture.scores().double()
    if weights == "attention":
        of_pairs = scores.softmax(-1)
    else:
        of_pairs = torch.tensor(NEAR, dtype=torch.float64)[(torch.arange(64)[:, None] - torch.arange(64)).clamp(0, 8)]
        of_pairs = of_pairs.expand_as(scores)
    for found, first_token in zip(fit_capture(capture, weights=weights), (True, False), strict=True):
        expected = fit_pair_weights(scores, of_pairs, CausalPairs(64, first_token=first_token))
        torch.testing.assert_close(found.r, expected.r, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.r_within_rows, expected.r_within_rows, atol=1e-6, rtol=0)


@pytest.mark.parametrize("weights", [NEAR, "attention"], ids=str)
def test_a_weighted_measure_says_so_and_has_its_null(mini, prompts, weights):
    result = ThreeAxis(weights=weights)(mini, prompts[:1], layers=[1], nulls=1, progress=False)
    words = weighting(weights)
    assert words in result.findings()[0]
    for kind in ("map", "curves"):
        assert words in result.plot(kind).layout.meta["subtitle"]
    r = result.numbers("r")
    assert r.of_inits.value < r.value
    # noise is no match for what it reaches with all pairs alike: near pairs alone leave many parameters a pair
    assert 0.4 < float(result.trained["iid_r"].mean()) < r.value


def test_weights_are_said_in_words():
    assert weighting(None) == "all pairs weighted alike"
    assert weighting((2.0, 1.0, 0.05)) == "pairs weighted by distance: 2, 1, then .05"
    assert weighting(NEAR) == "pairs weighted by distance: 8, 7, 6, 5, 4, 3, 2, 1, then .05"


def test_noise_under_its_own_attention_reaches_what_its_null_says():
    """Weights that follow the scores let a fit of anything look good: of these more than half."""
    q, k = torch.randn(2, 8, 64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = LayerCapture(LayerGeometry(0, "none", 8, 8, 512, 2 * 512**-0.5), range(8), 0, None, q, k)
    alike, _ = fit_capture(noise)
    full, _ = fit_capture(noise, weights="attention")
    assert float(full.r.mean()) > 1.5 * float(alike.r.mean())
    torch.testing.assert_close(full.r.mean(), full.iid_r.mean(), rtol=0.03, atol=0)


def test_shuffled_scores_are_the_same_in_another_order(capture):
    scores = capture.scores()
    mixed = shuffled(scores)
    assert torch.equal(mixed == -torch.inf, scores == -torch.inf)
    torch.testing.assert_close(mixed.flatten(1).sort(-1).values, scores.flatten(1).sort(-1).values)
    assert not torch.equal(mixed, scores)


# Scores that have no r


@pytest.mark.parametrize("n", [2, 3])
def test_a_fit_of_as_many_parameters_as_pairs_says_nothing(mini, n):
    report = analyze(mini, torch.arange(5, 5 + n)[None], measures="three_axis", **QUICK)
    assert report["three_axis"].trained["r"].isnull().all()
    assert report.findings() == [
        f"Whether scores are position + query + key cannot be said: prompts of {n} tokens have as many parameters as "
        "pairs; give 4 tokens at least, better 100."
    ]


def test_four_tokens_say_nothing_without_the_first(mini):
    tokens = torch.arange(5, 9)[None]
    r = ThreeAxis()(mini, tokens, **QUICK).trained["r"]
    assert r.sel(tokens="all").notnull().all()
    assert r.sel(WITHOUT_FIRST).isnull().all()


def test_scores_that_rounding_made_say_nothing():
    model = tl_posgen.load_model("mini")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(1e-40)
    report = analyze(model, torch.arange(5, 45)[None], **QUICK)
    assert report["three_axis"].trained["r"].isnull().all()
    assert "the scores of every head are constant" in report["three_axis"].findings()[0]
    assert "attention_examples" in report  # and nothing was lost


def test_noise_reaches_what_iid_r_says(result):
    assert float(result.trained["iid_r"].mean()) == pytest.approx(np.sqrt((3 * 64 - 4) / (64 * 65 / 2 - 1)))


# The mean-key split


def test_r_is_that_of_q_and_k_before_rope(capture):
    found = collected(MeanKey(d0=7, distances=(0, 2.5)), capture).squeeze("layer")
    geometry = capture.geometry
    assert found["d0"].values.tolist() == [0, 2.5, 7]
    both = mean_key_products(capture.q, capture.k, geometry.rope, geometry.scale, [0, 2.5, 7]).correlation()
    for name, expected in zip(("r", "r_within_rows"), both, strict=True):
        np.testing.assert_allclose(found[name].transpose("tokens", "d0", "head"), expected, atol=1e-6)


def test_the_headline_is_the_largest_distance_that_the_prompts_and_every_window_allow(mini, prompts):
    assert MeanKey().prepare(session_of(mini), list(prompts)).d0 == prompts.shape[1] - 1
    assert MeanKey(d0=7).prepare(session_of(mini), list(prompts)).d0 == 7
