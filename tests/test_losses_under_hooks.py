"""Losses under named hooks: against plain runs of the model, with intervals, nulls, words; taken up after a stop."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from quick_options import KINDS, NAMES, OPTIONS

import tl_posgen
from tl_posgen.core import store
from tl_posgen.errors import InputError
from tl_posgen.interventions import PREDICTIONS, Interventions, tokens_by_condition
from tl_posgen.models.loss import token_losses
from tl_posgen.models.streaming import stream
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.slash import BandAblation

CUT = {"length": 16, "n_prompts": 4, "progress": False}


def off(z, hook):
    return z * 0


HOOKS = [("blocks.0.attn.hook_z", off)]


@dataclass(frozen=True)
class PredictionsMoved(Interventions):
    """KL(unchanged || no attention in layer 0). A null model runs nothing."""

    variables = {**Interventions.variables, **PREDICTIONS}
    token_view = tokens_by_condition({})

    def conditions(self, run):
        of_null = {"layer 0": None, "first prompt": None}
        by_prompt = {"layer 0": HOOKS, "first prompt": lambda prompt: [] if prompt else HOOKS}
        return by_prompt if run.init is None else of_null


@dataclass(frozen=True)
class AttentionOff(Interventions):
    """rise = L(no attention) - L. The loss without the attention of some layers."""

    control = "everywhere"

    def conditions(self, run):
        layers = range(run.model.cfg.n_layers)
        every = {f"layer {n}": [(f"blocks.{n}.attn.hook_z", off)] for n in layers}
        return {**every, "everywhere": [hook for hooks in every.values() for hook in hooks]}


@pytest.fixture(scope="module")
def result(mini):
    return AttentionOff()(mini, bundled_text(), nulls=2, **CUT)


def test_prompts_whose_memory_is_checked_run_alone(mini, monkeypatch):
    rows, sizes = torch.stack(to_prompts(mini, bundled_text(), 16, 4)), []
    watch = [("hook_embed", lambda x, hook: sizes.append(len(x)))]
    together = token_losses(mini, rows, watch)
    monkeypatch.setattr(stream, "LONG", 15)
    np.testing.assert_allclose(token_losses(mini, rows, watch), together, atol=1e-5)
    assert sizes[-5:] == [4, 1, 1, 1, 1]  # before them the probe


def plain_losses(model, hooks):
    rows = torch.stack(to_prompts(model, bundled_text(), 16, 4))
    return token_losses(model, rows, hooks).mean(-1).numpy()


def test_losses_are_those_of_plain_runs_under_the_hooks(mini, result):
    layers = [[(f"blocks.{n}.attn.hook_z", off)] for n in range(mini.cfg.n_layers)]
    every = [[], *layers, [hook for hooks in layers for hook in hooks]]
    expected = np.stack([plain_losses(mini, hooks) for hooks in every])
    np.testing.assert_allclose(result.trained["loss"], expected, rtol=1e-6)


def test_rises_have_intervals_and_nulls_and_stand_in_words_table_and_figure(result):
    rises = result.measure.rises(result.numbers)
    loss = result.trained["loss"].mean("prompt").to_series()
    for name, rise in rises.items():
        assert rise.value == pytest.approx(loss[name] - loss["unchanged"], abs=1e-6)
        assert rise.low < rise.value < rise.high
        assert len(rise.inits) == 2
    (said,) = result.findings()
    assert f"everywhere {rises['everywhere']:+.3f}" in said
    table = result.table().set_index("condition")
    shares = list(result.measure.recovered(result.numbers).values())
    for names, numbers in (
        (["rise", "low", "high"], [*rises.values()]),
        (["recovered", "recovered_low", "recovered_high"], shares),
    ):  # each beside the ends of its own interval
        ends = [[one.value, one.low, one.high] for one in numbers]
        np.testing.assert_allclose(table[names].iloc[-len(ends) :], ends)
    assert table["recovered"]["everywhere"] == 0
    assert table["recovered"].drop("unchanged").max() < 1
    trained, null = result.plot().data
    np.testing.assert_allclose(trained.x[1:], [rise.value for rise in rises.values()])
    np.testing.assert_allclose(null.x[1:], [np.mean(rise.inits) for rise in rises.values()])


def test_predictions_are_compared_with_those_of_the_unchanged_model(mini):
    found = PredictionsMoved()(mini, bundled_text(), nulls=1, **CUT)
    rows = torch.stack(to_prompts(mini, bundled_text(), 16, 4))
    own, other = (mini.run_with_hooks(rows, fwd_hooks=one).double().log_softmax(-1) for one in ([], HOOKS))
    expected = (own.exp() * (own - other)).sum(-1).mean(1).detach()
    np.testing.assert_allclose(found.trained["kl"].sel(condition="layer 0"), expected, rtol=1e-4)
    np.testing.assert_allclose(found.trained["loss"].sel(condition="layer 0"), plain_losses(mini, HOOKS), rtol=1e-6)
    change = (token_losses(mini, rows[:1], HOOKS) - token_losses(mini, rows[:1]))[0]
    np.testing.assert_allclose(found.trained["token_change"].sel(condition="layer 0"), change, atol=1e-5)
    assert f"{change[5]:.4f}".rstrip("0") in found.show(0).local_src
    assert (found.trained["kl"].sel(condition="unchanged") == 0).all()
    assert found.null["kl"].sel(condition="layer 0").isnull().all()
    first = found.trained["kl"].sel(condition="first prompt")
    np.testing.assert_allclose(first, [expected[0], 0, 0, 0], rtol=1e-4, atol=1e-9)


def test_a_prompt_takes_a_pass_a_condition(mini, passes):
    AttentionOff()(mini, bundled_text(), nulls=0, **CUT)
    assert sum(passes) == 4 * (2 + mini.cfg.n_layers)


@pytest.mark.slow
def test_conditions_that_were_finished_before_a_stop_are_not_measured_again(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "WORTH_KEEPING", 0.0)
    under, measured = BandAblation.under, []

    def stopping(self, run, hooks):
        if len(measured) == 6:
            raise KeyboardInterrupt
        measured.append(run.init)
        return under(self, run, hooks)

    how = {"measures": [BandAblation()], "nulls": 1, **CUT}
    whole = tl_posgen.analyze(mini, bundled_text(), **how)["band_ablation"]
    with monkeypatch.context() as patched:
        patched.setattr(BandAblation, "under", stopping)
        with pytest.raises(KeyboardInterrupt):
            tl_posgen.analyze(mini, bundled_text(), keep=tmp_path, **how)
    again = []
    monkeypatch.setattr(BandAblation, "under", lambda *args: again.append(1) or under(*args))
    found = tl_posgen.analyze(mini, bundled_text(), keep=tmp_path, **how)["band_ablation"]
    n = len(whole.trained["condition"])
    assert len(measured) == 6
    assert len(again) == 2 * n - 6
    xr.testing.assert_identical(found.dataset, whole.dataset)
    assert found.findings() == whole.findings()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name].runs_model])
def test_a_measure_that_takes_up_its_finished_conditions_finds_the_same(small_model, tmp_path, monkeypatch, name):
    """It is stopped when all conditions of the model itself are finished, and none of its parts is."""
    kind = KINDS[name]
    monkeypatch.setattr(store, "WORTH_KEEPING", 0.0)
    how = {"measures": [kind.with_options(OPTIONS.get(name, {}))], "nulls": 1, "progress": False}
    how |= {"length": None if name == "length_extrapolation" else 18, "n_prompts": 4}
    whole = tl_posgen.analyze(small_model, bundled_text(), **how)[name]
    of_model = kind.of_model

    def stopping(self, run):
        of_model(self, run)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kind, "of_model", stopping)
        with pytest.raises(KeyboardInterrupt):
            tl_posgen.analyze(small_model, bundled_text(), keep=tmp_path, **how)
    finished = len(list(tmp_path.rglob("*/*.nc")))
    found = tl_posgen.analyze(small_model, bundled_text(), keep=tmp_path, **how)[name]
    xr.testing.assert_identical(found.dataset, whole.dataset)
    assert found.findings() == whole.findings()
    assert not list(tmp_path.rglob("*/*.nc")), f"{finished} conditions are left of a finished measure"


ODD = {
    "give one or more": {},
    "none of them 'unchanged'": {"unchanged": HOOKS},
    "give a mapping of names to hooks": [("a", HOOKS)],
    "give a mapping of names": {0: HOOKS},
    "condition 'a': it has no hooks": {"a": []},
    "condition 'a': fwd_hooks: no hook point 'blocks.9.attn.hook_z'": {"a": [("blocks.9.attn.hook_z", off)]},
    "condition 'a': fwd_hooks: no hook point is chosen by this filter": {"a": [(lambda name: False, off)]},
    "control 'nothing' is none of the conditions a": {"a": HOOKS},
}


@pytest.mark.parametrize("progress", [False, True])  # with a bar, passes are counted before
@pytest.mark.parametrize("said", ODD)
def test_conditions_that_cannot_be_compared_are_refused_before_any_is_run(mini, monkeypatch, said, progress):
    @dataclass(frozen=True)
    class Odd(Interventions):
        control = "nothing" if "nothing'" in said else ""

        def conditions(self, run):
            return ODD[said]

    monkeypatch.setattr("tl_posgen.core.run.token_losses", lambda *_: pytest.fail("was run"))
    with pytest.raises(InputError, match=re.escape(said)):
        Odd()(mini, bundled_text(), nulls=0, **{**CUT, "progress": progress})


@pytest.mark.parametrize(("layer", "condition"), [(0, "layer 0"), (9, "condition 'a': fwd_hooks: no hook point")])
def test_conditions_that_are_no_hooks_are_made_into_hooks_and_checked(mini, result, layer, condition):
    @dataclass(frozen=True)
    class OfArguments(Interventions):
        def conditions(self, run):
            return {"a": {"layer": layer}}

        def hooks_of(self, run, condition, prompt=0):
            return [(f"blocks.{condition['layer']}.attn.hook_z", off)]

        def under(self, run, hooks):
            return super().under(run, hooks and self.hooks_of(run, hooks))

    if layer == 9:
        with pytest.raises(InputError, match=condition):
            OfArguments()(mini, bundled_text(), nulls=0, **CUT)
        return
    losses = OfArguments()(mini, bundled_text(), nulls=0, **CUT).trained["loss"]
    np.testing.assert_array_equal(losses.sel(condition="a"), result.trained["loss"].sel(condition=condition))


@pytest.mark.parametrize("where", [{"heads": "L1H0"}, {"layers": 1}])
def test_hooks_beyond_the_chosen_heads_are_refused(mini, where):
    @dataclass(frozen=True)
    class Deaf(Interventions):
        def conditions(self, run):
            return {"a": HOOKS}

    with pytest.raises(InputError, match=r"condition 'a': a hook in layer 0, which was not chosen"):
        Deaf()(mini, bundled_text(), nulls=0, **CUT, **where)
    assert Deaf()(mini, bundled_text(), nulls=0, **CUT, layers=0).trained.sizes["condition"] == 2


BUILT_IN = [name for name, kind in KINDS.items() if issubclass(kind, Interventions)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_intervention_of_the_package_runs_with_chosen_layers(small_model, name):
    measure = KINDS[name].with_options(OPTIONS.get(name, {}))
    cut = {"length": 48, "n_prompts": 2, "nulls": 0, "progress": False}
    assert name in tl_posgen.analyze(small_model, bundled_text(), measures=[measure], layers=[1], **cut)


def test_shares_of_a_control_that_costs_nothing_are_not_defined(mini):
    @dataclass(frozen=True)
    class Nothing(Interventions):
        control = "b"

        def conditions(self, run):
            return {name: [("blocks.0.attn.hook_z", lambda z, hook: z)] for name in "ab"}

    table = Nothing()(mini, bundled_text(), nulls=0, **CUT).table()
    assert table["recovered"].isna().all()


def test_conditions_of_a_null_model_are_those_of_the_model(mini):
    @dataclass(frozen=True)
    class Other(Interventions):
        def conditions(self, run):
            return {"a" if run.init is None else "b": HOOKS}

    with pytest.raises(InputError, match="other names for a null model"):
        Other()(mini, bundled_text(), nulls=1, **CUT)
