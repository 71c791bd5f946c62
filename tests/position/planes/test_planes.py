"""RoPE's planes on the bundled model, and on tiny models of every kind of RoPE."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of
from scipy import stats

from tl_posgen.core.feed import one_pass
from tl_posgen.core.numbers import one_side
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.planes import PlanePerturbation, Planes
from tl_posgen.position.planes.numbers.plane_patterns import PlaneMoments, sufficiency

CUT = {"length": 48, "n_prompts": 2, "consecutive": True, "progress": False}
PROMPTS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def result(mini, alice):
    return Planes()(mini, alice, nulls=2, **CUT)


@pytest.fixture(scope="session")
def captures(mini, alice):
    """Layer 1 of both prompts."""
    return captures_of(mini, to_prompts(mini, alice, length=48, n_prompts=2, consecutive=True), layers=[1])


def planes_of(model, prompts=PROMPTS, where=None, **options):
    return one_side(
        one_pass(session_of(model), list(prompts), [Planes(**options)], label="some", **(where or {}))["planes"]
    )


@pytest.mark.parametrize(("tokens", "first"), [("all", 0), ("without first", 1)])
@pytest.mark.parametrize("side", ["q", "k"])
def test_magnitude_concentration_and_phase_are_those_of_the_tokens(result, captures, side, tokens, first):
    x = torch.cat([getattr(capture, side)[:, first:] for capture in captures], 1).double()
    z = torch.complex(x[..., :16], x[..., 16:])  # Llama pairs coordinate m with m + d_head / 2
    data = result.sel(layer=1, side=side, tokens=tokens)
    np.testing.assert_allclose(data["magnitude"], z.abs().mean(1), rtol=1e-6)
    np.testing.assert_allclose(data["concentration"], z.mean(1).abs() / z.abs().mean(1), rtol=1e-5)
    np.testing.assert_allclose(np.exp(1j * data["phase"]), (z.mean(1) / z.mean(1).abs()).numpy(), atol=1e-5)


def test_parts_and_std_are_those_of_the_variance_decomposition(result, captures):
    one, other = (TripleMoments.from_qk(x.q, x.k, x.geometry.rope, first_token=False) for x in captures)
    geometry = captures[0].geometry
    seen = variance_shares(one + other, geometry.rope, geometry.scale, 48).within_rows
    data = result.sel(layer=1, tokens="without first")
    expected = [seen.share("d", "qd"), seen.share("k", "qk"), seen.share("kd", "qkd")]
    np.testing.assert_allclose(data["share"], torch.stack(expected), atol=1e-8)
    np.testing.assert_allclose(data["std"], seen.total.sqrt(), rtol=1e-6)


def test_prompts_of_different_lengths_count_by_their_tokens(mini):
    prompts = [torch.arange(300, 340), torch.arange(500, 520)]
    together, first, second = (
        planes_of(mini, some, {"layers": [2]}, n_distances=20)["magnitude"].sel(tokens="all", side="k")
        for some in (prompts, prompts[:1], prompts[1:])
    )
    np.testing.assert_allclose(together, (40 * first + 20 * second) / 60)


def test_a_head_is_additive_where_every_plane_meets_a_condition(mini):
    tokens = torch.arange(300, 348)
    data = planes_of(mini, [tokens], eps=0.7)
    for one in captures_of(mini, [tokens]):
        moments, geometry = PlaneMoments.from_qk(one.q, one.k, one.geometry.rope), one.geometry
        std = variance_shares(moments.triples, geometry.rope, geometry.scale, 48).within_rows.total.sqrt()
        met = sufficiency(moments, geometry.rope, geometry.scale, 48, std, 0.7)
        every = torch.stack(list(met.values())).any(0).all(-1)
        np.testing.assert_array_equal(data["additive"].sel(tokens="all", layer=one.layer), every)
    assert 0 < float(data["additive"].sel(tokens="all").mean()) < 1


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "text", "length", "least"), [("stories", "tinystories", 128, 0.3), ("mini", "alice", 256, 0)]
)
def test_at_the_default_eps_trained_heads_are_certified_and_none_of_the_null(request, name, text, length, least):
    model, prompts = map(request.getfixturevalue, (name, text))
    additive = Planes()(model, prompts[:4000], length=length, n_prompts=1, progress=False).numbers("additive")
    assert additive.value > least
    assert additive.inits == (0,)


def test_partial_rotary_heads_keep_their_unrotated_remainder(family_model):
    data = planes_of(family_model("neox", "bridge")).sel(tokens="all")
    still = np.isinf(data["wavelength"])
    assert still.sum("plane").values.tolist() == [2, 2]
    assert np.isfinite(data["magnitude"]).all()
    np.testing.assert_allclose(data["share_by_plane"].sel(part="position").where(still, drop=True), 0, atol=1e-12)


def test_layers_may_differ_in_frequencies_and_windows(family_model):
    data = planes_of(family_model("gemma3", "bridge"))
    assert not np.allclose(data["wavelength"].sel(layer=0), data["wavelength"].sel(layer=1))
    alone = planes_of(family_model("gemma3", "bridge"), n_distances=6)  # layer 0 has a window of six
    np.testing.assert_allclose(alone["score_sum"].sel(layer=0), data["score_sum"].sel(layer=0))
    assert not np.allclose(alone["score_sum"].sel(layer=1), data["score_sum"].sel(layer=1))


def test_a_layer_without_rope_among_others_has_no_numbers(family_model):
    data = planes_of(family_model("smollm3", "bridge"))
    assert data["layer"].values.tolist() == [0, 1]
    for name in ("magnitude", "additive", "wavelength"):
        over = [dim for dim in data[name].dims if dim != "layer"]
        assert data[name].notnull().all(over).values.tolist() == [True, False]


# Figures and tables


def test_plane_scores_foretell_the_interaction_share_and_training_lowers_both(result):
    heads = [
        result.sel(tokens="without first")["score_sum"],
        result.sel(tokens="without first", part="interaction")["share"],
    ]
    r = result.measure.correlation(result.numbers)
    assert r.value == pytest.approx(stats.pearsonr(*(one.values.ravel() for one in heads)).statistic)
    assert result.measure.correlation(result.numbers, ranks=True).value > 0.7
    for name, labels in (("score_sum", {}), ("share", {"part": "interaction"})):
        number = result.numbers(name, **labels)
        assert number.value < 0.8 * min(number.nulls)


MEASURES = [Planes, PlanePerturbation]
TOKENS = torch.arange(2, 26)[None]


@pytest.mark.parametrize("measure", MEASURES)
def test_only_layers_without_rope_are_refused(family_model, measure):
    with pytest.raises(UnsupportedModelError, match=r"layers 1: none of them has RoPE|no chosen layer has RoPE"):
        measure()(family_model("smollm3", "bridge"), TOKENS, layers=[1], nulls=0, progress=False)


@pytest.mark.parametrize("name", ["neox", "gemma3", "smollm3"])
def test_every_kind_can_be_drawn_of_unusual_layers(family_model, name):
    result = Planes()(family_model(name, "bridge"), PROMPTS, nulls=0, progress=False)
    for kind in result.kinds:
        drawn = [np.asarray(trace["r" if kind == "phases" else "y"], float) for trace in result.plot(kind).data]
        assert any(np.isfinite(values).any() for values in drawn)
