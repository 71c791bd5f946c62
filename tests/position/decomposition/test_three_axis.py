"""The three-axis measure: what is collected of real models, and what the figures draw."""

import numpy as np
import pytest
import torch

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition import ThreeAxis
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.decomposition.numbers.variance_shares import COMPONENTS
from tl_posgen.position.decomposition.three_axis import fit_capture, shuffled, weighting

QUICK = {"null_seeds": (), "progress": False}
OUT = {"tokens": "without first"}
NEAR = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.05)


@pytest.fixture(scope="module")
def result(report):
    return report["three_axis"]


def test_the_trained_model_follows_position_and_key_more_than_its_null(result):
    r = result.numbers("r_within_rows")
    assert r.value > r.of_inits.value + 0.2
    assert not np.allclose(result.frame()["r"], result.frame(**OUT)["r"])


def test_fits_of_a_layer_are_those_of_its_scores(single, capture):
    fit = fit_three_axis(pair_moments_from_scores(capture.scores()))
    found = single["three_axis"].sel(tokens="all", layer=1)
    np.testing.assert_allclose(found["r"], fit.r, atol=1e-6)
    np.testing.assert_allclose(found["r_within_rows"], fit.r_within_rows, atol=1e-6)
    for name in "abc":
        np.testing.assert_allclose(found[name], getattr(fit, name), atol=1e-4)


def test_r_lies_in_its_interval(result, single):
    ends = result.numbers.intervals("r", tokens=None)
    assert ((ends["low"] <= ends["value"]) & (ends["value"] <= ends["high"])).all()
    assert (ends["low"] < ends["high"]).all()
    frame = result.frame(intervals=True)
    assert frame["r, low"].tolist() == ends["low"].sel(tokens="all").transpose("layer", "head").values.ravel().tolist()
    assert single["three_axis"].numbers.intervals("r")[["low", "high"]].to_array().isnull().all()  # of one prompt


def test_noise_reaches_what_iid_r_says(result):
    assert float(result.own["iid_r"].mean()) == pytest.approx(np.sqrt((3 * 64 - 4) / (64 * 65 / 2 - 1)))


@pytest.mark.parametrize(
    "options",
    [
        *({"diagonal": False}, {"ridge": 5.0}, {"gauge": "flat_distance"}, {"weights": (8, 3, 0.05)}),
        *({"weights": "attention"}, {"weights": "attention", "diagonal": False, "ridge": 0.1}),
    ],
)
def test_options_change_the_fit_that_they_name(capture, collected, options):
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
    result = ThreeAxis(weights=weights)(mini, prompts[:1], layers=[1], null_seeds=(0,), progress=False)
    words = weighting(weights)
    assert words in result.findings()[0]
    for kind in ("map", "curves"):
        assert words in result.plot(kind).layout.title.text
    r = result.numbers("r")
    assert r.of_inits.value < r.value
    # noise is no match for what it reaches with all pairs alike: near pairs alone leave many parameters a pair
    assert 0.4 < float(result.own["iid_r"].mean()) < r.value


def test_weights_are_said_in_words():
    assert weighting(None) == "all pairs weighted alike"
    assert weighting((2.0, 1.0, 0.05)) == "pairs weighted by distance: 2, 1, then .05"
    assert weighting(NEAR) == "pairs weighted by distance: 8, 7, 6, 5, 4, 3, 2, 1, then .05"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("weights", [(1.0, 0.0), (-1.0,), "near"], ids=str)
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(InputError, match=r"three_axis: weights = .*: give a list, each a number above 0 or "):
        ThreeAxis(weights=weights)


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


# Figures


def test_curves_are_a_of_every_head_with_the_nulls_behind(result):
    traces = result.plot("curves").data
    assert len(traces) == 2 * 4 + 16
    null, trained = traces[1], traces[2]
    np.testing.assert_array_equal(trained.x - 1, np.arange(64)[np.isin(np.arange(64), trained.x - 1)])
    assert trained.x[-1] == 64
    np.testing.assert_allclose(trained.y, result.own["a"].sel(layer=0, head=0, distance=trained.x - 1))
    n = len(trained.x)  # one line holds the nulls of all heads of a layer
    assert len(null.x) == 4 * n + 3 or len(null.x) == 4 * (n + 1)
    np.testing.assert_allclose(null.y[:n], result.null["a"].sel(layer=0, head=0, distance=null.x[:n].astype(int) - 1))


def test_the_curves_say_what_their_gauge_is(mini, prompts):
    result = ThreeAxis(gauge="flat_queries")(mini, prompts[:1], layers=[0], **QUICK)
    assert "b without a linear trend" in result.plot("curves").layout.title.text


# Values measured once and written down


def test_reference_values_of_the_mini_model(report):
    r, share = report["three_axis"].numbers, report["variance"].numbers
    found = [r("r"), r("r", **OUT), r("r_within_rows"), report["mean_key"].numbers("r")]
    found.append(report["residual"].numbers("share"))
    expected = [0.7856, 0.7712, 0.7221, 0.9020, 0.4537]
    assert [number.value for number in found] == pytest.approx(expected, abs=1e-4)
    assert [r(name).inits[0] for name in ("r", "r_within_rows")] == pytest.approx([0.6163, 0.5191], abs=1e-4)
    layers = report["three_axis"].sel(tokens="all")["r"].mean("head")
    np.testing.assert_allclose(layers, [0.5432, 0.8685, 0.8672, 0.8634], atol=1e-4)
    shares = [0.2005, 0.1338, 0.2398, 0.2232, 0.0898, 0.0328, 0.0801]
    np.testing.assert_allclose([share("share", part=part).value for part in COMPONENTS], shares, atol=1e-4)


def test_reference_values_of_stories260k(stories, tinystories):
    report = analyze(stories, tinystories, measures=["three_axis", "variance"], length=512, n_prompts=1, progress=False)
    r, share = report["three_axis"].numbers, report["variance"].numbers
    found = [r("r").value, r("r", **OUT).value, r("r_within_rows").value, r("r").inits[0]]
    assert found == pytest.approx([0.9164, 0.9166, 0.8626, 0.3228], abs=1e-4)
    assert 0.20 < r("r_within_rows").inits[0] < 0.27
    layers = report["three_axis"].sel(**OUT)["r"].mean("head")
    np.testing.assert_allclose(layers, [0.899, 0.933, 0.918, 0.934, 0.899], atol=0.001)
    shares = [share("share", part=part) for part in COMPONENTS]
    expected = [0.303, 0.146, 0.364, 0.027, 0.091, 0.052, 0.018]
    np.testing.assert_allclose([one.value for one in shares], expected, atol=6e-4)
    assert shares[-1].inits[0] > 0.5


# Scores that have no r


@pytest.mark.parametrize("n", [2, 3])
def test_a_fit_of_as_many_parameters_as_pairs_says_nothing(mini, n):
    report = analyze(mini, torch.arange(5, 5 + n)[None], measures="three_axis", **QUICK)
    assert report["three_axis"].own["r"].isnull().all()
    assert report.findings() == [
        f"Whether scores are position + query + key cannot be said: prompts of {n} tokens have as many parameters as "
        "pairs; give 4 tokens at least, better 100."
    ]


def test_four_tokens_say_nothing_without_the_first_or_the_diagonal(mini):
    tokens = torch.arange(5, 9)[None]
    r = ThreeAxis()(mini, tokens, **QUICK).own["r"]
    assert r.sel(tokens="all").notnull().all()
    assert r.sel(OUT).isnull().all()
    assert ThreeAxis(diagonal=False)(mini, tokens, **QUICK).own["r"].isnull().all()


def test_scores_that_rounding_made_say_nothing():
    model = tl_posgen.load_model("mini")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(1e-40)
    report = analyze(model, torch.arange(5, 45)[None], **QUICK)
    assert report["three_axis"].own["r"].isnull().all()
    assert "the scores of every head are constant" in report["three_axis"].findings()[0]
    assert "attention_examples" in report  # and nothing was lost
