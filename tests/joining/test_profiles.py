"""Head profiles: columns from where they come, costs against hooks by hand, correlations, and what is shown."""

import re
import sys
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from scipy import stats

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.hooks.ablate_heads import ablate_heads, mean_outputs
from tl_posgen.hooks.replace_scores import replace_scores
from tl_posgen.joining import Profiles
from tl_posgen.joining.column_correlations import COLUMNS, PAIRS, SCOPES, beyond_null, columns_of, correlations
from tl_posgen.joining.head_costs import COSTS, without_distance
from tl_posgen.joining.literature import LITERATURE
from tl_posgen.joining.numbers.attention_mass import take_from_drawn_keys
from tl_posgen.joining.profiles import MOST_PAIRS
from tl_posgen.joining.profiles_figures import order_of_columns
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position import Variance, all_positions, by_split, substitute, uniform

pytestmark = pytest.mark.slow

ASKED_FOR = {"absolute", *(f"{name}_{side}" for name in LITERATURE for side in "qk"), *LITERATURE}
USUAL = [name for name in COLUMNS if name not in ASKED_FOR]
CUT = {"length": 48, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="module")
def report(mini, alice):
    return tl_posgen.analyze(mini, alice, measures=[Profiles(period=20)], null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def result(report):
    return report["profiles"]


def test_the_report_has_what_the_table_is_made_of(report, result):
    assert list(report) == ["slash", "variance", "profiles"]
    data, variance = result.own, report["variance"].sel(tokens="without first")
    np.testing.assert_array_equal(data["slash_score"], report["slash"].own["best_score"])
    np.testing.assert_array_equal(data["interaction"], variance["interaction"])
    np.testing.assert_array_equal(data["mean_energy"], variance["mean_energy"])
    np.testing.assert_array_equal(result.null["r1"], report["slash"].null["r1"])
    assert list(columns_of(data)) == USUAL
    assert len(result.frame().columns) == 2 + len(USUAL)
    headlines = result.frame(every=False).columns
    assert headlines.tolist() == ["layer", "head", "previous_token", "duplicate_token", "induction"]


def test_the_share_of_the_keys_place_is_a_column_where_variance_gives_it(mini, alice):
    asked = [Profiles(costs=False, period=8, n_repeated=1), Variance(absolute=True)]
    cut = CUT | {"length": 16, "n_prompts": 8, "null_seeds": ()}
    report = tl_posgen.analyze(mini, alice, measures=asked, **cut)
    data = report["profiles"].own
    np.testing.assert_array_equal(
        data["absolute"].values.ravel(), report["variance"].frame(tokens="without first")["absolute"]
    )
    assert "absolute" in data["column"].values


def test_costs_are_those_of_one_head_edited(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, length=48, n_prompts=4)[:2])
    one = result.own.sel(layer=1, head=2)
    back = int(one["slash_distance"])

    def rise(hooks):
        return float((token_losses(mini, tokens, hooks) - token_losses(mini, tokens)).mean())

    def hidden(capture):
        scores = capture.scores()
        for i in range(max(back, 1), scores.shape[1]):
            scores[:, i, i - back] = -torch.inf
        return scores

    def taken(capture):
        pattern = capture.scores().double().softmax(-1)
        at_distance = torch.eye(48, dtype=torch.bool).roll(-back, 1).tril()[None]
        left = take_from_drawn_keys(
            pattern, at_distance & (torch.arange(48) > 0)[:, None], torch.Generator().manual_seed(0)
        )
        return left.log().float()

    outputs = []
    mini.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: outputs.append(z))])
    mean = outputs[0].flatten(2).unflatten(-1, (4, -1)).mean((0, 1))[2]

    def ablate(z, hook):
        z = z.clone()
        z.view(*z.shape[:2], 4, -1)[:, :, 2] = mean
        return z

    by_hand = {
        "interaction": rise(substitute(mini, by_split(all_positions), heads=[(1, 2)])),
        "slash": rise(replace_scores(mini, hidden, heads=[(1, 2)])),
        "elsewhere": rise(replace_scores(mini, taken, heads=[(1, 2)])),
        "head": rise([("blocks.1.attn.hook_z", ablate)]),
    }
    for edit, expected in by_hand.items():
        assert float(one["cost"].sel(edit=edit).mean()) == pytest.approx(expected, abs=1e-6)


def test_joint_costs_are_those_of_all_these_heads_edited(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, length=48, n_prompts=4)[:2])
    table = result.frame().sort_values("slash_score", ascending=False)
    order = [(int(one.layer), int(one.head)) for one in table.itertuples()]
    back = {(int(one.layer), int(one.head)): int(one.slash_distance) for one in table.itertuples()}
    joint = result.own["joint_cost"]
    assert joint["n_heads"].values.tolist() == [1, 2, 4, 8, 16]
    for edit in COSTS[1:]:
        alone = result.own["cost"].sel(edit=edit, layer=order[0][0], head=order[0][1])
        np.testing.assert_allclose(joint.sel(edited=edit, n_heads=1), alone, atol=1e-6)
    hooks = [
        hook for one in order[:4] for hook in replace_scores(mini, lambda of: without_distance(of, back), heads=[one])
    ]
    expected = (token_losses(mini, tokens, hooks) - token_losses(mini, tokens)).mean(-1)
    np.testing.assert_allclose(joint.sel(edited="slash", n_heads=4), expected, atol=1e-6)
    ablated = ablate_heads(mini, order, "mean", reference=tokens, length=48)
    expected = (token_losses(mini, tokens, ablated) - token_losses(mini, tokens)).mean(-1)
    for edit in ("head", "drawn heads"):
        np.testing.assert_allclose(joint.sel(edited=edit, n_heads=16), expected, atol=1e-6)
    assert not np.allclose(*(joint.sel(edited=edit, n_heads=4) for edit in ("head", "drawn heads")))


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
        hooks = replace_scores(
            mini,
            lambda one, distance=distance: without_distance(one, {(1, head): distance for head in range(4)}),
            layers=[1],
        )
        look = ("blocks.1.attn.hook_pattern", lambda pattern, hook, seen=seen: seen.append(pattern[0].detach()))
        mini.run_with_hooks(tokens, fwd_hooks=[*hooks, look])
        paid = seen[0].diagonal(-distance, dim1=1, dim2=2)
        assert float(paid[:, 1 if distance == 0 else 0 :].abs().max()) == 0
        assert bool((seen[0][:, 0, 0] == 1).all())
        torch.testing.assert_close(seen[0].sum(-1), torch.ones(4, 12))


def test_the_previous_token_head_of_the_stories_model_is_found(stories, tinystories):
    found = Profiles(costs=False)(stories, tinystories, null_seeds=(), **{**CUT, "n_prompts": 1})
    data, highest = found.own, found.numbers.extreme("previous_token")
    assert (highest.layer, highest.head) in ((1, 3), (3, 6), (1, 6))
    assert float(data["previous_token"].max()) > 0.5
    assert float(data["induction"].max()) < 0.2  # these models have no induction heads
    assert "cost" not in data


def test_correlations_are_spearmans_over_heads_and_within_layers(result):
    frame = xr.Dataset(columns_of(result.own)).to_dataframe().reset_index()
    for a, b in combinations(np.array(list(COLUMNS))[[1, 6, 9, 17]], 2):
        over, within = (float(result.numbers("rho", scope=scope, column=a, column_2=b)) for scope in SCOPES)
        assert over == pytest.approx(stats.spearmanr(frame[a], frame[b]).statistic)
        ranks = frame[[a, b]].rank()
        left = ranks - ranks.groupby(frame["layer"]).transform("mean")
        assert within == pytest.approx(left.corr().iloc[0, 1])
        assert over == float(result.numbers("rho", scope="over heads", column=b, column_2=a))


def drawn_heads(seed, together=0.0):
    """Columns of 16 heads without any relation, but for a slash score that goes with r1 of K."""
    rng = np.random.default_rng(seed)
    heads = {name: (("layer", "head"), rng.normal(size=(4, 4))) for name in ("interaction", "position", "additive_r")}
    r1 = rng.normal(size=(2, 4, 4))
    heads["slash_score"] = (("layer", "head"), together * r1[1] + rng.normal(size=(4, 4)) * (1 - together))
    heads["r1"] = (("side", "layer", "head"), r1)
    return xr.Dataset(heads, {"side": ["q", "k"], "layer": range(4), "head": range(4)})


def words_beyond(models):
    labels = pd.Index(["trained", *map(str, range(len(models) - 1))], name="init")
    return beyond_null(xr.concat([correlations(one) for one in models], labels), SCOPES[0])


def test_pairs_are_said_to_go_beyond_random_init_from_eight_of_them_on():
    models = [drawn_heads(0, together=0.95), *(drawn_heads(seed) for seed in range(1, 9))]
    assert "1 of 14 pairs of columns go together beyond 8 random inits (about 0.1 expected by chance" in words_beyond(
        models
    )
    assert "strongest: r1 of K with slash score" in words_beyond(models)
    assert "told from 8 random inits on, here 7" in words_beyond(models[:-1])


def test_heads_without_any_relation_are_hardly_ever_told_apart_from_random_init():
    lists = [words_beyond([drawn_heads(9 * run + seed) for seed in range(9)]) for run in range(60)]
    assert sum(" 0 of 14 pairs" not in one for one in lists) <= 7


@pytest.mark.parametrize("encoding", ["gpt2", "bloom"])
def test_models_without_rope_have_profiles_too(family_model, encoding):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    found = Profiles()(family_model(encoding, "bridge"), tokens, null_seeds=(), progress=False)
    assert not found.own["interaction"].any()
    assert not found.own["cost"].sel(edit="interaction").any()
    assert "zero by construction" in found.findings()[-1]


def test_either_backend_gives_the_same_table(family_model, backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    models = (family_model("llama", one) for one in ("bridge", backend))
    found, other = (Profiles(period=8)(one, tokens, null_seeds=(), progress=False) for one in models)
    one, two = (xr.Dataset(columns_of(result.own)) for result in (found, other))
    xr.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


# What is shown


def test_the_sentences_give_the_numbers(result):
    own, (highest, costs, joint, most, _, _, over, within, *_) = result.numbers, result.findings()
    values = [own("joint_cost", edited=edit, n_heads=4).plain for edit in ("slash", "elsewhere", "head", "drawn heads")]
    assert joint.startswith("Loss with 4 of 16 heads edited at once, highest slash scores first: ")
    assert [f"{one:.4f}" for one in values] == re.findall(r"-?\d\.\d{4}", joint)
    for sentence, scope in ((over, "over heads"), (within, "within layers")):
        seen = [pair for pair in PAIRS if "induction" not in pair]  # no head of mini has it
        rho = {(a, b): own("rho", scope=scope, column=a, column_2=b) for a, b in seen}
        largest = sorted(rho, key=lambda pair: -abs(float(rho[pair])))[:MOST_PAIRS]
        words = [f"{COLUMNS[a]} with {COLUMNS[b]} {rho[a, b]:.2f}" for a, b in largest]
        assert sentence.endswith(f": {'; '.join(words)}.")
    assert f"induction {own.extreme('induction'):.2f} (random init" in highest
    assert f"cost of the head {own('cost', edit='head').plain:.4f}." in costs
    assert f"cost of the head {own.extreme('cost', edit='head'):.3f}." in most
    assert result.measure.period == 20
    table = result.table()
    assert len(table) == len(PAIRS)
    first = own("rho", scope="within layers", column="r1_k", column_2="interaction")
    assert table["within layers"].iloc[0] == f"{first.with_interval:.2f} ({first.of_inits.plain:.2f})"
    (unseen,) = [one for one in result.findings() if one.startswith("No head attends more")]
    highest = own.dataset["induction"].max(("layer", "head"))
    assert float(highest.sel(init="trained")) < float(highest.max())
    assert unseen.endswith("induction.")
    assert "previous token" not in unseen


def test_other_papers_metrics_and_what_position_costs_are_said_first(mini, alice):
    cut = {"length": 24, "n_prompts": 2, "null_seeds": (), "progress": False}
    found = Profiles(metrics="literature", cost_prompts=1)(mini, alice, **cut)
    assert found.findings()[0].startswith("Rank correlation of columns of other papers over heads, largest of 20 pairs")
    pairs = found.table()["pair"]
    assert pairs.iloc[0] == "concentration of K, cost of the slash"
    assert len(pairs) == 20 + len(PAIRS)


def test_columns_that_are_zero_by_construction_have_no_ranks(family_model):
    """ALiBi: nothing turns, so that what is left of the interaction and its cost is rounding."""
    model = family_model("bloom")
    rows = torch.randint(2, 60, (4, 20), generator=torch.Generator().manual_seed(0))
    found = Profiles(period=10)(model, rows, null_seeds=(), progress=False).own["rho"].sel(end="value")
    for name in ("interaction", "cost_interaction"):
        assert found.sel(column=name).isnull().all()
    assert found.sel(scope="over heads", column="slash_score", column_2="cost_head").notnull()


def test_the_cost_of_the_interaction_is_of_the_distances_that_a_window_shows(family_model):
    model = family_model("mistral")
    rows = torch.randint(2, 60, (4, 16), generator=torch.Generator().manual_seed(0))
    found = Profiles(period=8, cost_prompts=4)(model, rows, null_seeds=(), progress=False).own["cost"]
    plain = token_losses(model, rows)
    rises = {
        n: (token_losses(model, rows, substitute(model, by_split(uniform(n)), heads=[(1, 2)])) - plain).mean(-1)
        for n in (6, 16)
    }
    assert (rises[6] - rises[16]).abs().max() > 1e-4
    np.testing.assert_allclose(found.sel(edit="interaction", layer=1, head=2), rises[6], atol=1e-6)


def test_figures_show_the_numbers(result):
    maps, order = result.plot("correlations").data, order_of_columns(result.own)
    assert len(maps) == 2
    known = result.own["rho"].sel(end="value").isel(column=order, column_2=order)
    over, within = (known.sel(scope=scope).values for scope in SCOPES)
    above, below = np.triu_indices(len(order), 1), np.tril_indices(len(order), -1)
    np.testing.assert_array_equal(maps[0].z[below], over[below])
    np.testing.assert_array_equal(maps[0].z[above], within[above])
    assert np.isnan(np.diag(maps[0].z)).all()
    ranks = result.plot("heads").data[0]
    assert ranks.z.shape == (len(order), 16)
    number = next(row for row, name in enumerate(ranks.y) if name.startswith("r1 of K "))
    heads = [tuple(map(int, name[1:].split("H"))) for name in ranks.x]
    r1 = result.own["r1"].sel(side="k")
    assert ranks.customdata[number].tolist() == [float(r1.sel(layer=layer, head=head)) for layer, head in heads]
    assert float(np.nanmin(ranks.z)) == 0
    assert float(np.nanmax(ranks.z)) == 1


def test_a_large_model_pays_no_costs_unless_asked(mini, alice, monkeypatch):
    monkeypatch.setattr(sys.modules["tl_posgen.joining.profiles"], "MOST_HEADS", 15)
    found = Profiles()(mini, alice, length=16, n_prompts=1, null_seeds=(), progress=False)
    assert "cost" not in found.own
    assert found.kinds == ["correlations", "heads"]
    assert len(found.table()) < len(PAIRS)
    assert "Loss" not in " ".join(found.findings())


def test_a_period_that_does_not_fit_is_refused(mini, alice):
    with pytest.raises(InputError, match="period=5000"):
        Profiles(period=5000)(mini, alice, length=16, n_prompts=1, progress=False)
