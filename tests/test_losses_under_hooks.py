"""Losses under named hooks: against plain runs of the model, with intervals, nulls, words; taken up after a stop."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from quick_options import KINDS, NAMES, OPTIONS

import tl_posgen
from tl_posgen.core import engine
from tl_posgen.core.files import read_netcdf
from tl_posgen.interventions import Interventions
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.slash import BandAblation

CUT = {"length": 16, "n_prompts": 4, "progress": False}


def off(z, hook):
    return z * 0


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
    return AttentionOff()(mini, bundled_text(), null_seeds=(0, 1), **CUT)


def plain_losses(model, hooks):
    rows = torch.stack(to_prompts(model, bundled_text(), 16, 4))
    return token_losses(model, rows, hooks).mean(-1).numpy()


def test_losses_are_those_of_plain_runs_under_the_hooks(mini, result):
    layers = [[(f"blocks.{n}.attn.hook_z", off)] for n in range(mini.cfg.n_layers)]
    every = [[], *layers, [hook for hooks in layers for hook in hooks]]
    expected = np.stack([plain_losses(mini, hooks) for hooks in every])
    np.testing.assert_allclose(result.own["loss"], expected, rtol=1e-6)


def test_rises_have_intervals_and_nulls_and_stand_in_words_table_and_figure(result):
    rises = result.measure.rises(result.numbers)
    loss = result.own["loss"].mean("prompt").to_series()
    for name, rise in rises.items():
        assert rise.value == pytest.approx(loss[name] - loss["unchanged"], abs=1e-6)
        assert rise.value == result.measure.rise(result.numbers, name).value
        assert rise.low < rise.value < rise.high
        assert len(rise.inits) == 2
    (said,) = result.findings()
    assert f"everywhere {rises['everywhere']:+.3f}" in said
    table = result.table().set_index("condition")
    np.testing.assert_allclose(table["rise"][1:], [rise.value for rise in rises.values()])
    assert table["recovered"]["everywhere"] == 0
    assert table["recovered"].drop("unchanged").max() < 1
    trained, null = result.plot().data
    np.testing.assert_allclose(trained.x[1:], [rise.value for rise in rises.values()])
    np.testing.assert_allclose(null.x[1:], [np.mean(rise.inits) for rise in rises.values()])


def test_the_passes_are_those_that_are_made(mini, monkeypatch):
    seen = []
    monkeypatch.setattr("tl_posgen.progress.Passes.begin", lambda self, n: seen.append((n, self.total)))
    AttentionOff()(mini, bundled_text(), null_seeds=(), **{**CUT, "progress": True})
    assert sum(n for n, _ in seen) == seen[0][1] == 4 * (2 + mini.cfg.n_layers)


@pytest.mark.slow
def test_conditions_that_were_finished_before_a_stop_are_not_measured_again(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "WORTH_KEEPING", 0.0)
    under, measured = BandAblation.under, []

    def stopping(self, run, hooks):
        if len(measured) == 6:
            raise KeyboardInterrupt
        measured.append(run.label)
        return under(self, run, hooks)

    how = {"measures": [BandAblation()], "null_seeds": (0,), **CUT}
    whole = tl_posgen.analyze(mini, bundled_text(), **how)["band_ablation"]
    with monkeypatch.context() as patched:
        patched.setattr(BandAblation, "under", stopping)
        with pytest.raises(KeyboardInterrupt):
            tl_posgen.analyze(mini, bundled_text(), keep=tmp_path, **how)
    again = []
    monkeypatch.setattr(BandAblation, "under", lambda *args: again.append(1) or under(*args))
    found = tl_posgen.analyze(mini, bundled_text(), keep=tmp_path, **how)["band_ablation"]
    n = len(whole.own["condition"])
    assert len(measured) == 6
    assert len(again) == 2 * n - 6
    xr.testing.assert_identical(found.dataset, whole.dataset)
    assert found.findings() == whole.findings()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name].runs_model])
def test_a_measure_that_takes_up_its_finished_conditions_finds_the_same(small_model, tmp_path, monkeypatch, name):
    """All that was finished is taken away but the conditions: what is not theirs is measured again, they are not."""
    monkeypatch.setattr(engine, "WORTH_KEEPING", 0.0)
    how = {"measures": [KINDS[name].with_options(OPTIONS.get(name, {}))], "null_seeds": (0,), "progress": False}
    how |= {"length": None if name == "length_extrapolation" else 18, "n_prompts": 4, "keep": tmp_path}
    whole = tl_posgen.analyze(small_model, bundled_text(), **how)[name]
    conditions = [path for path in tmp_path.iterdir() if "/cell" in read_netcdf(path)]
    for path in set(tmp_path.iterdir()) - set(conditions):
        path.unlink()
    times = {path: path.stat().st_mtime_ns for path in conditions}
    found = tl_posgen.analyze(small_model, bundled_text(), **how)[name]
    xr.testing.assert_identical(found.dataset, whole.dataset)
    assert found.findings() == whole.findings()
    assert all(path.stat().st_mtime_ns == then for path, then in times.items())
