"""Captures made from an ActivationCache are those made while the model runs."""

import pytest
import torch
from captures import EVERYTHING, assert_same_parts, run
from drawn import token_ids
from families import VOCAB

from tl_posgen.errors import InputError
from tl_posgen.models.capture.cache import captures_from_cache, needed_names

TOKENS = token_ids(2, 16, seed=3, low=0, high=VOCAB)


def cached(model, tokens, needs=frozenset(), **options):
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=needed_names(model, needs), **options)[1]


@pytest.mark.parametrize("name", ["llama", "neox", "qwen3", "gpt2", "bloom"])
def test_a_cache_gives_the_same_captures_as_the_run(family_model, backend, name):
    model = family_model(name, backend)
    stored = list(captures_from_cache(cached(model, TOKENS, EVERYTHING), model, tokens=TOKENS))
    assert [(c.prompt, c.layer) for c in stored] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for expected in run(model, TOKENS):
        capture = next(c for c in stored if (c.prompt, c.layer) == (expected.prompt, expected.layer))
        assert torch.equal(capture.tokens, expected.tokens)
        assert_same_parts(capture, expected)


def test_a_cache_of_queries_and_keys_is_enough_for_the_scores(llama):
    full = captures_from_cache(cached(llama, TOKENS, EVERYTHING), llama, tokens=TOKENS)
    for capture, whole in zip(captures_from_cache(cached(llama, TOKENS), llama, tokens=TOKENS), full, strict=True):
        assert capture.attn_scores is None
        torch.testing.assert_close(capture.scores(), whole.attn_scores, rtol=1e-4, atol=1e-5)


def test_a_cache_without_its_batch_dimension_is_read_alike(llama):
    (capture, *_), (expected, *_) = (
        list(captures_from_cache(cached(llama, TOKENS[:1], EVERYTHING, remove_batch_dim=remove), llama))
        for remove in (True, False)
    )
    assert_same_parts(capture, expected)


def test_a_cache_that_lacks_what_a_measure_needs_says_what_and_how(llama):
    cache = cached(llama, TOKENS, frozenset({"attn_scores"}))
    message = (
        r"no blocks\.0\.attn\.hook_pattern \(2 names are missing\), the pattern of layer 0; make it with "
        r"model\.run_with_cache\(tokens, names_filter=tl_posgen\.models\.needed_names\(model, "
        r"needs=\{'attn_scores', 'pattern'\}\)\)"
    )
    with pytest.raises(InputError, match=message):
        captures_from_cache(cache, llama, tokens=TOKENS, needs={"pattern", "attn_scores"})
    with pytest.raises(InputError, match=r"no blocks\.1\.attn\.hook_v"):
        captures_from_cache(cache, llama, tokens=TOKENS, layers=[1], needs={"v"})


def test_only_what_is_needed_is_handed_over(llama):
    capture = next(captures_from_cache(cached(llama, TOKENS, EVERYTHING), llama, tokens=TOKENS, needs={"pattern"}))
    assert capture.pattern is not None
    assert capture.v is capture.attn_scores is capture.resid is None


@pytest.mark.parametrize("need", ["inputs", "logits"])
def test_what_no_cache_can_hold_is_refused(llama, need):
    with pytest.raises(InputError, match=f"cannot capture {need}; .* analyse the model itself"):
        needed_names(llama, {need})
    with pytest.raises(InputError, match=f"cannot capture {need}; .* analyse the model itself"):
        captures_from_cache(cached(llama, TOKENS), llama, tokens=TOKENS, needs={need})


def test_heads_may_differ_from_layer_to_layer(llama):
    cache = cached(llama, TOKENS, EVERYTHING)
    captures = list(captures_from_cache(cache, llama, tokens=TOKENS, heads=[(1, 0), (0, 2), (1, 3)]))
    assert [(c.prompt, c.layer, list(c.heads)) for c in captures] == [
        (0, 0, [2]), (0, 1, [0, 3]), (1, 0, [2]), (1, 1, [0, 3])
    ]  # fmt: skip
    for capture, whole in zip(captures, captures_from_cache(cache, llama, tokens=TOKENS), strict=True):
        assert torch.equal(capture.pattern, whole.pattern[capture.heads])


def test_tokens_of_another_shape_than_the_cache_are_refused(llama):
    with pytest.raises(InputError, match=r"tokens \[1, 16\]: the cache holds 2 prompts of 16 tokens"):
        captures_from_cache(cached(llama, TOKENS), llama, tokens=TOKENS[:1])


def test_what_is_no_tensor_is_refused_with_its_name(llama):
    cache = cached(llama, TOKENS, EVERYTHING)
    name = "blocks.1.attn.hook_q"
    for value in (cache[name].numpy(), None):
        with pytest.raises(InputError, match=f"^the cache's {name} is a {type(value).__name__}; give tensors"):
            captures_from_cache({**cache, name: value}, llama, tokens=TOKENS)


def test_what_lies_on_the_device_meta_is_refused_with_its_name(llama):
    cache = cached(llama, TOKENS, EVERYTHING)
    message = "on the device meta, which holds no numbers"
    with pytest.raises(InputError, match=f"^token ids are {message}"):
        captures_from_cache(cache, llama, tokens=TOKENS.to("meta"))
    for part in ("q", "attn_scores"):
        name = f"blocks.1.attn.hook_{part}"
        one_there = {key: value.to("meta") if key == name else value for key, value in cache.items()}
        with pytest.raises(InputError, match=f"^the cache's {name}: {message}"):
            captures_from_cache(one_there, llama, tokens=TOKENS)
