"""Measures under a user's hooks: the model's passes and those of the random inits run with them."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.models.loss import token_losses
from tl_posgen.position import Perturbation

pytestmark = pytest.mark.longer

TOKENS = torch.arange(3, 43).view(2, 20)
QUICK = {"measures": "variance", "nulls": 0, "progress": False}
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
    found = tl_posgen.analyze(model, TOKENS, fwd_hooks=[(HOOK, silent)], **QUICK)
    with tl_posgen.attach(model, "variance") as run, model.hooks(fwd_hooks=[(HOOK, silent)]):
        for row in TOKENS:
            model(row[None])
    expected = run.report()["variance"].trained
    xr.testing.assert_allclose(found["variance"].trained[list(expected)], expected)
    intact = tl_posgen.analyze(model, TOKENS, **QUICK)["variance"].trained
    change = abs(found["variance"].trained["position"] - intact["position"]).max(("tokens", "head"))
    assert change[:2].max() == 0 < change[2:].min()
    assert hooks_of(model) == 0


def test_the_random_init_runs_under_the_same_hooks(mini):
    found = tl_posgen.analyze(mini, TOKENS, measures="variance", fwd_hooks=[(HOOK, silent)], progress=False)
    other = tl_posgen.random_like(mini, 0)
    alone = tl_posgen.analyze(other, TOKENS, measures="variance", fwd_hooks=[(HOOK, silent)], nulls=0)
    np.testing.assert_allclose(found["variance"].null["position"], alone["variance"].trained["position"])


def test_experiments_in_the_running_model_start_from_the_hooked_one(mini):
    with mini.hooks(fwd_hooks=[(HOOK, silent)]):
        expected = float(token_losses(mini, TOKENS).mean())
    measures = [Perturbation(conditions=["tokens"], ratios=(0.2,), reaches=("uniform",), n_cloze=0), "loss"]
    found = tl_posgen.analyze(mini, TOKENS, measures=measures, fwd_hooks=[(HOOK, silent)], nulls=0)
    assert found["perturbation"].numbers("loss").value == pytest.approx(expected, abs=1e-5)
    assert found["loss"].numbers("loss").value == pytest.approx(expected, abs=1e-5)
    assert found["perturbation"].provenance["fwd_hooks"] == [f"{HOOK}: silent"]
    assert f"perturbation, loss: measured under hooks, the null models too: {HOOK}: silent." in found.findings()


@pytest.mark.parametrize("added", [False, True])
def test_a_hook_written_for_one_prompt_holds_for_each(mini, added):
    def silent_first(z, hook):  # of the first prompt of a pass
        z[0] = 0
        return z

    hooks = [(HOOK, silent_first)]
    options = {"measures": ["band_ablation", "loss"], "nulls": 0, "progress": False}
    if added:
        with mini.hooks(fwd_hooks=hooks):
            found = tl_posgen.analyze(mini, TOKENS, **options)
    else:
        found = tl_posgen.analyze(mini, TOKENS, fwd_hooks=hooks, **options)
    with mini.hooks(fwd_hooks=[(HOOK, silent)]):
        expected = float(token_losses(mini, TOKENS).mean())
    assert found["loss"].numbers("loss").value == pytest.approx(expected, abs=1e-5)
    assert found["band_ablation"].table()["loss"][0] == pytest.approx(expected, abs=1e-5)


def test_finished_results_under_other_hooks_are_not_taken(mini):
    before = tl_posgen.analyze(mini, TOKENS, measures=["loss"], nulls=0, progress=False)
    with pytest.raises(InputError, match="a finished result cannot know what fwd_hooks do"):
        tl_posgen.analyze(
            mini, TOKENS, measures=["variance", "loss"], after=before, fwd_hooks=[(HOOK, silent)], nulls=0
        )


def test_a_hook_that_fails_leaves_no_hook(mini):
    def fails(z, hook):
        raise RuntimeError("a hook's own error")

    with pytest.raises(RuntimeError, match="a hook's own error"):
        tl_posgen.analyze(mini, TOKENS, fwd_hooks=[(HOOK, fails)], nulls=0, progress=False)
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
        tl_posgen.analyze(mini, TOKENS, fwd_hooks=hooks, nulls=0, progress=False)


GATED = {
    "attn.hook_result": "set_use_attn_result",
    "hook_mlp_in": "set_use_hook_mlp_in",
    "hook_attn_in": "set_use_attn_in",
    "hook_q_input": "set_use_split_qkv_input",
}


def fails(value, hook):
    raise AssertionError("the check calls no hook")


@pytest.mark.parametrize("backend", ["hooked", "bridge"])
@pytest.mark.parametrize("point", GATED)
def test_hooks_at_points_that_are_switched_off_are_refused_by_name(family_model, backend, point):
    model, name = family_model("llama", backend), f"blocks.0.{point}"
    message = rf"{name} does not fire in this model, so its hook would change nothing; model.{GATED[point]}\(True\)"
    with pytest.raises(InputError, match=message):
        tl_posgen.analyze(model, TOKENS, fwd_hooks=[(name, fails)], **QUICK)
    assert hooks_of(model) == 0


def test_such_a_hook_fires_once_its_point_is_switched_on(family_directory, backend):
    model = tl_posgen.load_model(family_directory("llama"), backend)
    intact = tl_posgen.analyze(model, TOKENS, **QUICK)["variance"].trained
    model.set_use_attn_result(True)
    found = tl_posgen.analyze(model, TOKENS, fwd_hooks=[("blocks.0.attn.hook_result", silent)], **QUICK)
    changed = abs(found["variance"].trained["position"] - intact["position"]).max(("tokens", "head"))
    assert changed[0] < 1e-6 < changed[1]
    model.set_use_attn_result(False)
    with pytest.raises(InputError, match="hook_result does not fire"):
        tl_posgen.analyze(model, TOKENS, fwd_hooks=[("blocks.0.attn.hook_result", silent)], **QUICK)


@pytest.mark.filterwarnings("ignore:hooks.*gated-off")  # TransformerLens says so too, of a bridge
def test_a_filter_needs_one_point_that_fires_and_the_report_names_the_others(family_model, backend):
    model = family_model("llama", backend)

    def ends(*words):
        return lambda name: name.startswith("blocks.0.") and name.endswith(words)

    found = tl_posgen.analyze(model, TOKENS, fwd_hooks=[(ends("hook_z"), silent)], **QUICK)
    [plain] = found.provenance["fwd_hooks"]
    assert plain.endswith(": silent")
    found = tl_posgen.analyze(model, TOKENS, fwd_hooks=[(ends("hook_z", "hook_result"), silent)], **QUICK)
    assert found.provenance["fwd_hooks"] == [f"{plain} (silent: blocks.*.attn.hook_result)"]
    with pytest.raises(
        InputError, match=r"hook_\w+ does not fire in this model, nor do \d+ others that the hook is at"
    ):
        tl_posgen.analyze(model, TOKENS, fwd_hooks=[(ends("hook_result", "q_input", "mlp_in"), fails)], **QUICK)


def test_points_that_a_kind_of_bridge_never_calls_are_refused_and_the_rest_work(family_model):
    model = family_model("neox", "bridge")  # a joint projection: its hook_rot_q is there and never fires
    with pytest.raises(
        InputError, match=r"blocks.1.attn.hook_rot_q does not fire .* choose another of model.hook_dict"
    ):
        tl_posgen.analyze(model, TOKENS, fwd_hooks=[("blocks.1.attn.hook_rot_q", fails)], **QUICK)
    assert tl_posgen.analyze(model, TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", silent)], **QUICK)


@pytest.mark.parametrize("streaming", [None, True])
def test_scores_of_attention_left_to_hugging_face_fire(family_model, streaming):
    model, calls = family_model("gptj", "bridge"), []
    hooks = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: calls.append(scores.shape))]
    tl_posgen.analyze(model, TOKENS, fwd_hooks=hooks, streaming=streaming, **QUICK)
    assert [tuple(shape) for shape in calls] == [(1, 4, 20, 20)] * 2  # in every pass, and in no other


@pytest.mark.parametrize("backend", ["hooked", "bridge"])
def test_an_attached_pass_under_a_hook_that_does_not_fire_is_refused(family_model, backend):
    model = family_model("llama", backend)
    with tl_posgen.attach(model, "variance") as run:
        point = model.hook_dict["blocks.1.attn.hook_result"]
        point.add_hook(fails)
        with pytest.raises(InputError, match=r"blocks\.1\.attn\.hook_result does not fire"):
            model(TOKENS)
        point.remove_hooks("fwd")
        calls = []
        with model.hooks(fwd_hooks=[(HOOK, lambda z, hook: calls.append(1))]):
            for _ in range(2):
                model.run_with_cache(TOKENS)  # TransformerLens' own hooks at every point only look
    assert len(calls) == 2
    with tl_posgen.attach(model, "variance") as alone:
        for _ in range(2):
            model(TOKENS)
    expected = alone.report()["variance"].trained
    xr.testing.assert_allclose(run.report()["variance"].trained[list(expected)], expected)


def test_a_hook_that_was_added_to_the_model_before_is_checked_too(family_model):
    model = family_model("llama", "hooked")
    model.hook_dict["blocks.0.hook_mlp_in"].add_hook(fails)
    try:
        with pytest.raises(InputError, match=r"blocks\.0\.hook_mlp_in does not fire"):
            tl_posgen.analyze(model, TOKENS, **QUICK)
    finally:
        model.reset_hooks()
