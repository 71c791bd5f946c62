"""Measures under a user's hooks: the model's passes and those of the random inits run with them."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.models.loss import token_losses

pytestmark = pytest.mark.longer

TOKENS = torch.arange(3, 43).view(2, 20)
HOOK = "blocks.1.attn.hook_z"


def silent(z, hook):
    return torch.zeros_like(z)


def hooks_of(model):
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return sum(len(point._forward_hooks) for point in points)


@pytest.fixture(params=["mini", "mini_bridge"])
def model(request):
    return request.getfixturevalue(request.param)


def test_measures_are_those_of_attached_passes_under_the_same_hooks(model):
    options = {"measures": "variance", "null_seeds": (), "progress": False}
    found = tl_posgen.analyze(model, TOKENS, fwd_hooks=[(HOOK, silent)], **options)
    with tl_posgen.attach(model, "variance") as run, model.hooks(fwd_hooks=[(HOOK, silent)]):
        for row in TOKENS:
            model(row[None])
    expected = run.report()["variance"].own
    xr.testing.assert_allclose(found["variance"].own[list(expected)], expected)
    intact = tl_posgen.analyze(model, TOKENS, **options)["variance"].own
    change = abs(found["variance"].own["position"] - intact["position"]).max(("tokens", "head"))
    assert change[:2].max() == 0 < change[2:].min()
    assert hooks_of(model) == 0


def test_the_random_init_runs_under_the_same_hooks(mini):
    found = tl_posgen.analyze(mini, TOKENS, measures="variance", fwd_hooks=[(HOOK, silent)], progress=False)
    other = tl_posgen.random_like(mini, 0)
    alone = tl_posgen.analyze(other, TOKENS, measures="variance", fwd_hooks=[(HOOK, silent)], null_seeds=())
    np.testing.assert_allclose(found["variance"].null["position"], alone["variance"].own["position"])


def test_experiments_in_the_running_model_start_from_the_hooked_one(mini):
    with mini.hooks(fwd_hooks=[(HOOK, silent)]):
        expected = float(token_losses(mini, TOKENS).mean())
    options = {"conditions": ["tokens"], "ratios": (0.2,), "reaches": ("uniform",), "n_cloze": 0}
    from tl_posgen.position import Perturbation

    measures = [Perturbation(**options), "loss"]
    found = tl_posgen.analyze(mini, TOKENS, measures=measures, fwd_hooks=[(HOOK, silent)], null_seeds=())
    assert found["perturbation"].numbers("loss").value == pytest.approx(expected, abs=1e-5)
    assert found["loss"].numbers("loss").value == pytest.approx(expected, abs=1e-5)
    assert found["perturbation"].provenance["fwd_hooks"] == [f"{HOOK}: silent"]
    assert f"perturbation, loss: measured under hooks, the random inits too: {HOOK}: silent." in found.findings()


def test_finished_results_under_other_hooks_are_not_taken(mini):
    before = tl_posgen.analyze(mini, TOKENS, measures=["loss"], null_seeds=(), progress=False)
    with pytest.raises(InputError, match="another fwd_hooks"):
        tl_posgen.analyze(
            mini, TOKENS, measures=["variance", "loss"], after=before, fwd_hooks=[(HOOK, silent)], null_seeds=()
        )


def test_a_hook_that_fails_leaves_no_hook(mini):
    def fails(z, hook):
        raise RuntimeError("a hook's own error")

    with pytest.raises(RuntimeError, match="a hook's own error"):
        tl_posgen.analyze(mini, TOKENS, fwd_hooks=[(HOOK, fails)], null_seeds=(), progress=False)
    assert hooks_of(mini) == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([("blocks.9.attn.hook_z", silent)], r"no hook point 'blocks.9.attn.hook_z'; model.hook_dict lists them"),
        ([(lambda name: False, silent)], "no hook point is chosen by this filter"),
        ([(HOOK, "silent")], "is no hook; give pairs as TransformerLens takes them"),
        ([HOOK], "is no hook; give pairs"),
    ],
)
def test_what_is_no_hook_is_refused_before_work_starts(mini, hooks, message):
    with pytest.raises(InputError, match=message):
        tl_posgen.analyze(mini, TOKENS, fwd_hooks=hooks, null_seeds=(), progress=False)
