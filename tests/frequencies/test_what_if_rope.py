"""Forecasts on real models: beside `variance`, against brute force under the hooks, and against the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from families import family_cases

from tl_posgen.core.engine import analyze
from tl_posgen.core.numbers import Numbers
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies import FrequencyRule, WhatIfRope, what_if_rope, with_frequencies
from tl_posgen.frequencies.longer_prompts import SEGMENTS, by_distance
from tl_posgen.frequencies.loss_of_heads import PREDICTORS
from tl_posgen.frequencies.numbers.changed_frequencies import change_elsewhere, seed_of
from tl_posgen.frequencies.what_if_rope import check_sentences, drift_sentences
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers import fused
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import token_losses
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes

TOKENS = torch.randint(2, 60, (2, 9), generator=torch.manual_seed(0))
QUIET = {"null_seeds": (), "progress": False}
FEW = {"rules": ("linear", "p_rope"), "factors": (2,), "times": (2,)}
WITHOUT = ["gpt2", "bloom", "opt", "gpt_neo", "mpt", "llama4"]


def brute(capture, u):
    """Scores of every query, key and distance, less their mean over keys and distances, first token left out."""
    q, k = (complex_planes(x[:, 1:].double(), capture.geometry.rope) for x in (capture.q, capture.k))
    w = capture.geometry.scale * torch.einsum("him,hjm,dm->hijd", q, k.conj(), u.to(q)).real
    return w - w.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(("name", "backend"), family_cases("neox", "gemma3", without=WITHOUT))
def test_distortions_are_those_of_every_query_key_and_distance(family_model, name, backend):
    model, row, captures = family_model(name, backend), TOKENS[:1], []
    data = WhatIfRope(**FEW)(model, row, **QUIET).sel(change="rule", rule="linear 2")
    run_capture(model, row, captures.append)
    for capture in captures:
        rope, d_head, window = capture.geometry.rope, capture.geometry.d_head, capture.geometry.window
        changed, here = FrequencyRule("linear", 2)(rope), data.sel(layer=capture.layer)
        rms = {}
        for times in (1, 2):
            d = torch.arange(min(9 * times, window or 99))
            u, new = (turning_factors(d, one, d_head) for one in (rope, changed))
            rms[times] = [brute(capture, one).square().mean((1, 2, 3)).sqrt() for one in (u, new - u)]
        for times, (_, change) in rms.items():
            expected = (change / rms[1][0]).numpy()
            np.testing.assert_allclose(here["distortion"].sel(times=times), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(here["sd"], rms[1][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "pale"),
    [
        ({"rules": ("linear",), "factors": (2, 1.2345678)}, ["linear 1.2345678"]),
        ({"rules": ("given", "linear"), "factors": (2, 4), "values": (0.1,) * 16}, ["linear 2"]),
    ],
)
def test_curves_of_the_largest_factor_and_of_given_frequencies_are_drawn_at_once(mini, options, pale):
    figure = WhatIfRope(**options, check=False)(mini, TOKENS, **QUIET).plot("curves")
    assert {trace.name for trace in figure.data if trace.visible == "legendonly"} == {*pale}


def test_own_frequencies_are_what_variance_finds(mini, alice):
    measures = ["variance", WhatIfRope(**FEW)]
    report = analyze(mini, alice, measures=measures, length=24, n_prompts=2, **QUIET)
    variance, data = (report[name].own for name in ("variance", "what_if_rope"))
    for part in ("position", "content", "interaction"):
        found = data["share"].sel(change="rule", rule="unchanged", times=1, part=part)
        expected = variance[part].sel(tokens="without first")
        np.testing.assert_allclose(found.squeeze(), expected.squeeze(), rtol=1e-6)
    assert (abs(data["distortion"].sel(rule="unchanged")) < 1e-6).all()
    assert (data["distortion"].sel(rule="linear 2") > 1e-3).all()


def test_a_peak_moves_by_the_factor_of_interpolation(mini, alice):
    """Only the scale of distances changes: a'(2 d) = a(d)."""
    data = WhatIfRope(rules=["linear"], factors=[2], times=[2])(mini, alice, length=24, n_prompts=2, **QUIET).sel()
    curve = data["curve"].assign_coords(distance=data["distance"])
    short = curve.sel(rule="unchanged", distance=range(24))
    np.testing.assert_allclose(curve.sel(rule="linear 2", distance=range(0, 48, 2)), short, atol=1e-5)
    peaks = data["peak"]
    before, after = peaks.sel(rule="unchanged", times=1), peaks.sel(rule="linear 2", times=2)
    assert (abs(after - 2 * before) <= 1).all()
    assert (before > 0).any()


@pytest.mark.slow
def test_rises_are_those_of_each_head_alone(mini, alice):
    tokens = torch.stack(list(WhatIfRope().prompt_tokens(mini, alice, 24, 2)))
    result = WhatIfRope(rules=["ntk"], factors=[4], times=[2], check=True)(mini, tokens, seed=3, **QUIET)
    rise, rule = result.own["rise"].sel(rule="ntk 4"), FrequencyRule("ntk", 4, int(mini.cfg.n_ctx))

    def elsewhere(rope):
        seed = seed_of(3, "ntk 4")
        return type(rope)(change_elsewhere(rope.inv_freq, rule(rope).inv_freq, seed), rope.pairing, rope.scaling)

    plain = token_losses(mini, tokens).mean(-1)
    for change, frequencies in (("rule", rule), ("random", elsewhere)):
        losses = token_losses(mini, tokens, with_frequencies(mini, frequencies, heads="2.3")).mean(-1)
        np.testing.assert_allclose(rise.sel(change=change, layer=2, head=3), losses - plain, atol=1e-9)
    heads = rise.sel(change="rule").mean("prompt").to_series()
    logits = (result.sel(change="rule", rule="ntk 4", times=1)["distortion"] * result.own["sd"]).to_series()
    found = result.own["rho"].sel(predictor="sd of the change", change="rule", rule="ntk 4", end="value")
    assert float(found) == pytest.approx(heads.corr(logits, method="spearman"))
    points = [trace for trace in result.plot("check").data if trace.name.endswith("rule")]
    assert sorted(points[0].y) == pytest.approx(sorted(heads))
    assert "Intervals need 4 prompts" in result.findings()[1]  # of two prompts there is no interval
    assert result.table()["rise"].tolist() == pytest.approx([0, heads.mean()])


@pytest.mark.parametrize(
    ("rises", "told"), [([0.1, 0.2, 0.15, 0.12], True), ([-0.1, -0.2, -0.15, -0.12], True), ([1, -1, 1, -1], False)]
)
def test_nothing_is_ranked_by_a_rise_that_is_not_told_from_zero(rises, told):
    ends, heads = ("value", "low", "high"), ("layer", "head")
    rise = np.broadcast_to(np.array(rises, float), (2, 1, 4)).reshape(2, 1, 4, 1, 1)
    data = xr.Dataset(
        {
            "rise": (("change", "rule", "prompt", *heads), rise),
            "rho": (("predictor", "change", "rule", "end"), np.full((3, 2, 1, 3), 0.5)),
        },
        {"change": ["rule", "random"], "rule": ["ntk 4"], "predictor": list(PREDICTORS), "end": list(ends)},
    )
    own = Numbers(WhatIfRope(rules=["ntk"], factors=[4]), data)
    found = " ".join(check_sentences(own, ["ntk 4"]))
    assert ("leaves out zero under ntk 4" in found) == told
    assert ("Rank correlation over heads of sd of scores" in found) == told
    assert ("nothing can be ranked" in found) != told


def rms(off, weights):
    return ((off.square() * weights).sum(-1) / weights.sum(-1)).sqrt()


@pytest.mark.parametrize("label", ["unchanged", "linear 2", "p_rope 2"])
def test_longer_prompts_say_how_far_the_forecast_is_off(mini, alice, label):
    """Here by brute force: scores of the running model under `with_frequencies`, query by query."""
    name, _, factor = label.partition(" ")
    rule = FrequencyRule(name, int(factor), int(mini.cfg.n_ctx)) if factor else lambda rope: rope
    result = WhatIfRope(**FEW, inside=12)(mini, alice, length=24, n_prompts=2, layers=[1, 2], **QUIET)
    rows, captures = WhatIfRope().prompt_tokens(mini, alice, 24, 2), []
    for row in rows:
        with mini.hooks(fwd_hooks=with_frequencies(mini, rule, layers=[1, 2])):
            run_capture(mini, row[None], captures.append, layers=[1, 2])
    for layer in (1, 2):
        scores = torch.stack([one.scores().double() for one in captures if one.layer == layer])
        curve = torch.tensor(result.own["curve"].sel(rule=label, layer=layer).values)
        sd = torch.tensor(result.own["sd"].sel(layer=layer).values)
        off, counts = torch.zeros(2, 4, 23).double(), torch.zeros(2, 23).double()
        for d in range(23):
            for place, queries in enumerate((range(1 + d, 12), range(max(12, 1 + d), 24))):
                pairs = [scores[:, :, i, i - d] for i in queries]  # the first token, a key of i = d, left out
                counts[place, d] = len(pairs)
                if pairs:
                    off[place, :, d] = torch.stack(pairs).mean((0, 1)) - curve[:, d]
        inside, beyond = (one - (one * n).sum(-1, keepdim=True) / n.sum() for one, n in zip(off, counts, strict=True))
        expected = {
            "inside": rms(inside, counts[0]),
            "beyond": rms(beyond, counts[0]),
            "further": rms(beyond, counts[1] * (torch.arange(23) >= 11)),
        }
        for segment, one in expected.items():
            found = result.own["error"].sel(rule=label, segment=segment, layer=layer)
            np.testing.assert_allclose(found, one / sd, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("inside", [2, 300, 900])
@pytest.mark.parametrize("n", [1, 9, 400])
def test_sums_by_distance_are_those_of_each_pair(n, inside, window):
    """Short, and long enough for `sums_over_band` to form no matrix."""
    q, k = torch.randn(2, 2, n, 4, generator=torch.manual_seed(n)).double()
    found = by_distance(q, k, inside, window)
    position = torch.arange(n)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or n)) & (position > 0)
    for place, queries in enumerate((position < inside, position >= inside)):
        pairs = (seen & queries[:, None]).double()
        at = distance.clamp(0).flatten()
        counts, sums = (
            torch.zeros(len(x), n).double().index_add(1, at, x.flatten(1))[:, : n - 1]
            for x in (pairs[None], pairs * (q @ k.mT))
        )
        torch.testing.assert_close(found["pairs"][:, place], counts.expand(2, -1))
        torch.testing.assert_close(found["scores"][:, place], sums)


def test_streamed_passes_have_the_same_errors(mini, alice, monkeypatch):
    """They form no scores whole: queries come in blocks."""
    lengths, of_rows = set(), LayerCapture.of_rows
    monkeypatch.setattr(fused, "SCORES_AT_ONCE", 2**10)
    monkeypatch.setattr(LayerCapture, "of_rows", lambda one, *rows: lengths.add(rows[1]) or of_rows(one, *rows))
    measure, how = WhatIfRope(**FEW, inside=40), {"length": 100, "n_prompts": 1, "layers": [1], **QUIET}
    plain, streamed = (measure(mini, alice, streaming=one, **how).own["error"] for one in (False, True))
    np.testing.assert_allclose(streamed, plain, rtol=1e-4)
    assert len(lengths) > 2


def test_findings_say_what_the_forecast_was_not_tested_on(mini, alice):
    """And where longer prompts drift away from it."""
    n_ctx = int(mini.cfg.n_ctx)
    short = WhatIfRope(**FEW)(mini, alice, length=12, n_prompts=1, layers=[1], **QUIET)
    assert "error" not in short.own
    assert "No prompt is longer than 12 tokens: whether moments drift beyond is not tested." in short.findings()
    assert "training length" not in " ".join(short.findings())
    far = WhatIfRope(**FEW | {"times": (2, n_ctx)})(mini, alice, length=12, n_prompts=1, layers=[1], **QUIET)
    assert f"to {12 * n_ctx:,} tokens, beyond the training length of {n_ctx:,}" in " ".join(far.findings())
    assert "does not say what that costs" in " ".join(far.findings())
    told = WhatIfRope(**FEW, training_length=23)(mini, alice, length=12, n_prompts=1, layers=[1], **QUIET)
    assert "to 24 tokens, beyond the training length of 23" in " ".join(told.findings())


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([[1.0, 1.9, 2.0], [1.0, 2.1, 0.5]], "under linear 2;"),
        ([[1.0, 1.0, 2.1], [1.0, 2.1, 0.5]], "under unchanged, linear 2;"),
        ([[1.0, 1.9, 2.0], [1.0, 1.0, np.nan]], "under no rule."),
    ],
)
def test_drift_is_an_error_of_over_twice_that_inside(errors, words):
    labels = {"rule": ["unchanged", "linear 2"], "segment": list(SEGMENTS)}
    data = xr.Dataset({"error": (("rule", "segment", "layer", "head"), np.array(errors)[:, :, None, None])}, labels)
    found = drift_sentences(Numbers(WhatIfRope(**FEW), data), 12)
    assert "by unchanged 1.00, " in found[0]
    assert words in found[1]


def test_moments_are_those_of_the_short_prompt(mini, alice):
    """Attention is causal, so that the first tokens of a long prompt are a short prompt."""
    rows = WhatIfRope().prompt_tokens(mini, alice, 24, 2)
    long = WhatIfRope(**FEW, inside=12)(mini, torch.stack(list(rows)), **QUIET)
    short = WhatIfRope(**FEW)(mini, torch.stack([row[:12] for row in rows]), **QUIET)
    np.testing.assert_allclose(long.own["distortion"], short.own["distortion"], atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["given"], "values": [1.0, 0.5]}, r"layer 0: given: \[2\] values for 16 RoPE planes"),
        ({"rules": ["longrope"]}, "needs one value a plane"),
        ({"rules": ["linear"], "values": [1.0]}, "neither is among its rules"),
        ({"rules": ["longrope", "given"], "values": [1.0] * 16}, "run the two apart"),
        ({"rules": ["longrope"], "values": [1.0] * 16, "training_length": 1}, "a training length of 2 or more"),
        ({"factors": [0.5]}, "a number, 1 or more"),
        ({"rules": ["dynamic"]}, "one of 'linear'"),
        ({"times": [10**6]}, "tokens in all"),
    ],
)
def test_refused(mini, options, message):
    with pytest.raises(InputError, match=message):
        WhatIfRope(**options)(mini, TOKENS, **QUIET)


def test_a_check_needs_prompts_of_one_length(mini):
    with pytest.raises(InputError, match="one has 5"):
        WhatIfRope(check=True)(mini, [TOKENS[0], TOKENS[1, :5]], **QUIET)


def test_a_model_without_rope_is_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        WhatIfRope()(family_model("bloom", "bridge"), TOKENS, **QUIET)


def test_random_changes_depend_on_the_seed_and_not_on_other_rules(mini):
    def distortions(rules, seed):
        data = WhatIfRope(rules=rules, factors=[2], times=[2])(mini, TOKENS, seed=seed, **QUIET).own
        return data["distortion"].sel(change="random", rule="p_rope 2").values

    first, alone, other = (
        distortions(["linear", "ntk", "p_rope"], 0),
        distortions(["p_rope"], 0),
        distortions(["p_rope"], 1),
    )
    np.testing.assert_allclose(first, alone, rtol=1e-12)
    assert (abs(other - alone) > 1e-3).any()


def test_one_plane_alone_has_no_random_change(mini, monkeypatch):
    one = replace(geometry_of(mini)[1], rope=Rope(torch.ones(1, dtype=torch.float64)))
    monkeypatch.setattr(what_if_rope, "rotary_layers", lambda model: [one])
    with pytest.raises(InputError, match="layer 1 has one RoPE plane alone"):
        WhatIfRope(rules=["linear"]).prepare(mini, list(TOKENS))


def test_layers_without_rope_stay_as_they_are(family_model):
    data = WhatIfRope(**FEW, check=True)(family_model("smollm3", "bridge"), TOKENS, **QUIET).sel(
        rule="linear 2", change="rule"
    )
    still = [layer for layer in data["layer"].values if (data["distortion"].sel(layer=layer) == 0).all()]
    assert len(still) == 1
    assert (data["rise"].sel(layer=still[0]).fillna(0) == 0).all()


def test_factors_that_are_nearly_alike_have_labels_of_their_own():
    labels = list(WhatIfRope(rules=["linear"], factors=[2, 2.0000001], inside=8).labelled)
    assert labels == ["unchanged", "linear 2", "linear 2.0000001"]
