"""The interaction by pairs of planes, on real models: the shares of `variance`, correlations, and what is shown."""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from rotated_heads import captures_of
from scipy import stats

from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.planes import PlaneInteraction
from tl_posgen.position.planes.plane_interaction import STATISTICS
from tl_posgen.rope.rotation import complex_planes

pytestmark = pytest.mark.slow

CUT = {"length": 48, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="module")
def result(mini, alice):
    return PlaneInteraction()(mini, alice, null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def captures(mini, alice):
    """Layer 1 of all prompts."""
    return captures_of(mini, to_prompts(mini, alice, length=48, n_prompts=4), layers=[1])


def shares_of_layer(captures, n_distances):
    """Moments and variance decomposition of captures of one layer, the first token left out."""
    geometry = captures[0].geometry
    each = [TripleMoments.from_qk(one.q, one.k, geometry.rope, first_token=False) for one in captures]
    moments = reduce(add, each)
    n = min(n_distances, geometry.window or n_distances)
    return moments, variance_shares(moments, geometry.rope, geometry.scale, n).within_rows


def test_the_interaction_is_that_of_the_variance_decomposition(captures, result):
    moments, shares = shares_of_layer(captures, 48)
    np.testing.assert_allclose(result.own["interaction"].sel(layer=1), shares.share("kd", "qkd"), rtol=1e-9)
    np.testing.assert_allclose(result.own["mean_key_energy"].sel(layer=1), moments.k.mean_energy, rtol=1e-12)
    interaction = result.numbers("interaction")
    assert interaction.low < interaction.value < interaction.high


def test_shares_by_plane_add_up_and_the_statistics_are_in_the_order_that_is_proved(result):
    for data in (result.own, *result.nulls):
        np.testing.assert_allclose(data["by_plane"].sum("plane"), 1)
        np.testing.assert_allclose(data["matrix"].sum(("plane", "plane_2")), 1)
        np.testing.assert_allclose(data["diagonal_by_plane"].sum("plane"), data["diagonal"] / data["interaction"])
        assert bool((data["interaction"] <= data["bound"]).all())
        assert bool((data["bound"] <= data["loose_bound"]).all())
        assert bool((data["diagonal"] <= 2 * data["estimate"]).all())


def test_the_estimate_is_from_lengths_alone(captures, result):
    geometry = captures[0].geometry
    zq, zk = (
        complex_planes(torch.cat([getattr(one, side)[:, 1:] for one in captures], 1).double(), geometry.rope)
        for side in "qk"
    )
    turn = torch.polar(torch.ones(48, 16).double(), torch.arange(48)[:, None] * geometry.rope.inv_freq)
    spread = (zk - zk.mean(1, keepdim=True)).abs().square().mean(1) * (1 - turn.mean(0).abs().square())
    expected = geometry.scale**2 / 2 * (zq.abs().square().mean(1) * spread).sum(-1)
    _, visible = shares_of_layer(captures, 48)
    np.testing.assert_allclose(result.own["estimate"].sel(layer=1), expected / visible.total, rtol=1e-5)


def test_correlations_are_spearmans_over_heads_and_within_layers(result):
    frame, data = result.frame(), result.own
    for name in STATISTICS:
        one, rho = data.sel(statistic=name, end="value"), result.numbers("rho", statistic=name)
        assert rho.value == pytest.approx(stats.spearmanr(frame[name], frame["interaction"]).statistic)
        ranks = frame[[name, "interaction"]].rank()
        left = ranks - ranks.groupby(frame["layer"]).transform("mean")
        assert float(one["rho_within_layers"]) == pytest.approx(left.corr().iloc[0, 1])
        assert rho.low < rho.value < rho.high


def test_the_estimate_follows_the_interaction_on_trained_models(result, stories, tinystories):
    for one in (result, PlaneInteraction()(stories, tinystories, null_seeds=(), **CUT)):
        assert one.numbers("rho", statistic="estimate").value > 0.85
        estimate, bound, loose = (
            one.measure.median_ratio(one.numbers, name) for name in ("estimate", "bound", "loose_bound")
        )
        assert 0.75 < estimate.value < 1.25
        assert bound.value < loose.value
        assert np.isnan(bound.low)
        medians = (one.own["bound"] / one.own["interaction"]).median()
        assert bound.value == pytest.approx(float(medians))


@pytest.mark.parametrize(("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge")])
def test_windows_partial_rotary_and_layers_without_rope(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (4, 20), generator=torch.Generator().manual_seed(0))
    model = family_model(name, family_backend)
    result = PlaneInteraction()(model, tokens, null_seeds=(), progress=False)
    found, kept = result.own["interaction"], captures_of(model, tokens)
    for layer in found["layer"].values:
        captures = [one for one in kept if one.layer == layer]
        if not captures[0].geometry.rope.rotary_dim:
            assert found.sel(layer=layer).isnull().all()
            continue
        _, shares = shares_of_layer(captures, 20)
        np.testing.assert_allclose(found.sel(layer=layer), shares.share("kd", "qkd"), rtol=1e-9)
    assert bool(found.notnull().all()) == (name != "smollm3")
    for kind in result.kinds:
        result.plot(kind)


# What is shown


def test_the_sentences_say_the_numbers(result):
    shares, orders = result.findings()
    for name in ("estimate", "bound"):
        assert f" is {result.measure.median_ratio(result.numbers, name):.2f} times as much" in shares
    over_heads, within = orders.split("; within layers ")
    for name in ("estimate", "key_r1"):
        assert f"{STATISTICS[name]} {result.numbers('rho', statistic=name):.2f}" in over_heads
        assert f"{STATISTICS[name]} {result.numbers('rho_within_layers', statistic=name).plain:.2f} [" in within


def test_figures_show_the_numbers(result):
    maps = result.plot("matrix").data
    assert len(maps) == len(result.sides) * 4
    np.testing.assert_array_equal(maps[1].z, result.own["matrix"].sel(layer=1))
    points = [one for one in result.plot("heads").data if one.name == result.own.attrs["model"]]
    np.testing.assert_array_equal(points[0].x, result.own["estimate"].values.ravel())
    np.testing.assert_array_equal(points[0].y, result.own["interaction"].values.ravel())


def test_with_one_prompt_there_are_sentences_and_figures_too(mini, alice):
    found = PlaneInteraction()(mini, alice, length=16, n_prompts=1, null_seeds=(), progress=False)
    assert "random init" not in found.findings()[0]
    for kind in found.kinds:
        found.plot(kind)
