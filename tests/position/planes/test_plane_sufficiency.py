"""Do plane scores foretell the interaction share? On the bundled model."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from tl_posgen.core.feed import one_pass
from tl_posgen.core.measure import TOKENS
from tl_posgen.core.numbers import one_side
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.loading.shuffled_like import shuffled_like
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.planes import Planes, PlaneSufficiency
from tl_posgen.position.planes.plane_sufficiency import correlation, kinds_of_weights, pooled, r_and_rho

pytestmark = pytest.mark.longer

CUT = {"length": 64, "n_prompts": 2, "progress": False}
REST = TOKENS[1]
KINDS = ["trained", "random init", "shuffled"]


@pytest.fixture(scope="session")
def result(mini, alice):
    return PlaneSufficiency()(mini, alice, **CUT)


@pytest.fixture(scope="session")
def kinds(result):
    return kinds_of_weights(result)


def planes_of(model, alice, mini):
    tokens = to_prompts(mini, alice, length=64, n_prompts=2)
    return one_side(one_pass(model, tokens, [Planes()], label="some")["planes"])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_planes(mini, alice, kinds, kind):
    make = {"trained": lambda: mini, "random init": lambda: random_like(mini, 0)}
    found = planes_of(make.get(kind, lambda: shuffled_like(mini, seed=0))(), alice, mini)
    for name in ("score_sum", "std", "additive", "planes_met"):
        xr.testing.assert_allclose(kinds[kind][name].drop_vars("weights", errors="ignore"), found[name])
    np.testing.assert_allclose(kinds[kind]["interaction"], found["share"].sel(part="interaction"))


def test_random_inits_are_those_of_their_seeds_and_the_seed_shuffles(mini, alice):
    other = PlaneSufficiency()(mini, alice, null_seeds=(4, 5), seed=3, **CUT)
    models = ((other.nulls[1], "own", random_like(mini, 5)), (other.own, "shuffled", shuffled_like(mini, seed=3)))
    for data, weights, model in models:
        np.testing.assert_allclose(data["std"].sel(weights=weights), planes_of(model, alice, mini)["std"])
    assert other.nulls[0]["std"].sel(weights="shuffled").isnull().all()


def test_without_null_seeds_there_is_no_random_init(mini, alice, result):
    alone = PlaneSufficiency()(mini, alice, null_seeds=(), layers=[0, 1], **CUT)
    assert "random init" in result.findings()[0]
    assert "random init" not in alone.findings()[0]
    assert alone.table()["weights"].tolist() == ["trained", "weights shuffled here", "pooled"]
    assert len(alone.plot("scatter").data) == 4
    assert [trace.name for trace in alone.plot("certified").data] == ["trained", "shuffled"]
    np.testing.assert_allclose(alone.own["std"].sel(weights="own"), result.own["std"].sel(weights="own", layer=[0, 1]))


@pytest.mark.parametrize("tokens", TOKENS)
def test_correlations_are_over_heads_of_one_kind_of_weights_and_of_all(result, kinds, tokens):
    columns = []
    for data in kinds.values():
        at = data.sel(tokens=tokens)
        columns.append([at[name].values.ravel() for name in ("score_sum", "interaction")])
        r, low, high = at["pearson"].values
        assert r_and_rho(at) == pytest.approx((stats.pearsonr(*columns[-1])[0], stats.spearmanr(*columns[-1])[0]))
        np.testing.assert_allclose([low, high], np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / np.sqrt(16 - 3)))
        assert int(at["n_heads"]) == 16
    whole, (x, y) = pooled(result.numbers, tokens), np.concatenate(columns, axis=1)
    assert r_and_rho(whole) == pytest.approx((stats.pearsonr(x, y).statistic, stats.spearmanr(x, y).statistic))
    assert int(whole["n_heads"]) == 48


def test_the_bound_foretells_the_interaction_share_of_trained_heads_and_training_lowers_both(result):
    assert result.numbers("spearman", tokens=REST).value > 0.7
    for name in ("score_sum", "interaction"):
        trained, shuffled = (result.numbers(name, weights=weights) for weights in ("own", "shuffled"))
        assert trained.value < 0.8 * min(shuffled.value, *trained.inits)


def test_a_head_without_a_number_is_left_out(kinds):
    data = kinds["trained"].sel(tokens="all").copy(deep=True)
    data["interaction"][0, 0] = np.nan
    assert int(correlation([data])["n_heads"]) == 15


def test_figures_show_every_head_the_correlations_and_the_certified_heads_by_tolerance(kinds, result):
    traces = result.plot("scatter").data
    assert len(traces) == 6
    np.testing.assert_array_equal(traces[0].y, kinds["trained"]["interaction"].sel(tokens="all").values.ravel())
    np.testing.assert_array_equal(traces[5].x, kinds["shuffled"]["score_sum"].sel(tokens=REST).values.ravel())
    assert f"r = {result.numbers('pearson', weights='shuffled', tokens=REST).plain:.2f}" in traces[5].name
    assert all(trace.showlegend for trace in traces)
    for trace, data in zip(result.plot("certified").data, kinds.values(), strict=True):
        np.testing.assert_array_equal(trace.y, data["additive"].sel(tokens="all").mean(("layer", "head")))


def test_the_table_and_the_sentences_say_which_numbers_are_without_the_first_token(result, kinds):
    table = result.table().set_index("weights").rename({"weights shuffled here": "shuffled"})
    assert table.index.tolist() == [*KINDS, "pooled"]
    assert list(table)[:2] == ["pearson, first out", "spearman, first out"]
    tokens = {"first out": REST, "all tokens": "all"}
    for heading in ("score_sum, first out", "interaction, first out", "planes_met, all tokens"):
        name, which = heading.split(", ")
        for kind, data in kinds.items():
            assert table.loc[kind, heading] == pytest.approx(float(data[name].sel(tokens=tokens[which]).mean()))
    correlated, means = result.findings()
    assert f"First token left out, mean sum of scores {table.loc['trained', 'score_sum, first out']:.2f}" in means
    assert f"with it, certified additive {table.loc['trained', 'additive, all tokens']:.0%}" in means
    assert "{:.3f} (random init {:.3f}, weights shuffled here {:.3f})".format(*table["interaction, first out"]) in means
    assert "pooled {:.2f} (Spearman {:.2f})".format(*table.loc["pooled"]) in correlated


@pytest.mark.slow
def test_the_interaction_has_the_interval_of_the_planes(mini, alice):
    cut = {"length": 24, "n_prompts": 4, "null_seeds": (), "progress": False}
    one = PlaneSufficiency()(mini, alice, **cut).numbers("interaction", tokens=REST)
    other = Planes()(mini, alice, **cut).numbers("share", tokens=REST, part="interaction")
    np.testing.assert_allclose([one.low, one.high], [other.low, other.high])
