"""Use of RoPE's planes: the values of the bundled model against its tokens one by one, and layers of every kind."""

import numpy as np
import pytest
import torch
from families import CONTEXT
from rotated_heads import captures_of

from tl_posgen.core.feed import one_pass
from tl_posgen.core.numbers import one_side
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies.plane_use import SETTLED, PlaneUse, training_contexts
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts

CUT = {"length": 64, "n_prompts": 4, "progress": False}
PROMPTS = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def result(mini, alice):
    return PlaneUse()(mini, alice, nulls=1, **CUT)


@pytest.fixture(scope="module")
def captures(mini, alice):
    """Layer 2 of every prompt."""
    prompts = to_prompts(mini, alice, length=64, n_prompts=4)
    return captures_of(mini, prompts, "pattern", "v", layers=[2])


def use_of(model, prompts=PROMPTS, **options):
    measure = PlaneUse(**options).prepare(session_of(model), list(prompts))
    return one_side(one_pass(session_of(model), list(prompts), [measure], label="some")["plane_use"])


def test_the_clock_of_the_bundled_model(result):
    """Half of theta L = pi at plane 9: the longest plane of most heads, a quarter turn out of phase; not in nulls."""
    numbers = result.numbers
    assert set(result.trained["half_turn"].values.ravel()) == {9}
    assert numbers("chance").value == 3 / 16
    at, sine = numbers("at_half_turn"), numbers("sine")
    assert at.value >= 0.75 > 0.5 > max(at.nulls)
    assert sine.low > 0.75 > 0.25 > max(sine.nulls)
    assert numbers("partial").value == 1


def test_use_phase_and_amplitude_are_those_of_the_tokens(result, captures):
    z = [[torch.complex(x[:, 1:, :16], x[:, 1:, 16:]).to(torch.complex128) for x in (c.q, c.k)] for c in captures]
    length = [torch.stack([one[side].abs().mean(1) for one in z]).mean(0) for side in (0, 1)]
    mean = [torch.stack([one[side].mean(1) for one in z]).mean(0) for side in (0, 1)]
    product = length[0] * length[1]
    data = result.trained.sel(layer=2)
    np.testing.assert_allclose(data["use"], product / product.sum(-1, keepdim=True), rtol=1e-6)
    for head in range(4):
        plane = int(product[head].argmax())
        q, k = mean[0][head, plane], mean[1][head, plane]
        assert int(data["longest_plane"][head]) == plane
        assert float(data["sine"][head]) == pytest.approx(float((q * k.conj()).imag / (q * k).abs()))
        assert float(data["amplitude"][head]) == pytest.approx(float((q * k).abs()) / 32**0.5, rel=1e-5)


def test_the_lift_of_the_first_token_sums_to_that_of_the_scores(result, captures):
    """Over planes, and the variance within rows of each; sinks by the pattern."""
    lift, sink, variance = [], [], []
    for capture in captures:
        scores = capture.scores().double()
        rows = range(32, 64)
        lift.append(torch.stack([scores[:, i, 0] - scores[:, i, 1 : i + 1].mean(-1) for i in rows]).mean(0))
        sink.append(capture.pattern[:, SETTLED:, 0].double().mean(1))
        zq, zk = (torch.complex(x[..., :16], x[..., 16:]) for x in (capture.rotated_q, capture.rotated_k))
        parts = (zq[:, :, None] * zk[:, None].conj()).real.double()
        variance.append(torch.stack([parts[:, i, 1 : i + 1].var(1, correction=0) for i in rows]).mean(0))
    data, spread = result.trained.sel(layer=2), torch.stack(variance).mean(0)
    np.testing.assert_allclose(data["sink_lift"].sum("plane"), torch.stack(lift).mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(data["sink"], torch.stack(sink).mean(0), rtol=1e-5)
    np.testing.assert_allclose(data["variance_share"], spread / spread.sum(-1, keepdim=True), rtol=1e-3)


def test_contexts_are_those_that_the_config_knows(family_model, llama, mini):
    assert training_contexts(mini) == (512,)
    assert training_contexts(llama) == (CONTEXT,)
    assert training_contexts(family_model("llama3")) == (32, CONTEXT)
    data = use_of(family_model("llama3"))
    assert data["context"].values.tolist() == [32, CONTEXT]
    theta = session_of(family_model("llama3")).layer(0).geometry.rope.inv_freq.numpy()  # scaled
    expected = [np.flatnonzero(theta * n <= np.pi) for n in (32, CONTEXT)]
    assert data["half_turn"].sel(layer=0).values.tolist() == [one[0] if len(one) else np.nan for one in expected]
    assert use_of(mini, contexts=[64])["context"].values.tolist() == [64]


def test_a_window_is_the_context_of_its_layer(family_model):
    data = use_of(family_model("gemma3", "bridge"))
    assert data["reach"].sel(context=CONTEXT).values.tolist() == [6, CONTEXT]
    assert np.isfinite(data["sink_lift"]).all(("head", "plane")).values.tolist() == [False, True]


def test_the_unrotated_rest_is_used_and_never_longest(family_model):
    data = use_of(family_model("neox", "bridge"))
    still = data["turns"].isel(layer=0, context=0) == 0
    assert still.sum() == 2
    assert (data["use"].isel(plane=still.values) > 0).all()
    assert data["longest_plane"].max() < 2
    np.testing.assert_allclose(data["use"].sum("plane"), 1)


def test_a_layer_without_rope_has_no_numbers_and_a_choice_of_such_layers_is_refused(family_model):
    data = use_of(family_model("smollm3", "bridge"))
    assert data["use"].notnull().all(("head", "plane")).values.tolist() == [True, False]
    with pytest.raises(UnsupportedModelError, match="layers 1: none of them has RoPE"):
        PlaneUse()(family_model("smollm3", "bridge"), PROMPTS, layers=[1], nulls=0, progress=False)
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        PlaneUse()(family_model("gpt2"), PROMPTS, nulls=0, progress=False)
    with pytest.raises(InputError, match="the longest prompt has 2 tokens"):
        PlaneUse()(family_model("llama"), PROMPTS[:, :2], nulls=0, progress=False)


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "neox"])
def test_the_figure_has_a_bar_a_turning_plane_and_a_mark_a_head(family_model, name):
    result = PlaneUse()(family_model(name, "bridge"), PROMPTS, nulls=0, progress=False)
    traces = result.plot("use").data
    heads = [trace for trace in traces if trace.name == "heads"]
    marked = sum(len(trace.x) for trace in heads)
    assert marked == int(result.trained["longest_plane"].notnull().sum())
    for bars, marks in zip((one for one in traces if one.type == "bar"), heads, strict=True):
        assert np.isfinite(bars.x).all()
        assert set(np.round(marks.x, 9)) <= set(np.round(bars.x, 9))
        assert all(-180 <= one <= 180 for one in marks.marker.color)


def test_it_can_be_attached_to_passes_of_ones_own(mini):
    import tl_posgen

    with tl_posgen.attach(mini, ["plane_use"]) as run:
        mini(torch.arange(300, 340)[None])
    assert run.report()["plane_use"].trained["context"].values.tolist() == [512]
