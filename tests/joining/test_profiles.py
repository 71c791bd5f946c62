"""Head profiles: columns from where they come, other papers' metrics by brute force, and what is shown."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from captures import run
from families import FAMILIES
from scipy import stats

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.joining import Profiles, scatter
from tl_posgen.joining.profiles import _literature_metrics, _permuted_overlaps
from tl_posgen.models.session import session_of
from tl_posgen.position import Variance
from tl_posgen.rope.rotation import to_planes

MEASURE = "profiles"

pytestmark = pytest.mark.slow

CUT = {"length": 48, "n_prompts": 4, "progress": False}

LITERATURE = [f"{name}, {side}" for name in ("massive", "concentration", "slow_mean") for side in "qk"]
LITERATURE += ["frequency_entropy", "sink_rate", "positional", "symbolic"]


@pytest.fixture(scope="module")
def report(mini, alice):
    return tl_posgen.analyze(mini, alice, measures=[Profiles(period=20)], nulls=2, **CUT)


def captured(model) -> Any:
    tokens = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(1))
    return run(session_of(model), tokens, {"pattern"}, layers=[1])[0]


def overlaps(capture):
    return _permuted_overlaps(capture, np.random.default_rng(0))


# The table


def test_the_table_is_made_of_the_results_of_the_same_run(report, result):
    assert list(report) == ["slash", "variance", "profiles"]
    data, variance = result.trained, report["variance"].sel(tokens="without first")
    np.testing.assert_array_equal(data["slash_score"], report["slash"].trained["slash_score"])
    np.testing.assert_array_equal(data["interaction"], variance["interaction"])
    np.testing.assert_array_equal(data["mean_energy"], variance["mean_energy"])
    np.testing.assert_array_equal(result.null["r1"], report["slash"].null["r1"])
    assert result.measure.period == 20


def test_the_share_of_the_keys_place_is_a_column_where_variance_gives_it(mini, alice):
    asked = [Profiles(period=8, n_repeated=1), Variance(absolute=True)]
    report = tl_posgen.analyze(mini, alice, measures=asked, **CUT | {"length": 16, "n_prompts": 8, "nulls": 0})
    expected = report["variance"].frame(tokens="without first")["absolute"]
    np.testing.assert_array_equal(report["profiles"].frame()["absolute"], expected)


def test_the_previous_token_head_of_the_stories_model_is_found(stories, tinystories):
    found = Profiles()(stories, tinystories, nulls=0, **{**CUT, "n_prompts": 1})
    highest = found.numbers.extreme("previous_token")
    assert (highest.layer, highest.head) in ((1, 3), (3, 6), (1, 6))
    assert float(found.trained["previous_token"].max()) > 0.5
    assert float(found.trained["induction"].max()) < 0.2  # these models have no induction heads


@pytest.mark.parametrize("encoding", ["gpt2", "bloom"])
def test_models_without_rope_have_profiles_too(family_model, encoding):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    found = Profiles()(family_model(encoding, "bridge"), tokens, nulls=0, progress=False)
    assert not found.trained["interaction"].any()
    assert "zero by construction" in found.findings()[-1]


# Metrics of other papers


def test_equal_keys_make_a_head_positional(mini):
    capture = captured(mini)
    equal = replace(capture, k=capture.k[:, :1].expand_as(capture.k).clone())
    equal._rotated = {"q": capture.rotated_q}
    positional, symbolic = overlaps(equal)
    torch.testing.assert_close(positional, torch.ones_like(positional))
    assert symbolic.max() < 0.99


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])
def test_a_head_without_rotation_is_symbolic(family_model, backend, name):
    if not getattr(FAMILIES[name], backend):
        pytest.skip("not described on this backend")
    positional, symbolic = overlaps(captured(family_model(name, backend)))
    torch.testing.assert_close(symbolic, torch.ones_like(symbolic), atol=1e-6, rtol=0)
    assert positional.min() < 0.99


def test_sink_rates_and_slow_means_are_those_of_brute_force(mini):
    capture = captured(mini)
    found = _literature_metrics(capture, 0)
    sunk = [[float(head[i, 0]) > 0.3 for i in range(1, 24)] for head in capture.pattern]
    np.testing.assert_allclose(found["sink_rate"], np.mean(sunk, axis=1))
    assert 0 < found["sink_rate"].mean() < 1
    slow = [m for m, theta in enumerate(capture.geometry.rope.inv_freq.tolist()) if theta * 24 < 2 * np.pi]
    assert 0 < len(slow) < len(capture.geometry.rope.inv_freq)
    for side, x in enumerate((capture.q, capture.k)):
        z = to_planes(x[:, 1:].double(), capture.geometry.rope)
        energies = z.mean(1).abs().square()[:, slow].sum(1), z.abs().square().mean(1).sum(1)
        torch.testing.assert_close(found["slow_mean"][side], energies[0] / energies[1])


# What is shown


def test_metrics_of_other_papers_are_columns_where_asked_for(mini, alice):
    cut = {"length": 32, "n_prompts": 2, "nulls": 0, "progress": False}
    own, plain = (Profiles(metrics=metrics)(mini, alice, **cut) for metrics in ("literature", "own"))
    assert set(own.frame()) - set(plain.frame()) == set(LITERATURE)
    np.testing.assert_array_equal(own.frame()[plain.frame().columns], plain.frame())


def test_any_two_columns_are_drawn_against_each_other(result):
    figure = scatter(result, "interaction", "r1, k")
    own, null = figure.data[:2]
    table = result.frame()
    np.testing.assert_array_equal(own.x, table["interaction"])
    np.testing.assert_array_equal(own.y, table["r1, k"])
    np.testing.assert_array_equal(null.x, result.frame(init=result.numbers.inits[0])["interaction"])
    rho = stats.spearmanr(table["interaction"], table["r1, k"]).statistic
    assert figure.layout.meta["title"].startswith("r1 of keys by interaction share")
    assert f"Spearman's rho over heads {rho:.2f} [" in figure.layout.meta["subtitle"]
    with pytest.raises(InputError, match="no column 'r1'; it has 'previous_token'"):
        scatter(result, "r1")
