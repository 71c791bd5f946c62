"""The interaction by pairs of planes, on real models: the shares of `variance`, correlations, and what is shown."""

import json

import numpy as np
import pytest
import torch
from declared import assert_declared
from scipy import stats

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.planes import PlaneInteraction, plane_interaction
from tl_posgen.position.planes.plane_interaction import SHARES, STATISTICS
from tl_posgen.rope.rotation import complex_planes
from tl_posgen.summary import jsonable

pytestmark = pytest.mark.slow

CUT = {"length": 48, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="module")
def report(mini, alice):
    return tl_posgen.analyze(mini, alice, measures=["variance", "plane_interaction"], null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def result(report):
    return report["plane_interaction"]


def test_the_interaction_is_that_of_variance(report, result):
    for own, other in ((result.dataset, report["variance"].dataset), (result.null, report["variance"].null)):
        np.testing.assert_allclose(own["interaction"], other["interaction"], rtol=1e-9)
        np.testing.assert_allclose(own["mean_energy_k"], other["mean_energy_k"], rtol=1e-12)
    for name in ("interaction_low", "mean_interaction_high"):
        np.testing.assert_allclose(result.dataset[name], report["variance"].dataset[name], rtol=1e-6)


def test_shares_by_plane_add_up_and_the_statistics_are_in_the_order_that_is_proved(result):
    for data in (result.dataset, *result.nulls):
        np.testing.assert_allclose(data["by_plane"].sum("plane"), 1)
        np.testing.assert_allclose(data["matrix"].sum(("plane", "plane_2")), 1)
        np.testing.assert_allclose(data["diagonal_by_plane"].sum("plane"), data["diagonal"] / data["interaction"])
        assert bool((data["interaction"] <= data["bound"]).all())
        assert bool((data["bound"] <= data["loose_bound"]).all())
        assert bool((data["diagonal"] <= 2 * data["estimate"]).all())


def test_the_estimate_is_from_lengths_alone(mini, alice, result):
    kept = []
    for tokens in torch.stack(to_prompts(mini, alice, length=48, n_prompts=4)):
        run_capture(mini, tokens[None], kept.append, layers=[1])
    geometry = kept[0].geometry
    zq, zk = (
        complex_planes(torch.cat([getattr(one, side)[:, 1:] for one in kept], 1).double(), geometry.rope)
        for side in "qk"
    )
    turn = torch.polar(torch.ones(48, 16).double(), torch.arange(48)[:, None] * geometry.rope.inv_freq)
    spread = (zk - zk.mean(1, keepdim=True)).abs().square().mean(1) * (1 - turn.mean(0).abs().square())
    expected = geometry.scale**2 / 2 * (zq.abs().square().mean(1) * spread).sum(-1)
    one = result.dataset.sel(layer=1)
    found = one["estimate"] / one["interaction"]
    shares = (expected.numpy() / found.values) / one["interaction"].values
    assert shares.min() > 0  # the visible variance of each head, the same that `variance` divides by
    variance = tl_posgen.analyze(mini, alice, measures="variance", layers=[1], null_seeds=(), **CUT)["variance"].dataset
    np.testing.assert_allclose(shares, (variance["variance"] * (1 - variance["share_q"])).values[0], rtol=1e-5)


def test_correlations_are_spearmans_over_heads_and_within_layers(result):
    frame, data = result.frame(), result.dataset
    for name in STATISTICS:
        one = data.sel(statistic=name)
        assert float(one["rho"]) == pytest.approx(stats.spearmanr(frame[name], frame["interaction"]).statistic)
        ranks = frame[[name, "interaction"]].rank()
        left = ranks - ranks.groupby(frame["layer"]).transform("mean")
        assert float(one["rho_within_layers"]) == pytest.approx(left.corr().iloc[0, 1])
        assert one["rho_low"] < one["rho"] < one["rho_high"]


def test_the_estimate_follows_the_interaction_on_trained_models(result, stories, tinystories):
    found = plane_interaction(stories, tinystories, null_seeds=(), **CUT)
    for own in (result.summary, found.summary):
        assert own["rho_estimate"] > 0.85
        assert 0.75 < own["ratio_estimate"] < 1.25
        assert own["ratio_bound"] < own["ratio_loose_bound"]


@pytest.mark.parametrize(("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge")])
def test_windows_partial_rotary_and_layers_without_rope(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (4, 20), generator=torch.Generator().manual_seed(0))
    measures = ["variance", "plane_interaction"]
    found = tl_posgen.analyze(
        family_model(name, family_backend), tokens, measures=measures, null_seeds=(), progress=False
    )
    data = found["plane_interaction"].dataset
    turns = data["interaction"].notnull()
    expected = found["variance"].dataset["interaction"].where(turns)
    np.testing.assert_allclose(data["interaction"], expected, rtol=1e-9)
    assert bool(turns.any())
    assert bool(turns.all()) == (name != "smollm3")
    assert_declared(found["plane_interaction"])
    for kind in found["plane_interaction"].kinds:
        found["plane_interaction"].plot(kind)


def test_a_model_without_rope_is_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        plane_interaction(family_model("gpt2", "bridge"), torch.arange(40)[None] + 2, progress=False)


# What is shown


def test_every_variable_is_declared_and_the_sentences_say_the_summary(result):
    assert_declared(result)
    own = json.loads(json.dumps(jsonable(result.summary)))
    shares, rho, within = result.findings()
    for name in SHARES:
        assert f"{own[f'ratio_{name}']:.2f} (random init" in shares
    for name, words in STATISTICS.items():
        assert f"{words} {own[f'rho_{name}']:.2f} [" in rho
        assert f"{words} {own[f'rho_within_layers_{name}']:.2f} [" in within


def test_figures_show_the_numbers_after_saving_and_loading(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["plane_interaction"]
    assert loaded.findings() == result.findings()
    for kind in result.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    maps = result.plot("matrix").data
    assert len(maps) == 2 * 4
    np.testing.assert_array_equal(maps[1].z, result.dataset["matrix"].sel(layer=1))
    points = [one for one in result.plot("heads").data if one.name == result.dataset.attrs["model"]]
    np.testing.assert_array_equal(points[0].x, result.dataset["estimate"].values.ravel())
    np.testing.assert_array_equal(points[0].y, result.dataset["interaction"].values.ravel())


def test_without_null_and_with_one_prompt(mini, alice):
    found = plane_interaction(mini, alice, length=16, n_prompts=1, null_seeds=(), progress=False)
    assert "no null measured" in found.findings()[0]
    for kind in found.kinds:
        found.plot(kind)


@pytest.mark.parametrize("n", [0, 2**31])
def test_distances_that_no_memory_holds_are_refused(n):
    with pytest.raises(InputError, match=f"n_distances={n}: give a whole number, 1 to 1048576"):
        PlaneInteraction(n_distances=n)
