"""Keys cut towards rank one in the running model: the hooks, what is measured along the share, and what is shown."""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.joining import KeyCut, cut_keys
from tl_posgen.joining.key_cut import _cut as cut
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares

pytestmark = pytest.mark.slow

CUT = {"length": 32, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="module")
def tokens(mini, alice):
    return torch.stack(to_prompts(mini, alice, length=32, n_prompts=4))


@pytest.fixture(scope="module")
def report(mini, alice):
    asked = KeyCut(shares=[0, 0.5, 1], controls=2)
    return tl_posgen.analyze(mini, alice, measures=["slash", "variance", asked], null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def result(report):
    return report["key_cut"]


def losses(model, tokens, hooks=()):
    return token_losses(model, tokens, hooks).mean(-1)


def test_all_of_the_rest_changes_nothing_and_none_of_it_leaves_rank_one(small_model, backend, family_model):
    for model in (small_model, family_model("llama", backend)):
        tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
        plain = losses(model, tokens)
        for control in (False, True):
            same = losses(model, tokens, cut_keys(model, 1, control=control))
            assert torch.allclose(same, plain, atol=1e-5)
        assert not torch.allclose(losses(model, tokens, cut_keys(model, 0)), plain, atol=1e-3)


def test_scores_under_the_hook_are_those_of_the_cut_keys(mini, tokens):
    kept, used = [], {}
    run_capture(mini, tokens[:1], kept.append, layers=[1])
    with capturing(mini, lambda one: used.update({one.layer: one.scores()}), needs={"attn_scores"}):
        mini.run_with_hooks(tokens[:1], fwd_hooks=cut_keys(mini, 0.25, layers=[1]))
    capture = kept[0]
    k = capture.k[:, 1:]
    u = torch.nn.functional.normalize(k.mean(1, keepdim=True), dim=-1)
    along = (k * u).sum(-1, keepdim=True) * u
    new = torch.cat([capture.k[:, :1], along + 0.25 * (k - along)], 1)
    theta = torch.arange(32)[:, None] * capture.geometry.rope.inv_freq
    z = torch.complex(new[..., :16], new[..., 16:]) * torch.polar(torch.ones_like(theta), theta).to(torch.complex64)
    expected = capture.geometry.scale * capture.rotated_q @ torch.cat([z.real, z.imag], -1).mT
    visible = torch.ones(32, 32).tril().bool()
    torch.testing.assert_close(used[1][:, visible], expected[:, visible], atol=1e-4, rtol=1e-4)


def test_it_takes_the_heads_asked_for_and_composes_with_other_hooks(mini, tokens):
    both = [*cut_keys(mini, 0, heads=[(1, 0)]), *cut_keys(mini, 0, heads=[(2, 3)])]
    torch.testing.assert_close(
        losses(mini, tokens, both), losses(mini, tokens, cut_keys(mini, 0, heads=[(1, 0), (2, 3)]))
    )
    seen = []
    silent = ("blocks.1.attn.hook_z", lambda z, hook: seen.append(z.shape))
    losses(mini, tokens, [*cut_keys(mini, 0), silent])
    assert seen


def test_the_control_takes_as_much_energy_in_one_direction_a_key_head(small_model):
    kept, tokens = [], torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    for prompt in tokens:
        run_capture(small_model, prompt[None], kept.append, layers=[1])
    for one in kept:
        changes = [cut(one, 0.3, control, 1, 5) - one.k for control in (False, True)]
        energies = [change.square().sum((1, 2)) for change in changes]
        torch.testing.assert_close(*energies, rtol=1e-4, atol=1e-6)
        assert all(float(change[:, 0].abs().max()) == 0 for change in changes)
        shared = one.geometry.n_heads // one.geometry.n_key_value_heads
        for change in changes:
            torch.testing.assert_close(change[0], change[shared - 1])  # heads of one key see it cut alike
        other = cut(one, 0.3, True, 1, 6) - one.k
        assert not torch.allclose(other, changes[1])


def test_losses_slash_and_interaction_are_those_of_the_running_model(mini, tokens, report, result):
    data, measure, plain = result.own, result.measure, losses(mini, tokens)
    np.testing.assert_allclose(data["loss"].sel(condition="unchanged"), plain, atol=1e-6)
    one = losses(mini, tokens, cut_keys(mini, 0.5))
    np.testing.assert_allclose(data["loss"].sel(condition="mean direction, 0.5"), one, atol=1e-6)
    controls = [losses(mini, tokens, cut_keys(mini, 0, control=True, seed=seed)) for seed in (0, 1)]
    found = data["loss"].sel(condition="random direction, 0")
    np.testing.assert_allclose(found, torch.stack(controls).mean(0), atol=1e-6)
    rises = measure.rises(result.numbers)
    both = [rises[f"{cut} direction, 0"].value for cut in ("mean", "random")]
    assert measure.less_control(result.numbers, 0).value == pytest.approx(both[0] - both[1], abs=1e-12)
    for name in ("unchanged", "mean direction, 1", "random direction, 1"):
        whole = data.sel(condition=name)
        interaction = report["variance"].sel(tokens="without first")["interaction"]
        np.testing.assert_allclose(whole["interaction"], interaction, rtol=1e-4)
        np.testing.assert_allclose(whole["slash_score"].mean("prompt"), report["slash"].own["best_score"], rtol=1e-4)
        assert float(abs(whole["energy_taken"]).max()) < 1e-9
    taken = (data["energy_taken"].sel(condition=f"{cut} direction, 0.5", layer=0) for cut in ("mean", "random"))
    np.testing.assert_allclose(*taken, rtol=1e-3, atol=1e-9)


def test_the_interaction_of_cut_keys_is_that_of_captured_keys_projected(mini, tokens):
    """The first layer's queries and keys depend on no edit: its interaction follows from the captured keys alone."""
    kept = []
    for prompt in tokens:
        run_capture(mini, prompt[None], kept.append, layers=[0])
    moments = [
        TripleMoments.from_qk(layer.q, cut(layer, 0.0, False, 1, 0), layer.geometry.rope, first_token=False)
        for layer in kept
    ]
    geometry = kept[0].geometry
    expected = variance_shares(reduce(add, moments), geometry.rope, geometry.scale, 32).within_rows.interaction
    found = KeyCut(shares=[0], controls=1)(mini, tokens, null_seeds=(), progress=False).own["interaction"]
    np.testing.assert_allclose(found.sel(condition="mean direction, 0", layer=0), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge"), ("gpt2", "bridge")]
)
def test_other_families(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    model = family_model(name, family_backend)
    found = KeyCut(shares=[0], controls=1)(model, tokens, null_seeds=(), progress=False)
    expected = losses(model, tokens, cut_keys(model, 0))
    np.testing.assert_allclose(found.own["loss"].sel(condition="mean direction, 0"), expected, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [{"share": 2}, {"share": "x"}, {"control": 1}, {"first_token": None}, {"seed": -1}])
def test_unusable_arguments_of_the_hook_are_refused(mini, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        cut_keys(mini, **{"share": 0, **wrong})
