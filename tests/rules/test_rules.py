"""Rules on real models: recall against brute force, losses under hooks, the plan, files, and what is refused."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from families import family_cases

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.frequencies import FrequencyRule, with_frequencies
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import losses_of, token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rules import HeadRule, Rules, RuleTable, apply_rules
from tl_posgen.rules.head_rules import WORDS

pytestmark = pytest.mark.longer

CUT = {"length": 40, "n_prompts": 4, "progress": False}
BUDGET = 6
CHOSEN = ("window", "sinks", "slashes", "mean_query", "position_and_content")


@pytest.fixture(scope="module")
def result(mini, alice):
    return Rules(rules=CHOSEN, budgets=[BUDGET], epsilon=0.1)(mini, alice, null_seeds=(), **CUT)


@pytest.fixture(scope="module")
def with_null(mini, alice):
    return Rules(rules=CHOSEN, budgets=[BUDGET], epsilon=0.1)(mini, alice, null_seeds=(0,), **CUT)


@pytest.fixture(scope="module")
def rows(mini, alice):
    return to_prompts(mini, alice, length=CUT["length"], n_prompts=CUT["n_prompts"])


def masks_of(model, rows, measured, rule, layer):
    """Pattern and kept keys [head, query, key] of one prompt, key by key, from means over the even prompts."""
    means, found = [], []
    for row in rows[::2]:
        run_capture(model, row[None], lambda one: means.append((one.q[:, 1:], one.k[:, 1:])), layers=[layer])
    q_mean, k_mean = (torch.cat(one, 1).double().mean(1) for one in zip(*means, strict=True))
    run_capture(model, measured[None], found.append, {"pattern"}, layers=[layer])
    (capture,) = found
    theta = capture.geometry.rope.inv_freq
    half = len(theta)
    planes = lambda x: torch.complex(x[..., :half].double(), x[..., half:].double())  # noqa: E731
    q, k, q_mean, k_mean = map(planes, (capture.q, capture.k, q_mean, k_mean))
    n = capture.length
    u = torch.polar(torch.ones(n, half).double(), torch.arange(n)[:, None] * theta)
    kept = torch.zeros_like(capture.pattern, dtype=torch.bool)
    for head in range(len(q)):
        for i in range(n):
            e, distance = k[head] - k_mean[head], i - torch.arange(i + 1)
            number = {
                "window": -distance,
                "mean_query": (q_mean[head] * k[head, : i + 1].conj() * u[distance]).real.sum(-1),
                "position_and_content": (q[head, i] * k_mean[head].conj() * u[distance]).real.sum(-1)
                + (
                    q[head, i]
                    * e[: i + 1].conj()
                    * (u.mT / (1 + torch.arange(n))).sum(1)
                    / (1 / (1 + torch.arange(n))).sum()
                ).real.sum(-1),
            }[rule]
            kept[head, i, number.argsort(descending=True)[:BUDGET]] = True
    return capture.pattern.double(), kept


@pytest.mark.parametrize("rule", ["window", "mean_query", "position_and_content"])
def test_recall_of_heads_and_unions_is_that_of_brute_force(result, mini, rows, rule):
    pattern, kept = masks_of(mini, rows, rows[3], rule, 1)
    at = {"rule": rule, "budget": BUDGET, "prompt": 3, "layer": 1}
    best = pattern.sort(-1, descending=True).values[:, BUDGET:, :BUDGET].sum(-1)
    held = (pattern * kept)[:, BUDGET:].sum(-1)
    np.testing.assert_allclose(result.own["mass"].sel(at | {"tokens": "all"}), held.mean(-1), atol=2e-3)
    np.testing.assert_allclose(result.own["recall"].sel(at | {"tokens": "all"}), (held / best).mean(-1), atol=2e-3)
    rest = pattern.clone()
    rest[..., 0] = 0
    best = rest.sort(-1, descending=True).values[:, BUDGET:, :BUDGET].sum(-1)
    share = ((rest * kept)[:, BUDGET:].sum(-1) / best).mean(-1)
    np.testing.assert_allclose(result.own["recall"].sel(at | {"tokens": "without first"}), share, atol=2e-3)
    for group, heads in enumerate(([0, 1], [2, 3])):
        union, together = kept[heads].any(0)[BUDGET:], pattern[heads].mean(0)[BUDGET:]
        counts = union.sum(-1)
        best = torch.stack(
            [one.sort(descending=True).values[:n].sum() for one, n in zip(together, counts, strict=True)]
        )
        share = ((together * union).sum(-1) / best).mean()
        assert float(result.own["kept"].sel(at | {"key_value_head": group})) == pytest.approx(
            float(counts.double().mean()), abs=0.1
        )
        assert float(result.own["group_recall"].sel(at | {"key_value_head": group})) == pytest.approx(
            float(share), abs=2e-3
        )


def test_the_loss_is_that_of_the_hooked_model_behind_the_budget(result, mini, rows):
    odd = torch.stack(rows[1::2])
    untouched = token_losses(mini, odd)
    for rule in ("slashes", None):
        rise = token_losses(mini, odd, apply_rules(mini, result, BUDGET, rule)) - untouched
        assert rise[:, : BUDGET - 1].abs().max() < 1e-5
        data = result.sel(budget=BUDGET)
        expected = data["plan_rise"] if rule is None else data["rise"].sel(rule=rule)
        np.testing.assert_allclose(expected, rise[:, BUDGET:].mean(1), atol=1e-6)


@pytest.mark.slow
def test_the_plan_keeps_to_epsilon_where_it_was_made_and_is_the_cheapest(result, mini, rows):
    even = torch.stack(rows[::2])
    table = RuleTable.from_result(result, BUDGET)
    rise = (token_losses(mini, even, apply_rules(mini, table)) - token_losses(mini, even))[:, BUDGET:].mean()
    assert float(rise) <= 0.1
    assert len(set(table.frame()["rule"])) > 1
    free = Rules(budgets=[BUDGET], epsilon=100)(mini, torch.stack(rows), null_seeds=(), progress=False)
    assert set(free.own["plan"].values.ravel()) == {"window"}
    whole = Rules(rules=["vertical"], budgets=[BUDGET], epsilon=0)(
        mini, torch.stack(rows), null_seeds=(), progress=False
    )
    assert "all" in whole.own["plan"].values


def test_the_plan_says_on_how_many_prompts_it_was_made(result):
    told = result.measure.plan_sentence(result.numbers, BUDGET)
    assert told.startswith("Plan within 0.1 nats on 2 calibrating prompts at 6 keys")
    assert told.endswith("On so few prompts a plan often costs more elsewhere: give 8 prompts or more.")
    enough = replace(result, dataset=result.dataset.assign_attrs(calibrating=4))
    expected = told.replace("on 2 cal", "on 4 cal").split(" On so few")[0]
    assert enough.measure.plan_sentence(enough.numbers, BUDGET) == expected


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.02, 0.05, 0.1])
def test_the_plan_takes_a_threshold_within_epsilon_whose_next_lower_one_costs_more(mini, rows, epsilon):
    """Every threshold is tried; even and odd prompts are the same here, so that their recalls are known."""
    twice = [row for row in rows[::2] for _ in range(2)]
    result = Rules(rules=CHOSEN, budgets=[BUDGET], epsilon=epsilon)(mini, twice, null_seeds=(), progress=False)
    data, even = result.own.sel(budget=BUDGET), torch.stack(rows[::2])
    tables = {rule: RuleTable.from_result(result, BUDGET, rule) for rule in CHOSEN}
    of_rule = {rule: {(one.layer, one.key_value_head): one for one in table.heads} for rule, table in tables.items()}
    recalls = data["group_recall"].mean("prompt").sel(rule=list(CHOSEN))
    places = {at: recalls.sel(layer=at[0], key_value_head=at[1]).to_series() for at in of_rule["window"]}
    untouched = token_losses(mini, even)

    def chosen(threshold):
        enough = {at: [rule for rule in CHOSEN if recall[rule] >= threshold] for at, recall in places.items()}
        return {at: rules[0] if rules else "all" for at, rules in enough.items()}

    def rise(threshold):
        heads = [of_rule[rule][at] for at, rule in chosen(threshold).items() if rule != "all"]
        losses = token_losses(mini, even, apply_rules(mini, replace(tables["window"], heads=heads)))
        return float((losses - untouched)[:, BUDGET:].mean())

    thresholds = sorted(recalls.values.ravel())
    place = int(np.abs(np.array(thresholds) - float(data["plan_recall"])).argmin())
    assert float(data["plan_recall"]) == pytest.approx(thresholds[place], abs=1e-12)
    assert rise(thresholds[place]) <= epsilon
    assert place == 0 or rise(thresholds[place - 1]) > epsilon
    planned = data["plan"].to_series()
    assert {at: planned[at] for at in places} == chosen(thresholds[place])


def test_the_plan_keeps_a_metric_from_falling_too(mini, rows):
    def less(logits, tokens):
        return -losses_of(logits, tokens)

    found = Rules(rules=["window"], budgets=[3], epsilon=0.05)(
        mini, torch.stack(rows), metric=less, null_seeds=(), progress=False
    )
    assert found.own["rise"].sel(rule="window").mean() < -0.2
    assert "all" in found.own["plan"].values


@pytest.mark.slow
def test_rules_stand_between_drawn_and_the_best_keys(with_null):
    result = with_null
    recall = result.numbers.array("recall", budget=BUDGET).sel(init="trained").mean(["prompt", "layer", "head"])
    assert float(recall.sel(rule="oracle")) == pytest.approx(1)
    found = [float(recall.sel(rule=rule)) for rule in ("drawn", "sinks", "position_and_content", "oracle")]
    assert found == sorted(found)
    assert float(result.numbers("recall", rule="drawn", budget=BUDGET).null.text(".2f")[12:]) > 0.8


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rule", ["sinks", "slashes", "drawn"])
def test_hidden_keys_are_no_padding_for_hooks_that_follow(result, mini, rows, rule, streamed):
    table = RuleTable.from_result(result, BUDGET, rule)
    narrow = replace(table, heads=[replace(one, budget=2) for one in table.heads])
    one, other = apply_rules(mini, narrow), with_frequencies(mini, FrequencyRule("linear", 2))
    tokens = torch.stack(rows)
    with tl_posgen.streaming(mini) if streamed else nullcontext():
        found = [token_losses(mini, tokens, hooks) for hooks in (one + other, other + one)]
    torch.testing.assert_close(*found)  # neither reads the scores, so that their order changes nothing
    assert not torch.allclose(found[0], token_losses(mini, tokens, other), atol=1e-2)


def test_the_oracle_ranks_by_the_scores_of_the_pass(result, mini, rows):
    table, found = RuleTable.from_result(result, BUDGET, "oracle"), {}
    noise = torch.randn(4, CUT["length"], CUT["length"], generator=torch.Generator().manual_seed(0))
    own = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: scores + 3 * noise)]
    kept = [("blocks.1.attn.hook_pattern", lambda pattern, hook: found.setdefault(len(found), pattern))]
    for hooks in (own, own + apply_rules(mini, replace(table, heads=[one for one in table.heads if one.layer == 1]))):
        mini.run_with_hooks(rows[0][None], fwd_hooks=[*hooks, *kept])
    before, after = (found[number][0] for number in range(2))
    for group in ([0, 1], [2, 3]):
        for query in range(BUDGET, CUT["length"]):
            best = {int(key) for head in group for key in before[head, query].topk(BUDGET).indices}
            for head in group:
                assert {int(key) for key in after[head, query].nonzero()[:, 0]} == best


def test_tables_go_through_files_and_give_the_same_hooks(result, mini, rows, tmp_path):
    table, path = RuleTable([], {}), tmp_path / "rules.json"
    for rule in ("sinks", "mean_query", None):
        table = RuleTable.from_result(result, BUDGET, rule)
        assert table.to_json(path) == path
        assert RuleTable.from_json(path).frame().equals(table.frame())
        hooks = [apply_rules(mini, one) for one in (path, table)]
        assert torch.equal(*(token_losses(mini, torch.stack(rows[1::2]), one) for one in hooks))
    entry = json.loads(path.read_text())
    assert entry["calibration"]["weights"] == result.provenance["weights"]
    assert entry["calibration"]["rise"] == pytest.approx(float(result.sel(budget=BUDGET)["plan_rise"].mean()))
    assert entry["calibration"]["epsilon"] == result.measure.epsilon
    report = tl_posgen.Report({"rules": result}, result.provenance).write(tmp_path / "report").parent
    assert len(apply_rules(mini, report)) == len(apply_rules(mini, result))
    assert {*entry["heads"][0]} == {"layer", "key_value_head", "query_heads", "rule", "budget", "parameters"}
    loaded = tl_posgen.load(result.save(tmp_path / "rules.nc"))["rules"]
    assert RuleTable.from_result(loaded, BUDGET).frame().equals(table.frame())


@pytest.mark.usefixtures("unchecked")
def test_a_rule_that_is_not_known_is_refused(result):
    with pytest.raises(InputError, match="rule 'widnow': choose from window, sinks"):
        HeadRule(0, 0, (0, 1), "widnow", 3)
    with pytest.raises(InputError, match=r"rule = \['window'\]"):
        RuleTable.from_result(result, BUDGET, ["window"])


@pytest.mark.usefixtures("unchecked")
def test_a_budget_of_numpy_is_written_as_a_number(result, tmp_path):
    for budget in result.own["budget"].values:
        path = RuleTable.from_result(result, budget, "window").to_json(tmp_path / "rules.json")
        assert RuleTable.from_json(path).heads[0].budget == budget


def test_what_is_no_table_or_of_another_model_is_refused(result, mini, tmp_path):
    table = RuleTable.from_result(result, BUDGET, "slashes")
    other = tl_posgen.random_like(mini, 0)
    own = r"calibrated on mini, weights .*, and this model's are .*; measure rules of this model"
    with pytest.raises(InputError, match=f"{own}$"):
        apply_rules(other, table)
    for backend, words in {
        "another": r"were calibrated \(another, and this model's is \w+\)$",
        None: "were calibrated$",
    }.items():
        elsewhere = replace(table, calibration={**table.calibration, "backend": backend})
        with pytest.raises(InputError, match=f"{own}. HookedTransformer and TransformerBridge hold .* {words}"):
            apply_rules(other, elsewhere)
    found = json.loads(table.to_json(tmp_path / "rules.json").read_text())
    wrong = {
        "format": found | {"format": "another"},
        "rule 'nonsense'": found | {"heads": [found["heads"][0] | {"rule": "nonsense"}]},
        "budget 0": found | {"heads": [found["heads"][0] | {"budget": 0}]},
        "of 1 heads": found | {"heads": [found["heads"][0] | {"query_heads": [0]}]},
        "KeyError": {"format": found["format"]},
        "layer = '0'": found | {"heads": [found["heads"][0] | {"layer": "0"}]},
        "budget = True": found | {"heads": [found["heads"][0] | {"budget": True}]},
        "do not read it": found | {"heads": [found["heads"][0] | {"key_value_head": 1}]},
        "has a rule already": found | {"heads": found["heads"][:1] * 2},
        "first = 2": found | {"heads": [found["heads"][0] | {"rule": "sinks", "parameters": {"first": 2}}]},
        "calibration = ": found | {"calibration": [1]},
        "heads = {}": found | {"heads": {}},
    }
    for message, changes in {
        "components": {"mean_queries": [[1.0], [1.0]], "mean_key": [1.0]},
        "finite numbers": {"mean_key": [np.nan] * 32},
        "n_distances = 0": {"n_distances": 0},
        "n_distances = 1000000000000": {"n_distances": 10**12},
        "weights = 'far'": {"weights": "far"},
    }.items():
        entry = found["heads"][0] | {"parameters": found["heads"][0]["parameters"] | changes}
        wrong[message] = found | {"heads": [entry]}
    for number, (message, one) in enumerate(wrong.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(one))
        with pytest.raises(InputError, match=message):
            apply_rules(mini, path)
    with pytest.raises(InputError, match="needs mean queries"):
        HeadRule(0, 0, (0, 1), "vertical", 4)
    with pytest.raises(InputError, match="no table of rules"):
        apply_rules(mini, tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="leave them out"):
        apply_rules(mini, table, budget=3)
    for options, message in (
        ({"budget": 7}, "no budget 7"),
        ({"rule": "none"}, "no rule 'none'"),
        ({"budget": 0}, "budget = 0: give"),
    ):
        with pytest.raises(InputError, match=message):
            apply_rules(mini, result, **options)


def test_drawn_keys_are_those_that_were_measured(mini, rows):
    prompts = torch.stack([row[:16] for row in rows[:2]])
    found = Rules(rules=["window"], budgets=[3])(mini, prompts, seed=5, null_seeds=(), progress=False)
    rise = token_losses(mini, prompts[1:], apply_rules(mini, found, 3, "drawn")) - token_losses(mini, prompts[1:])
    assert float(found.own["rise"].sel(rule="drawn").squeeze()) == pytest.approx(float(rise[:, 3:].mean()), abs=1e-6)


def test_bad_prompts_are_refused_before_work(mini, rows):
    for prompts, message in ((rows[:1], "give two at least"), ([row[:7] for row in rows], "budgets up to 5")):
        with pytest.raises(InputError, match=message):
            Rules(budgets=[BUDGET])(mini, prompts, null_seeds=(), progress=False)


@pytest.mark.slow
def test_one_layer_or_head_alone_and_prompts_of_several_lengths(mini, rows):
    prompts, options = [row[: 40 - 3 * n] for n, row in enumerate(rows)], {"null_seeds": (), "progress": False}
    measure = cache(lambda alone: Rules(rules=["vertical"], budgets=[BUDGET], alone=alone)(mini, prompts, **options))
    groups, layers = measure("head").own["group_rise"], measure("layer").own["layer_rise"]
    assert groups.sizes == {"rule": 3, "budget": 1, "prompt": 2, "layer": 4, "key_value_head": 2}
    table = RuleTable.from_result(measure("head"), BUDGET, "vertical")
    for number in (1, 3):
        row = prompts[number][None]
        for found, some in (
            (layers.sel(layer=1), table.heads[2:4]),
            (groups.sel(layer=3, key_value_head=0), table.heads[6:7]),
        ):
            hooks = apply_rules(mini, RuleTable(some, table.calibration))
            rise = (token_losses(mini, row, hooks) - token_losses(mini, row))[:, BUDGET:].mean()
            assert float(found.sel(rule="vertical", prompt=number).squeeze()) == pytest.approx(float(rise), abs=1e-6)


@pytest.mark.parametrize(("name", "backend"), family_cases("gpt2", without=["llama4"]))
def test_every_encoding_has_rules(family_model, name, backend):
    model, tokens = family_model(name, backend), torch.randint(2, 60, (2, 20), generator=torch.manual_seed(0))
    found = Rules(budgets=[3], epsilon=0.5)(model, tokens, null_seeds=(), progress=False)
    recall = found.own["recall"].sel(tokens="all").squeeze(("budget", "prompt"))
    np.testing.assert_allclose(recall.sel(rule="oracle"), 1, atol=1e-3)
    assert bool(((recall > 0) & (recall < 1 + 1e-6)).all())
    rise = token_losses(model, tokens[1:], apply_rules(model, found, 3, "vertical")) - token_losses(model, tokens[1:])
    assert float(found.own["rise"].sel(rule="vertical").squeeze()) == pytest.approx(float(rise[:, 3:].mean()), abs=1e-6)
    same = [found.own["mass"].sel(rule=rule).values for rule in ("slashes", "window")]
    if name in ("gpt2", "bloom"):
        np.testing.assert_allclose(*same, atol=1e-6)


def test_chosen_heads_alone_have_rules(mini, rows):
    found = Rules(rules=["window"], budgets=[BUDGET], epsilon=100)(
        mini, rows, heads=["1.2", "3.0"], null_seeds=(), progress=False
    )
    table = RuleTable.from_result(found)
    assert [(one.layer, one.key_value_head, one.heads) for one in table.heads] == [(1, 1, (2,)), (3, 0, (0,))]
    assert found.own["kept"].sel(rule="window", layer=1).mean("prompt").values.ravel().tolist()[1:] == [BUDGET]


@pytest.mark.slow
def test_pictures_show_every_head_and_the_plan(with_null):
    result = with_null
    dots = result.plot("recall").data
    assert len(dots) == 2
    assert len(dots[0].y) == 16 * 6
    (own, *_) = result.plot("plan").data
    assert own.text.ravel().tolist() == [WORDS[one] for one in result.sel(budget=BUDGET)["plan"].values.ravel()]
    table = result.table()
    assert len(table) == 7
    assert table["R²"][0] == ""
