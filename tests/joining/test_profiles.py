"""Head profiles: columns from where they come, costs against hooks by hand, correlations, and what is shown."""

import json
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
import xarray as xr
from declared import assert_declared
from scipy import stats

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import replace_scores
from tl_posgen.joining import Profiles
from tl_posgen.joining.column_correlations import COLUMNS, PAIRS, beyond_null
from tl_posgen.joining.head_costs import mean_outputs, without_distance
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position import all_positions, by_split, substitute
from tl_posgen.summary import NullSummary, jsonable

pytestmark = pytest.mark.slow

CUT = {"length": 48, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="module")
def report(mini, alice):
    return tl_posgen.analyze(mini, alice, measures=[Profiles(period=20)], null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def result(report):
    return report["profiles"]


def test_the_report_has_what_the_table_is_made_of(report, result):
    assert list(report) == ["slash", "variance", "profiles"]
    data = result.dataset
    np.testing.assert_array_equal(data["slash_score"], report["slash"].dataset["best_score"])
    np.testing.assert_array_equal(data["interaction"], report["variance"].dataset["interaction"])
    np.testing.assert_array_equal(result.null["r1_k"], report["slash"].null["r1_k"])
    assert {*COLUMNS} <= {*result.frame().columns}


def test_costs_are_those_of_one_head_edited(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, length=48, n_prompts=2))
    one = result.dataset.sel(layer=1, head=2)
    back = int(one["slash_distance"])

    def rise(hooks):
        return float((token_losses(mini, tokens, hooks) - token_losses(mini, tokens)).mean())

    def hidden(capture):
        scores = capture.scores()
        for i in range(max(back, 1), scores.shape[1]):
            scores[:, i, i - back] = -torch.inf
        return scores

    outputs = []
    mini.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: outputs.append(z))])
    mean = outputs[0].flatten(2).unflatten(-1, (4, -1)).mean((0, 1))[2]

    def ablate(z, hook):
        z = z.clone()
        z.view(*z.shape[:2], 4, -1)[:, :, 2] = mean
        return z

    assert float(one["cost_slash"]) == pytest.approx(rise(replace_scores(mini, hidden, heads=[(1, 2)])), abs=1e-6)
    assert float(one["cost_head"]) == pytest.approx(rise([("blocks.1.attn.hook_z", ablate)]), abs=1e-6)
    split = substitute(mini, by_split(all_positions), heads=[(1, 2)])
    assert float(one["cost_interaction"]) == pytest.approx(rise(split), abs=1e-6)
    assert bool((result.dataset["cost_head_low"] <= result.dataset["cost_head"] + 1e-12).all())


def test_mean_outputs_are_those_of_every_batch(mini, alice):
    tokens = torch.stack(to_prompts(mini, alice, length=12, n_prompts=10))  # more than run at once
    outputs = []
    for prompt in tokens:
        mini.run_with_hooks(prompt[None], fwd_hooks=[("blocks.2.attn.hook_z", lambda z, hook: outputs.append(z))])
    expected = torch.cat([z.flatten(2).unflatten(-1, (4, -1)) for z in outputs]).double().mean((0, 1))
    torch.testing.assert_close(mean_outputs(mini, tokens, [2])[2], expected, atol=1e-6, rtol=1e-4)


def test_no_attention_is_paid_at_the_hidden_distance_but_by_a_query_that_sees_nothing_else(mini, alice):
    tokens = to_prompts(mini, alice, length=12, n_prompts=1)[0][None]
    for distance in (0, 3):
        seen = []
        hooks = replace_scores(mini, lambda one, distance=distance: without_distance(one, distance), layers=[1])
        look = ("blocks.1.attn.hook_pattern", lambda pattern, hook, seen=seen: seen.append(pattern[0].detach()))
        mini.run_with_hooks(tokens, fwd_hooks=[*hooks, look])
        paid = seen[0].diagonal(-distance, dim1=1, dim2=2)
        assert float(paid[:, 1 if distance == 0 else 0 :].abs().max()) == 0
        assert bool((seen[0][:, 0, 0] == 1).all())
        torch.testing.assert_close(seen[0].sum(-1), torch.ones(4, 12))


def test_the_previous_token_head_of_the_stories_model_is_found(stories, tinystories):
    found = tl_posgen.profiles(stories, tinystories, costs=False, null_seeds=(), **{**CUT, "n_prompts": 1})
    data = found.dataset
    assert found.summary["previous_token_highest_head"] in ("1.3", "3.6", "1.6")
    assert float(data["previous_token"].max()) > 0.5
    assert float(data["induction"].max()) < 0.2  # these models have no induction heads
    assert "cost_head" not in data


def test_correlations_are_spearmans_over_heads_and_within_layers(result):
    frame, data = result.frame(), result.dataset
    for a, b in combinations(data["column"].values[[1, 6, 9, 17]], 2):
        one = data.sel(column=a, column_2=b)
        assert float(one["rho"]) == pytest.approx(stats.spearmanr(frame[a], frame[b]).statistic)
        ranks = frame[[a, b]].rank()
        left = ranks - ranks.groupby(frame["layer"]).transform("mean")
        assert float(one["rho_within_layers"]) == pytest.approx(left.corr().iloc[0, 1])
        assert float(one["rho"]) == float(data["rho"].sel(column=b, column_2=a))


def test_pairs_beyond_the_null_are_those_whose_interval_leaves_out_zero_and_every_seed():
    own = {"columns": ["r1_k", "interaction", "slash_score"]}
    own |= {"all_rho": [-0.8, 0.6, -0.5], "all_rho_low": [-0.9, 0.4, -0.7], "all_rho_high": [-0.7, 0.7, -0.2]}

    def found(*seeds):
        return beyond_null(own, NullSummary([{"all_rho": seed} for seed in seeds]), "rho", "Over heads")

    assert "Over heads 3 of 3" in found([0.0, 0.0, 0.0])
    assert "1 of 3" in found([-0.75, 0.0, 0.0], [0.0, 0.0, -0.9])  # one seed inside, one stronger
    assert "any of 2 random inits" in found([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert "2 of 3" in found([float("nan"), 0.0, 0.0])


@pytest.mark.parametrize("encoding", ["gpt2", "bloom"])
def test_models_without_rope_have_profiles_too(family_model, encoding):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    found = tl_posgen.profiles(family_model(encoding, "bridge"), tokens, null_seeds=(), progress=False)
    assert_declared(found)
    assert float(abs(found.dataset["interaction"]).max()) < 1e-9
    assert float(abs(found.dataset["cost_interaction"]).max()) < 1e-4
    assert "zero by construction" in found.findings()[-1]


def test_either_backend_gives_the_same_table(family_model, backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    options = {"null_seeds": (), "progress": False, "period": 8}
    found, other = (tl_posgen.profiles(family_model("llama", one), tokens, **options) for one in ("bridge", backend))
    xr.testing.assert_allclose(found.dataset[[*COLUMNS]], other.dataset[[*COLUMNS]], rtol=1e-3, atol=1e-4)


# What is shown


def test_every_variable_is_declared_and_the_sentences_say_the_summary(result):
    assert_declared(result)
    own = json.loads(json.dumps(jsonable(result.summary)))
    over, within, *_, highest, costs = result.findings()
    for a, b in PAIRS:
        assert f"{COLUMNS[a]} with {COLUMNS[b]} {own[f'rho_{a}_{b}']:.2f} [" in over
        assert f"{own[f'rho_within_layers_{a}_{b}']:.2f} [" in within
    assert f"induction layer {own['induction_highest_head'].replace('.', ' head ')}" in highest
    assert f"{own['cost_head']:.4f}" in costs
    assert own["period"] == 20


def test_the_table_has_a_row_a_pair_and_figures_show_the_numbers_after_loading(result, tmp_path):
    table = result.table()
    assert len(table) == len(PAIRS)
    assert table["over heads"].iloc[0] == result.summary["rho_r1_k_interaction"]
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["profiles"]
    assert loaded.findings() == result.findings()
    for kind in result.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    maps = result.plot("correlations").data
    assert len(maps) == 4
    np.testing.assert_array_equal(maps[1].z, result.dataset["rho_within_layers"])
    ranks = result.plot("heads").data[0]
    assert ranks.z.shape == (16, len(COLUMNS))
    np.testing.assert_array_equal(ranks.customdata[:, 1], result.dataset["r1_k"].values.ravel())
    assert float(np.nanmin(ranks.z)) == 0
    assert float(np.nanmax(ranks.z)) == 1


def test_a_large_model_pays_no_costs_unless_asked(mini, alice, monkeypatch):
    monkeypatch.setattr(sys.modules["tl_posgen.joining.profiles"], "MOST_HEADS", 15)
    cut = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False}
    found = tl_posgen.profiles(mini, alice, **cut)
    assert "cost_head" not in found.dataset
    assert len(found.table()) < len(PAIRS)
    assert "Loss" not in found.findings()[-1]


@pytest.mark.parametrize("wrong", [{"cost_prompts": 0}, {"period": 1}, {"n_repeated": 1.5}, {"costs": "all"}])
@pytest.mark.usefixtures("unchecked")
def test_unusable_options_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Profiles(**wrong)


def test_a_period_that_does_not_fit_is_refused(mini, alice):
    with pytest.raises(InputError, match="period=5000"):
        tl_posgen.profiles(mini, alice, period=5000, length=16, n_prompts=1, progress=False)
