"""Groups of prompts: intervals of every measure are what leaving groups of prompts out by hand gives."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from quick_options import KINDS, OPTIONS

import tl_posgen
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.sums import PromptGroups, total
from tl_posgen.stats.intervals import FEWEST, MOST_GROUPS, jackknife_interval, prompts_per_group

pytestmark = pytest.mark.longer

QUICK = {"nulls": 0, "progress": False}
N_PROMPTS = 7  # three groups of two, the last one of one
FED = [name for name, kind in KINDS.items() if kind.is_fed]
OF_BIASES = ("bias_pairs", "slash_biases")  # which mini has not
MEASURES = [name for name in FED if any(one.interval for one in KINDS[name].variables.values())]


@pytest.fixture(scope="module")
def prompts(alice):
    return tl_posgen.models.to_prompts(tl_posgen.load_model("mini"), alice, length=32, n_prompts=N_PROMPTS)


def with_groups(data):
    return [str(name) for name, array in data.data_vars.items() if "group" in array.dims]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEASURES if name != "plane_roles"])  # which draws by prompt number
def test_leaving_a_group_out_is_measuring_without_its_prompts(mini, small_model, prompts, name):
    measure = KINDS[name].with_options(OPTIONS.get(name, {}))
    model = small_model if name in OF_BIASES else mini

    def of(kept):
        return measure(model, [prompts[n] for n in kept], layers=[1], **QUICK)

    result, groups = of(range(N_PROMPTS)), np.arange(N_PROMPTS) // prompts_per_group(N_PROMPTS)
    data = result.dataset.sel(init="trained")
    without = [of(np.flatnonzero(groups != group)).trained for group in range(groups[-1] + 1)]
    shares = np.bincount(groups) / N_PROMPTS
    np.testing.assert_allclose(data["prompt_share"][1:], shares)
    assert with_groups(data)
    for key in with_groups(data):
        size = float(abs(data[key]).max())
        for number, one in enumerate(without):
            left_out = data[key].sel(group=str(number))
            np.testing.assert_allclose(left_out, one[key].reindex_like(left_out), atol=2e-6 * size, err_msg=key)
        rest = np.stack([one[key].reindex_like(result.trained[key]) for one in without])
        ends = jackknife_interval(result.trained[key].values, rest, shares, result.measure.variables[key].bounds)
        array = result.dataset[key]
        labels = {dim: None for dim in array.dims}
        found = result.numbers.intervals(key, **labels)
        for end, expected in zip(("low", "high"), ends, strict=True):
            np.testing.assert_allclose(found[end], expected, atol=2e-6 * size, err_msg=key)


@pytest.mark.slow
def test_groups_change_no_number(mini, prompts, monkeypatch):
    how = {"measures": [name for name in MEASURES if name not in OF_BIASES], "layers": [1, 3], **QUICK}
    grouped = tl_posgen.analyze(mini, prompts, **how)
    monkeypatch.setattr("tl_posgen.core.sums.prompts_per_group", lambda n: 2**30)
    for name, result in tl_posgen.analyze(mini, prompts, **how).items():
        kept = [key for key, array in result.trained.items() if "rank" not in array.dims]  # equal kinds in any order
        xr.testing.assert_allclose(grouped[name].trained[kept], result.trained[kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_prompts", [1, FEWEST - 1, FEWEST])
def test_few_prompts_have_no_interval(mini, prompts, n_prompts):
    result = tl_posgen.analyze(mini, prompts[:n_prompts], measures="variance", **QUICK)["variance"]
    found = result.numbers("position", tokens="without first")
    assert (found.low != found.low) == (found.high != found.high) == (n_prompts < FEWEST)
    assert bool(result.numbers.intervals("position")["low"].isnull().all()) == (n_prompts < FEWEST)
    assert result.dataset.sizes["group"] == (1 + n_prompts if n_prompts >= FEWEST else 1)


def test_attached_batches_of_several_passes_have_the_same_intervals(mini, prompts):
    expected = tl_posgen.analyze(mini, prompts, measures="variance", **QUICK)["variance"]
    with tl_posgen.attach(mini, "variance") as run:
        for batch in torch.stack(prompts).split(3):
            mini(batch)
    xr.testing.assert_allclose(run.report()["variance"].dataset, expected.dataset, rtol=1e-4)


@dataclass(frozen=True)
class Means(Measure):
    """x = x."""

    variables = {"x": Variable("x", dims=("layer", "head"), interval=True)}


@pytest.mark.parametrize("n_prompts", [1, 3, 4, 40, 41, 100, 333])
def test_groups_are_neighbours_of_equal_size_and_never_too_many(n_prompts):
    groups = PromptGroups(Means())
    values = torch.rand(n_prompts, generator=torch.Generator().manual_seed(0)).double()
    for prompt, value in enumerate(values):
        capture = SimpleNamespace(layer=0, heads=[0], prompt=prompt, length=2, geometry=None)
        groups.sums_of(prompt).add_layer(capture, {"x": value[None]})
        assert len(groups._sums) <= MOST_GROUPS
    size = groups.size
    assert size == prompts_per_group(n_prompts)
    sizes = [len(groups._sums[one].lengths) for one in sorted(groups._sums)]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert sum(sizes) == n_prompts
    data = groups.dataset()["x"].squeeze(("layer", "head"))
    assert data.sel(group="all").item() == pytest.approx(values.mean().item())
    for number in range(data.sizes["group"] - 1):
        kept = [n for n in range(n_prompts) if n // size != number]
        assert data.sel(group=str(number)).item() == pytest.approx(values[kept].mean().item())


def test_random_inits_and_measures_without_intervals_keep_one_group():
    plain = type("Plain", (Means,), {"variables": {"x": Variable("x")}})
    for groups in (PromptGroups(Means(), grouped=False), PromptGroups(plain())):
        assert groups.sums_of(0) is groups.sums_of(99)
    one = total([groups.sums_of(0)])
    assert one is groups.sums_of(0)


def test_what_one_group_alone_has_is_unknown_without_it(mini):
    """Under edited scores slash takes no rank of queries and keys, so that only the first of four passes has one."""
    tokens, halve = torch.arange(5, 25)[None], ("blocks.1.attn.hook_attn_scores", lambda scores, hook: 0.5 * scores)
    with tl_posgen.attach(mini, "slash", layers=[1]) as run:
        mini(tokens)
        with mini.hooks(fwd_hooks=[halve]):
            for shift in (1, 2, 3):
                mini(tokens + shift)
    r1 = run.report()["slash"].dataset.sel(init="trained")["r1"]
    assert r1.sel(group="all").notnull().all()
    assert r1.sel(group="0").isnull().all()
