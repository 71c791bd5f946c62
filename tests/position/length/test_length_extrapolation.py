"""Conditions beyond the training length on the bundled model, with a short stand-in for that length."""

import numpy as np
import pytest
import torch
import xarray as xr
from rotated_heads import captures_of
from scipy.stats import t

from tl_posgen.claims import PAPERS
from tl_posgen.claims.running import analyses_of
from tl_posgen.hooks import lm_infinite
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.length import LengthExtrapolation
from tl_posgen.position.length.length_extrapolation import TOLERATED, within_noise
from tl_posgen.position.length.numbers import OutputMoments, output_drift, output_plane

pytestmark = pytest.mark.longer

OPTIONS = {"inside": 16, "times": 3, "n_global": 2, "block": 4, "n_blocks": 1}
CUT = {"length": 16, "n_prompts": 2, "progress": False}
QUIET = {**CUT, "nulls": 0}
HEAD = ("layer", "head")


@pytest.fixture(scope="session")
def result(mini, alice):
    return LengthExtrapolation(**OPTIONS)(mini, alice, nulls=2, **CUT)


def test_windows_change_nothing_inside_the_training_length_and_keep_the_entropy_down_beyond(result):
    loss = result.trained["loss"]
    inside, last = loss.sel(bin=loss["bin"] < 12), loss.isel(bin=-1).mean("prompt")
    for condition in ("lm_infinite", "retrieval"):
        np.testing.assert_allclose(inside.sel(condition=condition), inside.sel(condition="unchanged"), atol=1e-4)
    assert len(set(last.values.round(6))) == len(result.measure.conditions)
    entropy = result.trained["entropy"].isel(bin=-1).mean(HEAD)
    assert entropy.sel(condition="lm_infinite") < entropy.sel(condition="unchanged")


def test_drift_and_attention_are_those_of_captured_outputs_with_halves_of_different_prompts(mini, alice, result):
    every, prompts = result.trained.sel(condition="unchanged", layer=2), to_prompts(mini, alice, length=48, n_prompts=2)
    kept = captures_of(mini, prompts, "v", "attn_scores", "pattern", layers=[2])
    outputs = [capture.pattern @ capture.v for capture in kept]
    halves = tuple(OutputMoments.from_outputs(o[:, 8:16]) for o in outputs)
    beyond = tuple(OutputMoments.from_outputs(o[:, 40:48]) for o in outputs)
    for name, expected in output_drift(halves, beyond).items():
        found = every[name].sel(segment=2) if "segment" in every[name].dims else every[name]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, known in {"frechet": every["noise_level"], "mahalanobis": 1, "norm_ratio": 1}.items():  # from itself
        np.testing.assert_allclose(every[name].sel(segment=0), known, atol=1e-6)
    scores = torch.stack([capture.attn_scores.double() for capture in kept])
    weights = scores.softmax(-1)
    references = {"entropy": -weights.xlogy(weights).sum(-1), "normaliser": scores.logsumexp(-1)}
    for name, by_query in references.items():
        by_bin = by_query.mean(0).unflatten(-1, (-1, 4)).mean(-1)
        np.testing.assert_allclose(every[name].transpose("head", "bin"), by_bin, atol=1e-5, err_msg=name)


def test_the_planes_are_those_of_captured_outputs(mini, alice, result):
    """Coordinates [prompt, position, axis] in the plane of the untouched outputs of the training length."""
    kept, prompts = {}, to_prompts(mini, alice, length=48, n_prompts=2)
    for condition, hooks in {"unchanged": [], "lm_infinite": lm_infinite(mini, 16, OPTIONS["n_global"])}.items():
        with mini.hooks(fwd_hooks=hooks):
            kept[condition] = captures_of(mini, prompts, "v", "pattern")
    assert result.trained["shown_layer"].values.tolist() == [0, 2, 3]
    for layer in (0, 2, 3):
        outputs = {}
        for condition, captures in kept.items():
            of_layer = [one.pattern.double() @ one.v.double() for one in captures if one.layer == layer]
            outputs[condition] = torch.stack([torch.cat([*one], 1) for one in of_layer])
        plane = output_plane(outputs["unchanged"][:, 8:16].flatten(0, 1))
        for condition, expected in outputs.items():
            one = result.trained.sel(condition=condition, shown_layer=layer)
            np.testing.assert_allclose(one["plane_coordinates"], plane.coordinates(expected), atol=2e-4)
            assert float(one["plane_share"]) == pytest.approx(plane.share, abs=1e-5)


def test_chosen_heads_alone_are_measured_and_edited(mini, alice, result):
    measure = LengthExtrapolation(**OPTIONS, conditions=["lm_infinite"])
    some, every = measure(mini, alice, heads=(1, 2), **QUIET).trained, result.trained
    assert some["condition"].values.tolist() == ["unchanged", "lm_infinite"]
    unchanged = every.sel(condition="unchanged", layer=[1], head=[2])
    for name in ("frechet", "entropy", "noise_level"):
        np.testing.assert_allclose(some.sel(condition="unchanged")[name], unchanged[name], rtol=1e-5, atol=1e-7)
    edited, others = (one["segment_loss"].mean("prompt").sel(segment=2) for one in (some, every))
    assert float(edited.sel(condition="lm_infinite")) not in others.values


def test_streamed_passes_give_the_same(mini, alice, result):
    """The untouched model's by rows; layers whose scores are edited form them, and the others do not."""
    streamed = LengthExtrapolation(**OPTIONS)(mini, alice, streaming=True, **QUIET).trained
    for name in ("loss", "entropy", "normaliser", "frechet", "norm_ratio", "noise_level"):
        np.testing.assert_allclose(streamed[name], result.trained[name], rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(streamed["plane_coordinates"], result.trained["plane_coordinates"], atol=2e-3)


def test_heads_without_a_number_do_not_count_within_the_noise_level(result):
    one = result.trained.sel(condition="unchanged", segment=1)
    frechet = one["frechet"].copy()
    frechet[0, 0] = np.nan
    expected = (one["frechet"] - one["noise_level"] <= TOLERATED).values.ravel()[1:].mean()
    assert float(within_noise(frechet, one["noise_level"])) == pytest.approx(expected)
    assert float(within_noise(one["frechet"], xr.full_like(frechet, float(one["frechet"].median()) - TOLERATED))) == 0.5


def test_the_rise_of_the_loss_is_paired_by_prompt(mini, alice):
    """Against the losses of four prompts, taken one by one."""
    measure, inside = LengthExtrapolation(**OPTIONS, conditions=["lm_infinite"]), OPTIONS["inside"]
    result = measure(mini, alice, layers=[0], **{**QUIET, "n_prompts": 4})
    rows = torch.stack(to_prompts(mini, alice, inside * OPTIONS["times"], 4))
    under, own = token_losses(mini, rows, lm_infinite(mini, inside, 2, layers=[0])), token_losses(mini, rows)
    segments = torch.stack([under[:, start : start + inside].mean(1) for start in range(inside, rows.shape[1], inside)])
    rise = (segments.mean(0) - own[:, :inside].mean(1)).double().numpy()
    half = t.ppf(0.975, len(rise) - 1) * rise.std(ddof=1) / len(rise) ** 0.5
    found = measure.beyond(result.numbers, "lm_infinite")["rise"]
    assert [found.value, found.low, found.high] == pytest.approx(rise.mean() + np.array([0, -half, half]), rel=1e-3)


def test_one_training_length_has_nothing_beyond(mini, alice):
    once = LengthExtrapolation(**{**OPTIONS, "times": 1})(mini, alice, **QUIET)
    assert not once.measure.beyond(once.numbers, "unchanged")["within_noise"]
    assert once.findings() == ["Nothing was run beyond 16 tokens (trained on 512)."]
    assert once.provenance["length"] == 16  # it says again what `inside` is
    assert len(once.table()) == len(once.measure.conditions)


@pytest.mark.parametrize(("gigabytes", "inside"), [(8, 512), (0.3, 128)])
def test_prompts_of_several_training_lengths_are_run_where_they_fit_into_memory(mini, monkeypatch, gigabytes, inside):
    """1,536 tokens of the bundled model's 4 heads take 0.42 GB, of 11 matrices a layer."""
    monkeypatch.setattr("tl_posgen.models.memory.memory_of", lambda device: int(gigabytes * 1e9))
    monkeypatch.setattr("tl_posgen.position.length.length_extrapolation.SHORT", 128)
    assert LengthExtrapolation().inside_for(session_of(mini)) == inside
    [claim] = [claim for claim in PAPERS["position"] if claim.name == "position 6"]
    analyses, reasons = analyses_of([claim], session_of(mini))
    assert bool(analyses) == (inside == 512)  # prompts inside the training length say nothing on the claim
    assert bool(reasons) == (inside < 512)
    assert LengthExtrapolation(inside=16).inside_for(session_of(mini)) == 16


def test_slopes_are_run_too_and_prompts_that_are_given_are_not_counted(family_model):
    tokens = torch.randint(2, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    bloom = family_model("bloom", "bridge")
    found = LengthExtrapolation(inside=16, times=3)(bloom, tokens, nulls=0, progress=False)
    assert found.provenance["prompts"] == 2
    assert np.isfinite(found.trained["frechet"]).all()


def test_four_prompts_are_cut_where_no_number_is_given(mini, alice):
    found = LengthExtrapolation(inside=8, times=1, conditions=())(mini, alice, nulls=0, progress=False)
    assert found.provenance["prompts"] == 4
    assert found.provenance["length"] == 8
