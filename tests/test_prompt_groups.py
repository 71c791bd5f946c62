"""Intervals over prompts: those of every measure are what leaving groups of prompts out by hand gives."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen import registry
from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.prompt_groups import PromptGroups
from tl_posgen.stats.intervals import FEWEST, jackknife_interval, prompts_per_group

pytestmark = pytest.mark.slow

QUICK = {"null_seeds": (), "progress": False}
N_PROMPTS = 7  # three groups of two, the last one of one
MEASURES = [
    *("three_axis", "variance", "mean_key", "residual", "across_prompts", "planes"),
    *("slash", "slash_planes", "cone"),
]


@pytest.fixture(scope="module")
def prompts(alice):
    return tl_posgen.models.to_prompts(tl_posgen.load_model("mini"), alice, length=32, n_prompts=N_PROMPTS)


@pytest.mark.parametrize("name", MEASURES)
def test_intervals_are_those_of_prompts_left_out_by_hand(mini, prompts, name):
    def of(kept):
        return tl_posgen.analyze(mini, [prompts[n] for n in kept], measures=name, **QUICK)[name].dataset

    data, groups = of(range(N_PROMPTS)), np.arange(N_PROMPTS) // prompts_per_group(N_PROMPTS)
    without = [of(np.flatnonzero(groups != group)) for group in range(groups[-1] + 1)]
    share = np.bincount(groups) / N_PROMPTS
    declared = registry.find(name).variables
    found = [key for key, one in declared.items() if one.interval and key in data]
    assert found
    for key in found:
        over = [dim for dim in data[key].dims if dim != "variant"]
        for prefix, reduced in (("", lambda x: x), ("mean_", lambda x, over=over: x.mean(over))):
            value = reduced(data[key])
            rest = np.stack([reduced(one[key].reindex_like(data[key])) for one in without])
            ends = jackknife_interval(value.values, rest, share, declared[key].bounds)
            for end, expected in zip(("low", "high"), ends, strict=True):
                size = float(abs(value).max())
                np.testing.assert_allclose(data[f"{prefix}{key}_{end}"], expected, atol=2e-6 * size, err_msg=key)
        assert data[f"{key}_low"].attrs["long_name"] == f"{declared[key].label}, lower end"


@pytest.mark.parametrize("name", MEASURES)
def test_the_summary_has_intervals_of_means_over_heads_alone(mini, prompts, name):
    own, data = (result := tl_posgen.analyze(mini, prompts, measures=name, **QUICK)[name]).summary, result.dataset
    for key in (key.removesuffix("_low") for key in own if key.endswith("_low")):
        assert own[f"{key}_low"] <= own[key] <= own[f"{key}_high"]
        if key in data:  # else of a group of heads, or a ratio
            values = data[key].sel(variant="all") if "variant" in data[key].dims else data[key]
            assert own[key] == pytest.approx(float(values.mean()), abs=1e-12)


def test_groups_change_no_number(mini, prompts, monkeypatch):
    measures = {"measures": MEASURES, **QUICK}
    grouped = tl_posgen.analyze(mini, prompts, **measures)
    monkeypatch.setattr(PromptGroups, "grouped", property(lambda self: False, lambda self, asked: None), raising=False)
    for name, result in tl_posgen.analyze(mini, prompts, **measures).items():
        kept = [key for key, array in result.dataset.items() if "rank" not in array.dims]  # equal kinds in any order
        xr.testing.assert_allclose(grouped[name].dataset[kept], result.dataset[kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_prompts", [1, FEWEST - 1, FEWEST])
def test_few_prompts_have_no_interval(mini, prompts, n_prompts):
    data = tl_posgen.analyze(mini, prompts[:n_prompts], measures="variance", **QUICK)["variance"].dataset
    assert bool(data["position_low"].isnull().all()) == (n_prompts < FEWEST)
    assert bool(data["mean_position_high"].isnull()) == (n_prompts < FEWEST)


def test_attached_passes_have_the_same_intervals(mini, prompts):
    expected = tl_posgen.analyze(mini, prompts, measures="variance", **QUICK)["variance"].dataset
    with tl_posgen.attach(mini, "variance") as run:
        for prompt in prompts:
            mini(prompt[None])
    xr.testing.assert_allclose(run.report()["variance"].dataset, expected)


class Longest(Collector):
    """Keeps something besides its rows, and does not say how two of them join."""

    def __init__(self, *args):
        super().__init__(*args)
        self.longest = 0

    def update(self, layer):
        self.longest = max(self.longest, layer.length)
        self.add(layer, length=torch.full((len(layer.heads),), self.longest))


def test_a_collector_that_forgets_what_it_keeps_is_refused(mini, prompts):
    measure = Measure(
        name="longest",
        question="How long?",
        explanation="The longest prompt.",
        source="the test's own",
        collector=Longest,
        variables={"length": Variable("length", interval=True)},
        summarise=lambda data: {},
    )
    with pytest.raises(InputError, match="Longest keeps longest besides rows, so it must override `joined`"):
        tl_posgen.analyze(mini, prompts, measures=measure, **QUICK)
