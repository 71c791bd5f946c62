"""Sinks that join a layer's softmax (GPT-OSS): their logits, and attention that is made anew of scores."""

import numpy as np
import pytest
import torch
from families import GROUPED, save_config, with_sizes

import tl_posgen
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.loading.load import load_model
from tl_posgen.slash.dominance import statistics_from_qk, statistics_of

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
