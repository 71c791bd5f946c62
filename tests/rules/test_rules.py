"""Rules on real models: recall against brute force, losses under hooks, and what is refused."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from families import family_cases

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.extension.frequency_rules import FrequencyRule, with_frequencies
from tl_posgen.hooks import apply_rules
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rules import Rules

pytestmark = pytest.mark.longer

CUT = {"length": 40, "n_prompts": 4, "progress": False}
BUDGET = 6
CHOSEN = ("window", "sinks", "slashes", "mean_query", "position_and_content")


@pytest.fixture(scope="module")
def result(mini, alice):
    return Rules(rules=CHOSEN, budget=BUDGET)(mini, alice, nulls=1, **CUT)


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
def test_recall_is_that_of_brute_force(result, mini, rows, rule):
    pattern, kept = masks_of(mini, rows, rows[3], rule, 1)
    at = {"rule": rule, "prompt": 3, "layer": 1}
    best = pattern.sort(-1, descending=True).values[:, BUDGET:, :BUDGET].sum(-1)
    held = (pattern * kept)[:, BUDGET:].sum(-1)
    np.testing.assert_allclose(result.trained["recall"].sel(at | {"tokens": "all"}), (held / best).mean(-1), atol=2e-3)
    rest = pattern.clone()
    rest[..., 0] = 0
    best = rest.sort(-1, descending=True).values[:, BUDGET:, :BUDGET].sum(-1)
    share = ((rest * kept)[:, BUDGET:].sum(-1) / best).mean(-1)
    np.testing.assert_allclose(result.trained["recall"].sel(at | {"tokens": "without first"}), share, atol=2e-3)


@pytest.mark.parametrize("rule", ["window", "mean_query", "position_and_content"])
def test_each_head_sees_its_own_keys_alone(result, mini, rows, rule):
    """Heads that share a key/value head, too."""
    pattern, kept = masks_of(mini, rows, rows[3], rule, 1)
    expected, found = pattern * kept, []
    look = ("blocks.1.attn.hook_pattern", lambda one, hook: found.append(one[0]))
    mini.run_with_hooks(rows[3][None], fwd_hooks=[*apply_rules(mini, result, rule, layers=[1]), look])
    same = ((found[0] > 0) == kept).all(-1)
    assert same.double().mean() > 0.98  # float32 orders a few keys of almost equal rank otherwise
    expected = (expected / expected.sum(-1, keepdim=True)).to(found[0])
    torch.testing.assert_close(found[0][same], expected[same], atol=1e-4, rtol=1e-3)


def test_the_loss_is_that_of_the_hooked_model_behind_the_budget(result, mini, rows):
    odd = torch.stack(rows[1::2])
    untouched = token_losses(mini, odd)
    for rule in ("slashes", "drawn"):
        rise = token_losses(mini, odd, apply_rules(mini, result, rule)) - untouched
        assert rise[:, : BUDGET - 1].abs().max() < 1e-5
        found = result.measure.rise_of(result.numbers).sel(init="trained", condition=rule)
        np.testing.assert_allclose(found, rise[:, BUDGET:].mean(1), atol=1e-6)


def test_each_recall_stands_beside_its_null(mini, rows):
    found = Rules(rules=["window"], budget=BUDGET)(mini, torch.stack(rows), nulls=1, progress=False)
    assert found.findings()[1].count("(random init") == 2  # of the rule, and of drawn keys


def test_rules_stand_between_drawn_and_the_best_keys(result):
    recall = result.sel(tokens="all")["recall"].mean(["prompt", "layer", "head"])
    assert float(recall.sel(rule="oracle")) == pytest.approx(1)
    found = [float(recall.sel(rule=rule)) for rule in ("drawn", "sinks", "position_and_content", "oracle")]
    assert found == sorted(found)
    assert result.numbers("recall", rule="drawn").nulls[0] > 0.8  # almost any keys will do


@pytest.mark.parametrize(("name", "backend"), family_cases("gpt2"))
def test_every_encoding_has_rules(family_model, name, backend):
    model, tokens = family_model(name, backend), torch.randint(2, 60, (2, 20), generator=torch.manual_seed(0))
    found = Rules(budget=3)(model, tokens, nulls=0, progress=False)
    recall = found.trained["recall"].sel(tokens="all").squeeze("prompt")
    recall = recall.stack(place=("layer", "head")).dropna("place")  # heads that their layer has
    np.testing.assert_allclose(recall.sel(rule="oracle"), 1, atol=1e-3)
    assert bool(((recall > 0) & (recall < 1 + 1e-6)).all())
    rise = token_losses(model, tokens[1:], apply_rules(model, found, "vertical")) - token_losses(model, tokens[1:])
    rises = found.measure.rises(found.numbers)
    assert rises["vertical"].value == pytest.approx(float(rise[:, 3:].mean()), abs=1e-6)
    if name in ("gpt2", "bloom"):
        np.testing.assert_allclose(recall.sel(rule="slashes"), recall.sel(rule="window"), atol=1e-6)


# Hooks


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rule", ["sinks", "slashes", "drawn"])
def test_hidden_keys_are_no_padding_for_hooks_that_follow(result, mini, rows, rule, streamed):
    one, other = apply_rules(mini, result, rule, 2), with_frequencies(mini, FrequencyRule("linear", 2))
    tokens = torch.stack(rows)
    with tl_posgen.streaming(mini) if streamed else nullcontext():
        found = [token_losses(mini, tokens, hooks) for hooks in (one + other, other + one)]
    torch.testing.assert_close(*found)  # neither reads the scores, so that their order changes nothing
    assert not torch.allclose(found[0], token_losses(mini, tokens, other), atol=1e-2)


def test_the_oracle_ranks_by_the_scores_of_the_pass(result, mini, rows):
    noise, found = torch.randn(4, CUT["length"], CUT["length"], generator=torch.Generator().manual_seed(0)), []
    own = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: scores + 3 * noise)]
    kept = [("blocks.1.attn.hook_pattern", lambda pattern, hook: found.append(pattern[0]))]
    for hooks in (own, own + apply_rules(mini, result, "oracle", layers=[1])):
        mini.run_with_hooks(rows[0][None], fwd_hooks=[*hooks, *kept])
    before, after = found
    for head in range(4):
        for query in range(BUDGET, CUT["length"]):
            best = before[head, query].topk(BUDGET).indices.sort().values
            assert torch.equal(after[head, query].nonzero()[:, 0], best)


def test_chosen_heads_alone_have_rules(result, mini, rows):
    found = Rules(rules=["window"], budget=BUDGET)(mini, rows, heads=["1.2", "3.0"], nulls=0, progress=False)
    tokens = torch.stack(rows[1::2])
    losses = [
        token_losses(mini, tokens, hooks)
        for hooks in (apply_rules(mini, found, "window"), apply_rules(mini, result, "window", heads=["1.2", "3.0"]))
    ]
    torch.testing.assert_close(*losses)
    assert not torch.allclose(losses[0], token_losses(mini, tokens), atol=1e-3)
    with pytest.raises(InputError, match=r"L0H1 was not measured"):
        apply_rules(mini, found, "window", heads=["0.1"])


def test_a_loaded_result_gives_the_same_hooks(result, mini, rows, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "rules.nc"))["rules"]
    for rule in ("sinks", "mean_query"):
        hooks = [apply_rules(mini, one, rule) for one in (result, loaded)]
        assert torch.equal(*(token_losses(mini, torch.stack(rows[1::2]), one) for one in hooks))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "window"), "None is no result of the measure rules"),
        (("result", "widnow"), "rule = 'widnow': choose from window, sinks"),
        (("result", "window", 0), "budget = 0: give"),
    ],
)
def test_unusable_arguments_of_the_hooks_are_refused(result, mini, arguments, message):
    with pytest.raises(InputError, match=message):
        apply_rules(mini, *(result if one == "result" else one for one in arguments))


def test_a_model_of_other_weights_is_refused(result, mini):
    with pytest.raises(InputError, match=r"calibrated on mini, weights .*, and this model's are .*; measure rules of"):
        apply_rules(tl_posgen.random_like(mini, 0), result, "window")
