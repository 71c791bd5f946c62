"""The three-axis measure: what is collected of real models, and what the figures draw."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.analysis import analyze
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.tokens import read_text
from tl_posgen.position.decomposition import pair_weights_fit, three_axis
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.layer_fits import fit_capture, shuffled, weighting
from tl_posgen.position.decomposition.three_axis import ThreeAxis
from tl_posgen.position.decomposition.three_axis_fit import fit_three_axis

QUICK = {"null_seeds": (), "progress": False}
SHARES = [f"share_{name}" for name in ("q", "k", "d", "qk", "qd", "kd", "qkd")]


@pytest.fixture(scope="module")
def result(report):
    return report["three_axis"]


def test_the_frame_has_one_row_a_head_and_the_promised_columns(result):
    frame = result.frame()
    assert len(frame) == 16
    assert {"layer", "head", "r", "r_without_first_token", "r_within_rows"} <= set(frame.columns)
    assert frame["r"].between(0, 1).all()


def test_the_trained_model_follows_position_and_key_more_than_its_null(report):
    trained, null = report.frame().mean(), report.frame(null=True).mean()
    assert trained["three_axis_r_within_rows"] > null["three_axis_r_within_rows"] + 0.2


@pytest.mark.parametrize("name", ["three_axis", "variance", "mean_key"])
def test_every_measure_has_a_null_that_is_another_model(report, name):
    result = report[name]
    sides = [result.frame().iloc[:, 2], *(null[result.frame().columns[2]].values.ravel() for null in result.nulls)]
    assert not np.allclose(sides[0], sides[1])
    assert not np.allclose(sides[1], sides[2])


def test_means_over_prompts_are_those_of_dense_scores(single, capture):
    fit = fit_three_axis(pair_moments_from_scores(capture.scores()))
    found = single["three_axis"].dataset.sel(layer=1)
    np.testing.assert_allclose(found["r"], fit.r, atol=1e-6)
    np.testing.assert_allclose(found["r_within_rows"], fit.r_within_rows, atol=1e-6)
    for name in "abc":
        np.testing.assert_allclose(found[name], getattr(fit, name), atol=1e-4)


def test_r_is_the_mean_over_prompts_and_lies_in_its_interval(result):
    data = result.dataset
    xr.testing.assert_allclose(data["r"], data["r_per_prompt"].mean("prompt"))
    assert ((data["r_low"] <= data["r"]) & (data["r"] <= data["r_high"])).all()
    assert (data["r_low"] < data["r_high"]).all()


def test_a_single_prompt_has_no_interval(single):
    assert single["three_axis"].dataset[["r_low", "r_high"]].to_array().isnull().all()


def test_pairs_behind_a_curve_are_counted_over_prompts(result):
    np.testing.assert_array_equal(result.dataset["n_distance"].sel(layer=0), 4 * np.arange(64, 0, -1))


def test_noise_reaches_what_iid_r_says(result):
    assert float(result.dataset["iid_r"].mean()) == pytest.approx(np.sqrt((3 * 64 - 4) / (64 * 65 / 2 - 1)))


@pytest.mark.parametrize(
    "options",
    [
        *({"diagonal": False}, {"ridge": 5.0}, {"gauge": "flat_distance"}, {"weights": (8, 3, 0.05)}),
        *({"weights": "attention"}, {"weights": "attention", "diagonal": False, "ridge": 0.1}),
    ],
)
def test_options_change_the_fit_that_they_name(capture, collected, options):
    found, fit = collected(three_axis, capture, **options), fit_capture(capture, **options)[0]
    np.testing.assert_allclose(found["r"].squeeze("layer"), fit.r)
    np.testing.assert_allclose(found["a"].squeeze("layer"), fit.a)
    usual = collected(three_axis, capture)
    assert not np.allclose(found["a"], usual["a"], equal_nan=True)


NEAR = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.05)


@pytest.mark.parametrize("weights", [NEAR, "attention"], ids=str)
def test_weighted_fits_are_those_of_the_scores_weighted_alike(capture, weights):
    """By distance and by pair must agree where the weights of pairs are those of distances."""
    fit, rest = fit_capture(capture, weights=weights)
    scores = capture.scores().double()
    if weights == "attention":
        of_pairs = scores.softmax(-1)
    else:
        of_pairs = torch.tensor(NEAR, dtype=torch.float64)[(torch.arange(64)[:, None] - torch.arange(64)).clamp(0, 8)]
        of_pairs = of_pairs.expand_as(scores)
    assert rest is not None
    for found, first_token in ((fit, True), (rest, False)):
        expected = fit_pair_weights(scores, of_pairs, CausalPairs(64, first_token=first_token))
        torch.testing.assert_close(found.r, expected.r, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.r_within_rows, expected.r_within_rows, atol=1e-6, rtol=0)


@pytest.mark.parametrize("weights", [NEAR, "attention"], ids=str)
def test_a_weighted_measure_says_so_and_has_its_null(mini, prompts, weights):
    result = three_axis(mini, prompts[:1], weights=weights, layers=[1], null_seeds=(0,), progress=False)
    words = weighting(weights)
    assert result.summary["weighting"] == words
    assert words in result.findings()[0]
    for kind in ("map", "curves"):
        assert words in result.plot(kind).layout.title.text
    assert result.null_summary is not None
    assert result.null_summary["r"] < result.summary["r"]
    # noise is no match for what it reaches with all pairs alike: near pairs alone leave many parameters a pair
    assert float(result.dataset["iid_r"].mean()) > 0.4
    assert float(result.dataset["iid_r"].mean()) < result.summary["r"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 0.0), r"weights by distance, \[1.0, 0.0\]: each must be above 0"),
        ((), r"weights by distance, \[\]: each must be above 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, message):
    with pytest.raises(InputError, match=message):
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


def test_weights_by_attention_refuse_what_is_too_long(capture, monkeypatch):
    monkeypatch.setattr(pair_weights_fit, "LONGEST", 63)
    with pytest.raises(InputError, match="64 tokens are more than 63; give shorter prompts, or weights by distance"):
        fit_capture(capture, weights="attention")


def test_a_fit_of_some_heads_is_that_of_all_at_these(capture):
    fit, some = fit_capture(capture)[0], fit_capture(capture)[0].of_heads(slice(1, 3))
    where = torch.arange(9)
    assert torch.equal(some.fitted(where, where).nan_to_num(), fit.fitted(where, where)[1:3].nan_to_num())
    assert torch.equal(some.r, fit.r[1:3])


def test_the_map_shows_trained_and_null_r_side_by_side(result):
    maps = result.plot("map").data
    names = ["r", "r_without_first_token", "r_within_rows"]
    for heatmap, (side, name) in zip(maps, [(s, n) for s in (result.dataset, result.null) for n in names], strict=True):
        np.testing.assert_array_equal(heatmap.z, side[name])


def test_curves_are_a_of_every_head_with_the_nulls_behind(result):
    traces = result.plot("curves").data
    assert len(traces) == 4 + 16
    null, trained = traces[0], traces[1]
    np.testing.assert_array_equal(trained.x - 1, np.arange(64)[np.isin(np.arange(64), trained.x - 1)])
    assert trained.x[-1] == 64
    np.testing.assert_allclose(trained.y, result.dataset["a"].sel(layer=0, head=0, distance=trained.x - 1))
    n = len(trained.x)  # one line holds the nulls of all heads of a layer
    assert len(null.x) == 4 * n + 3 or len(null.x) == 4 * (n + 1)
    np.testing.assert_allclose(null.y[:n], result.null["a"].sel(layer=0, head=0, distance=null.x[:n].astype(int) - 1))


def test_the_curves_say_what_their_gauge_is(mini, prompts):
    result = three_axis(mini, prompts[:1], layers=[0], gauge="flat_queries", null_seeds=(), progress=False)
    assert "b without a linear trend" in result.plot("curves").layout.title.text


def test_prompts_have_a_line_a_head(result):
    traces = result.plot("prompts").data
    assert len(traces) == 4 + 16
    np.testing.assert_allclose(traces[1].y, result.dataset["r_per_prompt"].sel(layer=0, head=0))


def test_the_null_is_drawn_in_grey_and_named_once(result):
    traces = result.plot("prompts").data
    assert {trace.line.color for trace in traces if trace.name == "random init (seed 0)"} == {"#9ca3af"}
    assert sum(trace.showlegend for trace in traces if trace.name == "random init (seed 0)") == 1


# Values measured once and written down


def test_reference_values_of_the_mini_model(report):
    measured, null = report.frame().mean(), report["three_axis"].null.mean(("layer", "head"))
    assert measured["three_axis_r"] == pytest.approx(0.7856, abs=1e-4)
    assert measured["three_axis_r_without_first_token"] == pytest.approx(0.7712, abs=1e-4)
    assert measured["three_axis_r_within_rows"] == pytest.approx(0.7221, abs=1e-4)
    assert [float(null[name]) for name in ("r", "r_within_rows")] == pytest.approx([0.6163, 0.5191], abs=1e-4)
    assert float(report["three_axis"].dataset["r_pooled"]) == pytest.approx(0.8593, abs=1e-4)
    layers = report["three_axis"].dataset["r_layer"].values
    np.testing.assert_allclose(layers, [0.5432, 0.8685, 0.8672, 0.8634], atol=1e-4)
    shares = [0.2005, 0.1338, 0.2398, 0.2232, 0.0898, 0.0328, 0.0801]
    np.testing.assert_allclose([measured[share] for share in SHARES], shares, atol=1e-4)
    assert measured["mean_key_r"] == pytest.approx(0.5943, abs=1e-4)
    assert measured["residual_share"] == pytest.approx(0.4537, abs=1e-4)
    position = report["across_prompts"].summary["position_without_first_token"]
    assert position == pytest.approx(0.2797, abs=1e-4)


def test_reference_values_of_stories260k(shared):
    model = tl_posgen.load_model(str(shared / "models" / "stories260K"))
    text = read_text(shared / "text" / "tinystories.txt")
    report = analyze(model, text, measures=["three_axis", "variance"], length=512, n_prompts=1, progress=False)
    measured, null = report.frame().mean(), report.frame(null=True).mean()
    assert measured["three_axis_r"] == pytest.approx(0.9164, abs=1e-4)
    assert measured["three_axis_r_without_first_token"] == pytest.approx(0.9166, abs=1e-4)
    assert measured["three_axis_r_within_rows"] == pytest.approx(0.8626, abs=1e-4)
    assert null["three_axis_r"] == pytest.approx(0.3228, abs=1e-4)
    layers = report["three_axis"].dataset["r_layer_without_first_token"].values
    np.testing.assert_allclose(layers, [0.899, 0.933, 0.918, 0.934, 0.899], atol=0.001)
    shares = [measured[share] for share in SHARES]
    np.testing.assert_allclose(shares, [0.303, 0.146, 0.364, 0.027, 0.091, 0.052, 0.018], atol=6e-4)


@pytest.mark.parametrize("n", [2, 3])
def test_a_fit_of_as_many_parameters_as_pairs_says_nothing(mini, n):
    report = tl_posgen.analyze(mini, torch.arange(5, 5 + n)[None], measures="three_axis", **QUICK)
    assert report["three_axis"].dataset["r"].isnull().all()
    assert report.findings() == [
        f"Whether scores are position + query + key cannot be said: prompts of {n} tokens have as many parameters as "
        "pairs; give 4 tokens at least, better 100."
    ]


def test_four_tokens_say_nothing_without_the_first_or_the_diagonal(mini):
    tokens = torch.arange(5, 9)[None]
    data = tl_posgen.analyze(mini, tokens, measures="three_axis", **QUICK)["three_axis"].dataset
    assert data["r"].notnull().all()
    assert data["r_without_first_token"].isnull().all()
    off = tl_posgen.analyze(mini, tokens, measures=[ThreeAxis(diagonal=False)], **QUICK)["three_axis"].dataset
    assert off["r"].isnull().all()


def test_scores_that_rounding_made_say_nothing():
    model = tl_posgen.load_model("mini")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(1e-40)
    report = tl_posgen.analyze(model, torch.arange(5, 45)[None], **QUICK)
    assert report["three_axis"].dataset["r"].isnull().all()
    assert "the scores of every head are constant" in report.findings()[0]
    assert "attention_examples" in report  # and nothing was lost
