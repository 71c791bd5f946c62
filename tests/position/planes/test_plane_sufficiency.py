"""Do plane scores foretell the interaction share? On the bundled model."""

import json

import numpy as np
import pytest
from declared import assert_declared
from scipy import stats

from tl_posgen import load, registry
from tl_posgen.analysis import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.feed import one_pass
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.loading.shuffled_like import shuffled_like
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition import variance
from tl_posgen.position.planes.plane_sufficiency import MEASURE as plane_sufficiency
from tl_posgen.position.planes.plane_sufficiency import PlaneSufficiency, correlation

CUT = {"length": 64, "n_prompts": 2, "progress": False}
WITHOUT = "without_first_token"
GROUPS = ["trained", "random init", "shuffled", "pooled"]


@pytest.fixture(scope="session")
def result(mini, alice):
    return plane_sufficiency(mini, alice, **CUT)


@pytest.fixture(scope="session")
def without_random(mini, alice):
    """Other seeds too: the shuffle's own, and no random init."""
    return plane_sufficiency(mini, alice, null_seeds=(), seed=3, layers=[0, 1], **CUT)


def test_there_is_a_row_for_every_kind_of_weights_layer_and_head(result):
    frame = result.frame()
    assert frame.groupby("weights").size().to_dict() == {"trained": 16, "random init": 16, "shuffled": 16}


def planes_of(model, alice, mini):
    tokens = to_prompts(mini, alice, length=64, n_prompts=2)
    return one_pass(model, tokens, [registry.request_of("planes")], label="some")["planes"]


@pytest.mark.parametrize("kind", ["trained", "random init", "shuffled"])
def test_rows_are_those_of_the_planes(mini, alice, result, kind):
    make = {"trained": lambda: mini, "random init": lambda: random_like(mini, 0)}
    found = planes_of(make.get(kind, lambda: shuffled_like(mini, seed=0))(), alice, mini)
    for name in ("score_sum", f"interaction_{WITHOUT}", "additive"):
        np.testing.assert_allclose(result.dataset[name].sel(weights=kind), found[name], err_msg=f"{kind} {name}")


def test_the_first_null_seed_is_the_random_init_and_the_seed_shuffles(mini, alice):
    other = plane_sufficiency(mini, alice, null_seeds=(4, 5), seed=3, **CUT)
    assert other.dataset["weights"].values.tolist() == GROUPS[:3]
    assert other.provenance["null_seeds"] == [4]
    for kind, model in (("random init", random_like(mini, 4)), ("shuffled", shuffled_like(mini, seed=3))):
        np.testing.assert_allclose(other.dataset["std"].sel(weights=kind), planes_of(model, alice, mini)["std"])


def test_without_null_seeds_there_is_no_random_init_and_it_says_so(result, without_random):
    assert without_random.dataset["weights"].values.tolist() == ["trained", "shuffled"]
    assert without_random.dataset["group"].values.tolist() == ["trained", "shuffled", "pooled"]
    assert without_random.summary["pearson_random_init"] is None
    said = " ".join(without_random.findings())
    assert "no random init measured" in said
    assert "random init 0" not in said
    assert len(without_random.plot("scatter").data) == 4
    assert [trace.name for trace in without_random.plot("certified").data] == ["trained", "shuffled"]
    assert without_random.dataset["layer"].values.tolist() == [0, 1]
    same = result.dataset["std"].sel(weights="trained", layer=[0, 1])
    np.testing.assert_allclose(without_random.dataset["std"].sel(weights="trained"), same)


@pytest.mark.parametrize("group", GROUPS)
def test_correlations_are_over_the_heads_of_the_group(result, group):
    frame = result.frame()
    frame = frame if group == "pooled" else frame[frame["weights"] == group]
    at = result.dataset.sel(group=group, variant=WITHOUT)
    x, y = frame[f"score_sum_{WITHOUT}"], frame[f"interaction_{WITHOUT}"]
    assert float(at["pearson"]) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert float(at["spearman"]) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert int(at["n_heads"]) == len(frame)


def test_the_bound_foretells_the_interaction_share_of_trained_heads(result):
    assert float(result.dataset["spearman"].sel(group="trained", variant=WITHOUT)) > 0.7


def test_training_lowers_both_beside_both_nulls(result):
    for name in ("score_sum", "interaction"):
        trained, *nulls = result.dataset[name].mean(("layer", "head")).values
        assert trained < 0.8 * min(nulls)


def test_a_head_without_a_number_is_left_out(result):
    data = result.dataset.sel(weights=["trained"]).copy(deep=True)
    data["interaction"][0, 0, 0] = np.nan
    *_, n = correlation(data, "")
    assert n == 15


def test_the_share_of_certified_heads_rises_with_eps(result):
    certified = result.dataset["certified"]
    assert (certified.diff("eps") >= 0).all()
    np.testing.assert_allclose(certified.sel(eps=0.5), result.dataset["additive"].mean(("layer", "head")))


def test_the_scatter_shows_every_head_and_its_correlations_in_the_legend(result):
    traces = result.plot(kind="scatter").data
    assert len(traces) == 6
    data, summary = result.dataset, result.summary
    np.testing.assert_array_equal(traces[0].y, data["interaction"].sel(weights="trained").values.ravel())
    np.testing.assert_array_equal(traces[5].x, data[f"score_sum_{WITHOUT}"].sel(weights="shuffled").values.ravel())
    r = float(data["pearson"].sel(group="shuffled", variant=WITHOUT))
    assert summary[f"pearson_{WITHOUT}_shuffled"] == r
    assert f"r = {r:.2f}" in traces[5].name
    assert all(trace.showlegend for trace in traces)


def test_certified_heads_are_drawn_by_tolerance(result):
    for trace, kind in zip(result.plot("certified").data, GROUPS, strict=False):
        np.testing.assert_array_equal(trace.y, result.dataset["certified"].sel(weights=kind))


def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    loaded = load(result.save(tmp_path / "r.nc"))["plane_sufficiency"]
    assert loaded.dataset.equals(result.dataset)
    for kind in ("scatter", "certified"):
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()
    assert loaded.table()["weights"].tolist() == GROUPS


def test_the_table_says_which_numbers_are_without_the_first_token(result):
    table = result.table().set_index("weights")
    suffix = {"first out": f"_{WITHOUT}", "all tokens": ""}
    for heading in ("score_sum, first out", "interaction, first out", "planes_met, all tokens", "additive, all tokens"):
        name, tokens = heading.split(", ")
        expected = result.dataset[f"{name}{suffix[tokens]}"].mean(("layer", "head"))
        np.testing.assert_allclose(table.loc[GROUPS[:3], heading], expected)
    assert list(table)[:2] == ["pearson, first out", "spearman, first out"]
    said = " ".join(result.findings())
    assert f"First token left out, mean sum of scores {table.loc['trained', 'score_sum, first out']:.2f}" in said
    assert f"with it, certified additive {table.loc['trained', 'additive, all tokens']:.0%}" in said


def test_every_variable_is_declared(result, without_random):
    assert_declared(result)
    assert_declared(without_random)


def test_the_sentences_say_the_summary_of_all_kinds(result):
    told = json.dumps(result.summary)
    assert json.dumps(json.loads(told)) == told
    sentences = " ".join(result.findings())
    for group in GROUPS:
        at = result.dataset.sel(group=group, variant=WITHOUT)
        r, low, high, rho = (float(at[name]) for name in ("pearson", "pearson_low", "pearson_high", "spearman"))
        ends = "" if group == "pooled" else f" [{low:.2f}, {high:.2f}]"
        assert f"{r:.2f}{ends} (Spearman {rho:.2f})" in sentences
        assert np.isnan([low, high]).all() == (group == "pooled")
    means = result.dataset[f"interaction_{WITHOUT}"].mean(("layer", "head")).values
    assert "{:.3f} (random init {:.3f}, shuffled {:.3f})".format(*means) in sentences
    assert result.summary[f"interaction_{WITHOUT}_random_init"] == means[1]


@pytest.mark.slow
def test_intervals_are_fishers_over_heads_and_over_four_prompts(mini, alice):
    cut = {"length": 24, "n_prompts": 4, "null_seeds": (), "progress": False}
    found, own = plane_sufficiency(mini, alice, **cut), variance(mini, alice, **cut)
    r, n = found.summary[f"pearson_{WITHOUT}_trained"], found.summary["n_heads"]
    for end, side in (("low", -1), ("high", 1)):
        fisher = np.tanh(np.arctanh(r) + side * 1.96 / np.sqrt(n - 3))
        assert found.summary[f"pearson_{WITHOUT}_trained_{end}"] == pytest.approx(fisher)
        expected = own.summary[f"interaction_{end}"]  # `variance` leaves the first token out
        assert found.summary[f"interaction_{WITHOUT}_trained_{end}"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("wrong", [{"eps": -1.0}, {"eps": None}, {"n_distances": 0}], ids=str)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError):
        PlaneSufficiency(**wrong)


def test_bad_prompts_are_refused(mini, alice):
    with pytest.raises(InputError):
        plane_sufficiency(mini, alice, **{**CUT, "length": 1})


def test_a_model_without_rope_is_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        analyze(family_model("gpt2", "bridge"), [[2, 3, 4]], measures=["plane_sufficiency"], progress=False)
