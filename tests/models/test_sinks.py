"""Sinks that join a layer's softmax (GPT-OSS): their logits, and attention that is made anew of scores."""

import numpy as np
import pytest
import torch
from families import GROUPED, save_config, with_sizes

import tl_posgen
from tl_posgen.frequencies import PlaneRoles
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.loading.load import load_model
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.substitution.hooks import by_constant, by_three_axis
from tl_posgen.position.substitution.numbers import attention_kl
from tl_posgen.rope.rotation import complex_planes, turns_at
from tl_posgen.slash.dominance import statistics_from_qk, statistics_of
from tl_posgen.slash.numbers.plane_contributions import score_of_profile

TOKENS = torch.randint(4, 60, (3, 30), generator=torch.Generator().manual_seed(0))
QUIET = {"nulls": 0, "progress": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = with_sizes("GptOssConfig", GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)()
    return save_config(config, tmp_path_factory.mktemp("gptoss"))


@pytest.fixture(scope="module")
def model(directory):
    model = load_model(directory, backend="bridge")
    with torch.no_grad():
        for number, layer in enumerate(model.original_model.model.layers):
            layer.self_attn.sinks.copy_(torch.tensor([-2.0, 0.0, 1.0, 3.0]) + number)
    return model


@pytest.fixture(scope="module")
def patterns(model):
    _, cache = model.run_with_cache(TOKENS)
    return [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)]


@pytest.mark.parametrize("streamed", [False, True])
def test_their_logits_are_those_of_the_model_and_make_its_attention(model, patterns, streamed):
    captures = []
    if streamed:
        with tl_posgen.streaming(model):
            run_capture(model, TOKENS, captures.append)
    else:
        run_capture(model, TOKENS, captures.append)
    for capture in captures:
        expected = torch.tensor([-2.0, 0.0, 1.0, 3.0]) + capture.layer
        torch.testing.assert_close(capture.sinks.float(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            capture.attention(capture.scores()), patterns[capture.layer][capture.prompt], rtol=1e-4, atol=1e-6
        )


def test_queries_and_keys_as_they_are_give_the_slash_scores_of_the_pass(model):
    captures = []
    run_capture(model, TOKENS, captures.append, needs=frozenset({"pattern"}))
    for capture in captures:
        anew = statistics_from_qk(capture, capture.rotated_q, capture.rotated_k)
        torch.testing.assert_close(anew.score, statistics_of(capture).score, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_explanations_examples_and_the_first_tokens_attention_are_the_models(model, patterns):
    for head in range(4):
        attention = tl_posgen.explain(model, TOKENS[0].tolist(), 1, head, query=-1).trained["attention"]
        seen = patterns[1][0, head, -1, attention["key"].values.tolist()]
        torch.testing.assert_close(torch.from_numpy(attention.values).float(), seen, rtol=1e-4, atol=1e-6)
    report = tl_posgen.analyze(model, TOKENS, measures=["attention_examples", "variance"], **QUIET)
    true = report["attention_examples"].trained["of_every_head"].sel(scores="true", unit="L1H3").values
    n = true.shape[-1]
    torch.testing.assert_close(torch.from_numpy(true).float(), patterns[1][0, 3, :n, :n], rtol=1e-4, atol=1e-6)
    first = torch.stack([pattern[:, :, 1:, 0].mean((0, 2)) for pattern in patterns])
    found = torch.from_numpy(report["variance"].trained["first_token"].values).float()
    torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-6)


def test_the_first_tokens_attention_is_that_of_the_scores_whatever_is_measured_beside_or_done_to_patterns(model):
    hooks = [("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern * (pattern < 0.3))]
    plain, alone, beside = (
        tl_posgen.analyze(model, TOKENS, measures=measures, fwd_hooks=hooks, **QUIET)["variance"].trained["first_token"]
        for measures, hooks in ((["variance"], []), (["variance"], hooks), (["variance", "slash"], hooks))
    )
    assert alone.equals(beside)
    np.testing.assert_allclose(alone.sel(layer=0), plain.sel(layer=0), rtol=1e-5)


def test_a_padded_batch_chosen_heads_and_bfloat16_have_the_same_logits(model):
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), TOKENS[:1, 4:]], 1)
    captures = []
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :4] = 0
    with capturing(model, captures.append, heads=["L0H3", "L0H1"]):
        model(torch.cat([TOKENS[:1], padded]), attention_mask=mask)
    assert [capture.length for capture in captures] == [30, 26]
    for capture in captures:
        assert capture.sinks.tolist() == [{1: 0.0, 3: 3.0}[head] for head in capture.heads]


def test_in_bfloat16_they_are_the_parameters_too(directory):
    model, captures = load_model(directory, "bridge", torch.bfloat16), []
    held = [layer.self_attn.sinks.detach() for layer in model.original_model.model.layers]
    run_capture(model, TOKENS[:1], captures.append)
    for capture, sinks in zip(captures, held, strict=True):
        assert torch.equal(capture.sinks, sinks)


def captured(model, **more):
    captures = []
    run_capture(model, TOKENS, captures.append, **more)
    return captures


def test_the_divergence_of_attention_has_what_sinks_take_as_one_outcome_more(model):
    for capture in captured(model)[::3]:
        exact, visible = capture.scores().double(), capture.geometry.visible(30)
        other = exact.masked_fill(~visible, 0) * 0.5 + 1
        found = attention_kl(exact, other, visible, capture.sinks)
        for head, row in ((0, 0), (1, 7), (3, 29)):
            seen = visible[row]
            p, q = (
                torch.cat([scores[head, row, seen], capture.sinks[head : head + 1].double()]).softmax(-1)
                for scores in (exact, other)
            )
            torch.testing.assert_close(found[head, row], (p * (p / q).log()).sum())
    report = tl_posgen.analyze(model, TOKENS, measures=["substitution"], **QUIET)
    kl = report["substitution"].trained["attention_kl"]
    expected = [
        attention_kl(capture.scores(), by_constant(capture), capture.geometry.visible(30), capture.sinks).mean(1)
        for capture in captured(model)
        if capture.layer == 0
    ]
    found = kl.sel(condition="uniform_attention", layer=0)
    np.testing.assert_allclose(found, torch.stack(expected).mean(0), rtol=1e-5)


def test_fits_weighted_by_attention_have_the_weights_of_the_pass(model, patterns):
    for capture in captured(model):
        pairs = CausalPairs(30, capture.geometry.window)
        pattern = patterns[capture.layer][capture.prompt]
        expected = fit_pair_weights(capture.scores(), pattern, pairs)
        full, _ = fit_capture(capture, weights="attention")
        torch.testing.assert_close(full.r, expected.r, rtol=1e-5, atol=1e-6)
        of_hook = by_three_axis(capture, "attention")
        fitted = expected.fitted(capture.positions, capture.positions).nan_to_num().float()
        torch.testing.assert_close(of_hook, fitted, rtol=1e-3, atol=1e-4)


def test_pairs_of_keys_that_change_places_are_weighted_by_the_attention_that_sinks_leave(model):
    """Two rows differ in how much their sinks take, so the mean over rows does."""
    (capture,) = (
        capture for capture in captured(model, needs={"pattern"}) if (capture.layer, capture.prompt) == (1, 0)
    )
    found = PlaneRoles().of_layer(capture)
    n, rope, scale = 30, capture.geometry.rope, capture.geometry.scale
    q = complex_planes(capture.rotated_q.double(), rope) * scale
    k, turns = complex_planes(capture.k.double(), rope), turns_at(torch.arange(n), rope)
    generator = torch.Generator().manual_seed(101)
    sums = torch.zeros(3, 4, dtype=torch.float64)
    for row in torch.linspace(n // 2, n - 1, 8).long().unique().tolist():
        first = 1 if capture.geometry.window is None else max(1, row - capture.geometry.window + 1)
        pairs = torch.randint(first, row + 1, (256, 2), generator=generator)
        for head in range(4):

            def score(content, place, head=head, row=row):
                return float((q[head, row] * (k[head, content] * turns[place]).conj()).real.sum())

            total = sum(np.exp(score(j, j)) for j in range(first, row + 1)) + np.exp(float(capture.sinks[head]))
            for a, b in pairs[pairs[:, 0] != pairs[:, 1]].tolist():
                d, e = np.exp([score(a, a), score(b, b)]), np.exp([score(b, a), score(a, b)])
                size, weight = np.hypot(*d) * np.hypot(*e), abs(d[0] - d[1]) / total
                sums[:, head] += torch.tensor([weight * (d @ e) / size, weight * (d @ e[::-1]) / size, weight])
    torch.testing.assert_close(torch.stack([found["positional"], found["symbolic"]]), sums[:2] / sums[2])


def test_the_slash_scores_of_a_logit_are_those_of_its_softmax_with_sinks(model):
    capture = captured(model)[0]
    logit = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    away = (torch.arange(30)[:, None] - torch.arange(30)).clamp(min=0)
    for window in (None, 5):
        hidden = (torch.arange(30)[:, None] < torch.arange(30)) | (away >= (window or 30))
        pattern = capture.attention(logit[:, away].masked_fill(hidden, -torch.inf))
        expected = torch.stack([pattern.diagonal(-distance, 1, 2).mean(-1) for distance in range(30)], -1)
        torch.testing.assert_close(score_of_profile(logit, window, capture.sinks), expected)


def test_slash_scores_by_biases_and_by_mean_vectors_have_the_sinks(directory):
    """Where sinks take nearly all, no score is left of either, as none is left of the model's own."""
    model = load_model(directory, backend="bridge")
    with torch.no_grad():
        for layer in model.original_model.model.layers:
            for part, value in (("sinks", 12.0), ("q_proj.bias", 0.5), ("k_proj.bias", 0.5)):
                layer.self_attn.get_parameter(part).fill_(value)
    report = tl_posgen.analyze(model, TOKENS, measures=["slash_biases", "slash_planes"], **QUIET)
    for name, variable in (("slash_biases", "alone"), ("slash_planes", "predicted")):
        assert 0 < float(report[name].trained[variable].sel(tokens="all").max()) < 0.05


def test_scores_of_a_logit_without_the_first_token_are_shared_among_keys_alone(directory):
    """Measured scores without the first token are of attention over the other keys, which has no sink's share."""
    model = load_model(directory, backend="bridge")
    with torch.no_grad():
        for layer in model.original_model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-2.0, 0.0, 1.0, 3.0]))
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.zero_()  # the biases alone make the scores
                projection.bias.normal_()
    found = tl_posgen.analyze(model, TOKENS, measures="slash_biases", **QUIET)["slash_biases"].trained
    for tokens in ("all", "without first"):
        score, alone = (found[name].sel(tokens=tokens).values for name in ("score", "alone"))
        np.testing.assert_allclose(alone, score, atol=1e-5, equal_nan=True)
