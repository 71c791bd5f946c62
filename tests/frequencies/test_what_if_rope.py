"""Forecasts on real models: beside `variance`, against brute force under the hooks, and against the loss."""

import numpy as np
import pytest
import torch
from families import family_cases

from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies import FrequencyRule, WhatIfRope, with_frequencies
from tl_posgen.frequencies.numbers.changed_frequencies import change_elsewhere
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes

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
    result = WhatIfRope(rules=["ntk"], factors=[4], times=[2], check=True)(mini, tokens, **QUIET)
    rise, rule = result.own["rise"].sel(rule="ntk 4"), FrequencyRule("ntk", 4, int(mini.cfg.n_ctx))

    def elsewhere(rope):
        return type(rope)(change_elsewhere(rope.inv_freq, rule(rope).inv_freq, 1), rope.pairing, rope.scaling)

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
    assert "Rank correlation over heads of sd of scores" in result.findings()[-1]
    assert result.table()["rise"].tolist() == pytest.approx([0, heads.mean()])


def test_longer_prompts_say_how_far_the_forecast_is_off(mini, alice):
    """Here by brute force, at the model's own frequencies."""
    result = WhatIfRope(**FEW, inside=12)(mini, alice, length=24, n_prompts=1, layers=[1], **QUIET)
    short = WhatIfRope(**FEW)(mini, alice, length=12, n_prompts=1, layers=[1], **QUIET)
    assert "error" not in short.own
    rows, captures = WhatIfRope().prompt_tokens(mini, alice, 24, 1), []
    run_capture(mini, rows[0][None], captures.append, layers=[1])
    scores, curve = captures[0].scores().double()[:, 1:, 1:], result.own["curve"].sel(rule="unchanged", layer=1)
    off, counts = [], torch.arange(23, 0, -1).double()
    for head in range(4):
        mean = torch.stack([scores[head].diagonal(-d).mean() for d in range(23)])
        off.append(mean - torch.tensor(curve.sel(head=head).values[:23]))
    off = torch.stack(off)
    off = off - (off * counts).sum(-1, keepdim=True) / counts.sum()
    sd = torch.tensor(result.own["sd"].sel(layer=1).values)
    for segment, part in (("inside", slice(12)), ("beyond", slice(12, None))):
        expected = ((off.square() * counts)[:, part].sum(-1) / counts[part].sum()).sqrt() / sd
        found = result.own["error"].sel(rule="unchanged", segment=segment, layer=1)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (result.own["error"].sel(rule="linear 2") > 0).all()
    assert "Mean scores of longer prompts" in " ".join(result.findings())


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


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_models_without_rope_are_refused(family_model, name):
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        WhatIfRope()(family_model(name, "bridge"), TOKENS, **QUIET)


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
