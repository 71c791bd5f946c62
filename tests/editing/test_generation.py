"""Generation under interventions: row by row with a KV cache as without one, refused for scores of whole prompts."""

from functools import partial

import pytest
import torch
from families import ANALYSED
from interventions import OF_THE_PROMPT, ROW_BY_ROW, TOKENS, N

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import lm_infinite, triangle
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.layers import fused
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming, streaming_by_policy
from tl_posgen.rope.rotation import Rope
from tl_posgen.rope.scores_at import scores_at, scores_frozen_beyond
from tl_posgen.rope.splits import split_scores
from tl_posgen.slash.numbers.ablations import ablate

pytestmark = pytest.mark.longer


def written(model, hooks, cached, tokens, n_new=3, **options):
    """Return the prompt and the model's greedy continuation."""
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, **options}
    with streaming_by_policy(session_of(model), N), model.hooks(fwd_hooks=hooks):
        return model.generate(tokens, max_new_tokens=n_new, use_past_kv_cache=cached, **options)


def logits_of_two_passes(model, hooks, tokens, first):
    """Return the logits of a prompt in two passes, the second with the KV cache of the first."""
    context, seen = session_of(model).backend.context(), []
    with torch.no_grad(), streaming_by_policy(session_of(model), N):
        for part in (tokens[0, :first], tokens[0, first:]):
            with model.hooks(fwd_hooks=[*hooks, (LAST, lambda value, hook: seen.append(value))]):
                context.extend(part)
    return torch.cat(seen, 1)


LAST = "blocks.1.hook_resid_post"


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_model_writes_the_same_with_a_cache_and_in_rows_as_whole(name, model, monkeypatch):
    hooks = ROW_BY_ROW[name](model)
    with torch.no_grad():
        own, whole = model.run_with_hooks(TOKENS, fwd_hooks=hooks), written(model, hooks, False, TOKENS)
        assert torch.equal(written(model, hooks, True, TOKENS), whole)
        monkeypatch.setattr(fused, "SCORES_AT_ONCE", 1200)
        with streaming(model):
            torch.testing.assert_close(model.run_with_hooks(TOKENS, fwd_hooks=hooks), own, atol=2e-5, rtol=1e-4)
            assert torch.equal(written(model, hooks, True, TOKENS), whole)


STREAMED = [pair for pair in ANALYSED if pair not in (("mpt", "bridge"), ("gpt2", "bridge"))]


@pytest.mark.parametrize(("name", "backend"), STREAMED)
def test_rows_of_every_family_are_edited_in_blocks(family_model, name, backend, monkeypatch):
    model, sizes = family_model(name, backend), []

    def halved(capture):
        sizes.append(capture.q.shape[1])
        return 0.5 * capture.scores()

    hooks = replace_scores(model, RowByRow(halved))
    with torch.no_grad(), streaming_by_policy(session_of(model), N):
        own = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    monkeypatch.setattr(fused, "SCORES_AT_ONCE", 1200)
    sizes.clear()
    with torch.no_grad(), streaming(model):
        found = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        assert max(sizes) < N
        torch.testing.assert_close(found, own, atol=1e-4 * float(own.abs().max()), rtol=1e-4)
        sizes.clear()
        seen = [("blocks.0.attn.hook_pattern", lambda pattern, hook: None)]
        torch.testing.assert_close(model.run_with_hooks(TOKENS, fwd_hooks=[*hooks, *seen]), found, atol=1e-4, rtol=1e-4)
        assert max(sizes) == N  # a layer that others look at is formed whole


def test_padded_prompts_are_edited_in_blocks_of_their_own_text(model, monkeypatch):
    mask = torch.ones_like(TOKENS)
    mask[1, :7] = 0
    hooks = lm_infinite(model, 6, 1)
    run = partial(model.run_with_hooks, TOKENS, attention_mask=mask, fwd_hooks=hooks)
    with torch.no_grad():
        own = run()
        monkeypatch.setattr(fused, "SCORES_AT_ONCE", 1200)
        with streaming(model):
            torch.testing.assert_close(run()[mask.bool()], own[mask.bool()], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_stories_writes_the_same_with_a_cache_and_not_what_it_writes_untouched(name, stories, tinystories):
    tokens, hooks = stories.to_tokens(tinystories[:600])[:, :64], ROW_BY_ROW[name](stories)
    whole = written(stories, hooks, False, tokens, 32)
    assert torch.equal(written(stories, hooks, True, tokens, 32), whole)
    assert not torch.equal(written(stories, [], True, tokens, 32), whole)


BROKEN = ("mpt", "bridge")  # shows queries their own key only, once there is a cache: TransformerLens 3.9 and 4.3


@pytest.mark.parametrize(("name", "backend"), [pair for pair in ANALYSED if pair != BROKEN])
def test_every_family_computes_the_same_in_two_parts(family_model, name, backend):
    """Check windows whose cache drops keys, ALiBi, soft caps, qk-norms, and attention that Hugging Face computes."""
    model = family_model(name, backend)
    hooks = replace_scores(model, RowByRow(lambda capture: 0.5 * capture.scores()))
    with torch.no_grad(), streaming_by_policy(session_of(model), N):
        seen = []
        model.run_with_hooks(TOKENS[:1], fwd_hooks=[*hooks, (LAST, lambda value, hook: seen.append(value))])
    for first in (N - 1, 10):
        found = logits_of_two_passes(model, hooks, TOKENS[:1], first)
        torch.testing.assert_close(found, seen[0], atol=1e-4 * float(seen[0].abs().max()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm_infinite", "split"])
def test_a_model_whose_cache_is_faulty_refuses_it_and_writes_without(family_model, name):
    model = family_model(*BROKEN)
    assert session_of(model).cached_difference().startswith("outputs differ by")
    hooks = (ROW_BY_ROW if name == "lm_infinite" else {"split": OF_THE_PROMPT["mean key of the prompt"]})[name](model)
    message = r"layer 0: .*is not to be trusted: .*generate with use_past_kv_cache=False, and from two tokens on$"
    with pytest.raises(UnsupportedModelError, match=message):
        written(model, hooks, True, TOKENS[:1])
    assert written(model, hooks, False, TOKENS[:1]).shape == (1, N + 3)


def test_the_cache_is_proved_once_and_again_for_another_dtype(family_directory, backend):
    model, passes = load_model(family_directory("llama"), backend), []
    session_of(model).layers()
    model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        lm_infinite(model, 8, 2)
    assert len(passes) == 3  # the whole prompt, its beginning, and its last token
    model.to(torch.bfloat16)
    assert session_of(model).cached_difference() == ""
    assert len(passes) == 6


def test_a_batch_padded_at_its_start_is_written_as_each_prompt_alone(model):
    hooks = lm_infinite(model, 6, 1)
    texts = ["abcdefghijklmnopqrst", "the cat sat on it"]
    tokenizer, before = model.tokenizer, (model.tokenizer.padding_side, model.tokenizer.pad_token)
    try:
        tokenizer.padding_side, tokenizer.pad_token = "left", "."
        both = written(model, hooks, True, texts, 6, return_type="str", prepend_bos=False)
        alone = [written(model, hooks, False, text, 6, return_type="str", prepend_bos=False) for text in texts]
    finally:
        tokenizer.padding_side, tokenizer.pad_token = before
    assert [one.lstrip(".") for one in both] == alone


@pytest.mark.slow
def test_a_bridge_writes_on_beyond_its_training_length(mini_bridge, alice):
    tokens = mini_bridge.to_tokens(alice)[:, :500]
    hooks = lm_infinite(mini_bridge, 256)
    whole = written(mini_bridge, hooks, False, tokens, 40)
    assert whole.shape == (1, 540)
    assert mini_bridge.cfg.n_ctx == 512
    assert torch.equal(written(mini_bridge, hooks, True, tokens, 40), whole)


@pytest.mark.parametrize("name", OF_THE_PROMPT)
def test_what_is_made_of_whole_prompts_refuses_a_cache(name, model):
    message = r"layer 0: 1 queries see 25 keys.*made of whole prompts; generate with use_past_kv_cache=False"
    with pytest.raises(InputError, match=message):
        written(model, OF_THE_PROMPT[name](model), True, TOKENS)


def test_a_capture_refuses_a_cache_and_names_the_option(model):
    message = r"layer 0: 1 queries see 25 keys.*generate with use_past_kv_cache=False"
    with pytest.raises(InputError, match=message), capturing(model, lambda capture: None):
        written(model, [], True, TOKENS[:1])


def test_a_cache_that_was_filled_without_the_hooks_is_refused(model):
    context, hooks = session_of(model).backend.context(), lm_infinite(model, 6, 1)
    context.extend(TOKENS[0, :10])
    with model.hooks(fwd_hooks=hooks), pytest.raises(InputError, match=r"4 queries see 14 keys.* saw 4 of them"):
        context.extend(TOKENS[0, 10:14])


def test_a_cache_of_another_prompt_is_refused(model):
    first, second = (session_of(model).backend.context() for _ in range(2))
    with torch.no_grad(), model.hooks(fwd_hooks=lm_infinite(model, 6, 1)):
        first.extend(TOKENS[0, :10])
        second.extend(TOKENS[1, :10])
        with pytest.raises(InputError, match=r"L\dH\d, .*one that other passes filled than these hooks saw"):
            first.extend(TOKENS[0, 10:14])


ROPE = Rope(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64))
LAST_OF = {
    "at one distance": lambda q, k: scores_at(q, k, ROPE, 0.3, 2.5),
    "at a function of distances": lambda q, k: scores_at(q, k, ROPE, 0.3, lambda d: 1.7 * d),
    "at few offsets": lambda q, k: scores_at(q, k, ROPE, 0.3, lambda d: d + (d > 3)),
    "frozen": lambda q, k: scores_frozen_beyond(q, k, ROPE, 0.3, 4),
    "split": lambda q, k: split_scores(q, k, ROPE, 0.3, triangle(4), k.mean(1)).scores,
    "ablated": lambda q, k: (lambda q, k: q @ k.mT)(*ablate(q, k, ROPE, "freeze", torch.tensor([True, False, True]))),
    "ALiBi": lambda q, k: BIASED.finish(q @ k.mT, torch.arange(13)[-q.shape[1] :, None] - torch.arange(13)),
}
BIASED = LayerGeometry(0, "alibi", 2, 2, 8, 0.3, soft_cap=4.0, alibi_slopes=torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize("name", LAST_OF)
def test_fewer_queries_than_keys_are_the_last_ones(name):
    q, k = torch.randn(2, 2, 13, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for n in (1, 5, 13):
        torch.testing.assert_close(LAST_OF[name](q[:, -n:], k), LAST_OF[name](q, k)[:, -n:])
