"""Padded batches: every prompt gives what it gives alone, or the batch is refused."""

import pytest
import torch
from captures import EVERYTHING, assert_same_parts, captures_of, run
from families import FAMILIES

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import permute_positions
from tl_posgen.models.capture.cache import captures_from_cache, needed_names
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.capture.padding import NO_PADDING, texts_of
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loss import token_losses
from tl_posgen.models.streaming.stream import streaming
from tl_posgen.models.tokens import to_prompts

PAD = 61  # the tokenizer's last: of its own: neither begins nor ends a text
LENGTHS = (2, 17, 40, 5)


@pytest.fixture
def padding_model(family_directory, backend):
    """(name, pad, side) -> a model of its own whose tokenizer pads with a token of its own or the end of text."""

    def make(name: str, pad: int = PAD, side: str = "right"):
        if backend == "hooked" and not FAMILIES[name].hooked:
            pytest.skip(f"TransformerLens converts no {name}")
        model = load_model(family_directory(name), backend)
        tokenizer = model.tokenizer
        tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(pad), side
        return model

    return make


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, PAD, (n,), generator=generator) for n in LENGTHS]


def padded(side: str, pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [batch, pos]."""
    tokens = torch.full((len(LENGTHS), max(LENGTHS)), pad)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts()):
        span = slice(0, len(prompt)) if side == "right" else slice(max(LENGTHS) - len(prompt), None)
        tokens[row, span], mask[row, span] = prompt, 1
    return tokens, mask


def assert_as_alone(model, *routes):
    alone = [(number, capture) for number, prompt in enumerate(prompts()) for capture in run(model, prompt[None])]
    for captures in routes:
        by_place = {(c.prompt, c.layer): c for c in captures}
        assert len(by_place) == len(alone) == len(LENGTHS) * model.cfg.n_layers
        for number, expected in alone:
            found = by_place[number, expected.layer]
            assert_same_parts(found, expected, rtol=1e-4, atol=2e-5)
            assert found.tokens is None or torch.equal(found.tokens, prompts()[number])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2", "neox", "mpt"])
def test_masked_padding_is_left_out_on_every_route(padding_model, name, side):
    model, (tokens, mask) = padding_model(name), padded(side)
    plain = captures_of(model, tokens, attention_mask=mask)
    with streaming(model):
        streamed = captures_of(model, tokens, attention_mask=mask)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=needed_names(model, EVERYTHING))
    both = {"input_ids": tokens, "attention_mask": mask}
    cached = (captures_from_cache(cache, model, tokens=given) for given in (tokens, both))
    assert_as_alone(model, plain, streamed, *cached)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_behind_the_text_needs_no_mask_where_its_token_is_no_other(padding_model, name):
    model, (tokens, _) = padding_model(name), padded("right")
    assert_as_alone(model, captures_of(model, tokens), run(model, tokens))


def test_padding_before_the_text_that_the_model_does_not_mask_is_refused(padding_model):
    model, (tokens, _) = padding_model("llama"), padded("left")
    with torch.no_grad(), capturing(model, lambda capture: None), pytest.raises(InputError, match="38 padding tokens"):
        model(tokens)


def test_padding_that_could_be_text_is_refused(padding_model):
    model, (tokens, mask) = padding_model("llama", pad=1), padded("right", pad=1)
    message = r"prompt 0 of 4: 38 tokens at its end are 1, which pads and also begins or ends texts.*attention_mask"
    with torch.no_grad(), capturing(model, lambda capture: None), pytest.raises(InputError, match=message):
        model(tokens)
    with pytest.raises(InputError, match=message):
        to_prompts(model, tokens)
    assert_as_alone(model, captures_of(model, tokens, attention_mask=mask))


@pytest.mark.parametrize("n_padding", [1, 3])
@pytest.mark.parametrize("pad", [0, PAD])
def test_scores_made_of_whole_prompts_refuse_padding_that_no_mask_tells(padding_model, pad, n_padding):
    """As lm-evaluation-harness' HFLM gives it: token 0, whatever the padding token is."""
    model, tokens = padding_model("llama"), torch.randint(2, PAD, (3, 12))
    whole = replace_scores(model, lambda capture: 9 * capture.k.mean() * capture.scores())
    rows = RowByRow(lambda capture: 2 * capture.scores())
    tokens[:, -4:] = torch.tensor([5, 6, 7, 8])
    kept = model.run_with_hooks(tokens, fwd_hooks=whole)[1, : 12 - n_padding]
    mask = torch.ones_like(tokens)
    tokens[1, -n_padding:], mask[1, -n_padding:] = pad, 0
    with pytest.raises(InputError, match=r"prompt 1: 1 of 3 prompts end with what may be padding.*batch_size=1"):
        model.run_with_hooks(tokens, fwd_hooks=whole)
    model.run_with_hooks(tokens, fwd_hooks=replace_scores(model, rows))
    alone = model.run_with_hooks(tokens[1:2, :-n_padding], fwd_hooks=whole)[0]
    masked = model.run_with_hooks(tokens, fwd_hooks=whole, attention_mask=mask)[1, :-n_padding]
    torch.testing.assert_close(masked, alone, rtol=1e-4, atol=1e-4)
    assert (kept - alone).abs().max() > 1e-3  # the mean is of the whole prompt
    tokens[:, -n_padding:] = pad  # which is text where all have it
    model.run_with_hooks(tokens, fwd_hooks=whole)
    token_losses(model, torch.cat([tokens[:2], torch.full_like(tokens[:1], 9)]), whole)  # of one length, no padding


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_in_a_list_are_padded_by_the_model_and_measured_alone(padding_model, side):
    model, texts = padding_model("llama", side=side), ["Down", "Down, down, down. Would it end?"]
    captures, alone = captures_of(model, texts), [capture for text in texts for capture in captures_of(model, text)]
    for number, expected in enumerate(alone):
        found = next(c for c in captures if (c.prompt, c.layer) == divmod(number, model.cfg.n_layers))
        torch.testing.assert_close(found.q, expected.q, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_unpadded_before_they_are_run(padding_model, side):
    model, (tokens, mask) = padding_model("llama"), padded(side)
    ways = (tokens, {"input_ids": tokens, "attention_mask": mask}, [prompt.tolist() for prompt in prompts()], prompts())
    for given in ways:
        assert [prompt.tolist() for prompt in to_prompts(model, given)] == [prompt.tolist() for prompt in prompts()]
    several = to_prompts(model, [*ways[:1], prompts()[0], prompts()[3]])  # batches of several widths
    assert [len(prompt) for prompt in several] == [*LENGTHS, LENGTHS[0], LENGTHS[3]]


def test_what_a_tokenizer_returns_is_taken_padded_or_not(padding_model):
    model = padding_model("llama")
    texts = ["Down", "Down, down, down."]
    for given in (model.tokenizer(texts, padding=True, return_tensors="pt"), dict(model.tokenizer(texts))):
        prompts = [prompt.tolist() for prompt in to_prompts(model, given)]
        assert prompts == [model.tokenizer(text).input_ids for text in texts]


def test_a_cache_of_several_prompts_needs_their_tokens(padding_model):
    model, (tokens, _) = padding_model("llama"), padded("right")
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=needed_names(model, EVERYTHING - {"attn_scores"}))
    with pytest.raises(InputError, match="4 prompts in one pass, no mask and no token ids"):
        captures_from_cache(cache, model)
    found = list(captures_from_cache(cache, model, tokens=tokens))
    assert [c.length for c in found if c.layer == 0] == list(LENGTHS)


def test_a_mask_before_the_text_must_be_proved_by_the_cache(padding_model):
    model, (tokens, mask) = padding_model("llama"), padded("left")
    given = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        _, blind = model.run_with_cache(tokens, attention_mask=mask, names_filter=needed_names(model))
        _, other = model.run_with_cache(
            tokens, attention_mask=torch.ones_like(mask), names_filter=needed_names(model, {"attn_scores"})
        )
    with pytest.raises(InputError, match=r"prompt 0: 38 tokens before its text are padding.*add hook_attn_scores"):
        captures_from_cache(blind, model, tokens=given)
    with pytest.raises(InputError, match="prompt 0: 38 tokens before its text are padding, which the pass did not"):
        next(captures_from_cache(other, model, tokens=given))
    shown = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: scores.masked_fill(scores < -1e30, 0.0))]
    with pytest.raises(InputError, match=r"38 tokens before its text are padding.*sees other keys.*attention_mask"):
        captures_of(model, tokens, attention_mask=mask, hooks=shown)


def test_interventions_act_on_the_text_of_a_padded_batch(padding_model):
    model, (tokens, mask) = padding_model("llama"), padded("left")
    n = LENGTHS[1]
    order = torch.arange(n).flip(0)
    hooks = permute_positions(model, order)
    with torch.no_grad():
        together = model.run_with_hooks(tokens[1:2], attention_mask=mask[1:2], fwd_hooks=hooks)[0, -n:]
        alone = model.run_with_hooks(prompts()[1][None], fwd_hooks=hooks)[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


HIDDEN = {
    "the first key": (..., 0),
    "the last key": (..., slice(19, None)),
    "the first key of head 0": (slice(None), 0, slice(None), 0),
}


@pytest.mark.parametrize("layers", [[0, 1], [1]])
@pytest.mark.parametrize("what", HIDDEN)
def test_a_hook_that_hides_a_token_is_not_taken_for_padding(llama, what, layers):
    def hide(scores, hook):
        scores = scores.clone()
        scores[HIDDEN[what]] = -torch.inf
        return scores

    hooks = [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in layers]
    for capture in captures_of(llama, torch.arange(2, 22)[None], hooks=hooks):
        assert capture.length == 20
        assert not capture.pattern.isnan().any()  # of what hides keys, the pattern can be measured
        if capture.layer in layers:
            with pytest.raises(UnsupportedModelError, match="sees other keys than its mask gives"):
                capture.scores()


def test_tokens_are_those_of_the_pass(padding_model, backend):
    model, (tokens, _) = padding_model("llama"), padded("right")
    full, captures = torch.stack([prompts()[2]] * 2), []
    with torch.no_grad():
        _, cache = model.run_with_cache(full)
        with capturing(model, captures.append, layers=[1]):
            model(tokens)
            if backend == "hooked":
                model(cache["blocks.1.hook_resid_pre"][:1], start_at_layer=1)
            else:
                model(cache["hook_embed"][:1])
    assert [capture.length for capture in captures] == [*LENGTHS, 40]
    assert captures[-1].tokens is None


OWN, SHARED = (63, False), (0, True)  # a token of its own, and one that also begins or ends texts


@pytest.mark.parametrize(
    ("rows", "pad", "expected"),
    [
        ([[5, 6, 63, 63], [5] * 4], OWN, slice(0, 2)),
        ([[63, 63, 5, 6], [5] * 4], OWN, slice(2, 4)),
        ([[5, 63, 6], [5] * 3], OWN, slice(0, 3)),
        ([[5, 6, 63]], OWN, slice(0, 2)),
        ([[5, 6, 0], [5] * 3], NO_PADDING, slice(0, 3)),
        ([[5, 6, 0]], SHARED, slice(0, 3)),  # by itself a prompt is padded to nothing
        ([[0]], SHARED, slice(0, 1)),
        ([[0, 5, 6], [0, 7, 6]], SHARED, slice(0, 3)),  # padding leaves the longest text as it is
        ([[5, 6, 0], [7, 6, 0]], SHARED, slice(0, 3)),
        ([[0, 5, 0], [0, 7, 0]], SHARED, slice(0, 3)),
    ],
)
def test_the_text_is_found_by_the_padding_token(rows, pad, expected):
    assert texts_of(rows, pad)[0] == expected


@pytest.mark.parametrize(
    ("rows", "pad", "message"),
    [
        ([[5, 6, 0], [5] * 3], SHARED, "prompt 0 of 2: 1 tokens at its end are 0"),
        ([[0, 5, 6], [7, 5, 6]], SHARED, "1 tokens at its start are 0"),
        ([[0, 0, 5, 6], [0, 5, 5, 5]], SHARED, "1 tokens at its start are 0"),
        ([[5, 6, 0], [7, 0, 0]], SHARED, "prompt 1 of 2: 1 tokens at its end are 0"),
        ([[0, 0, 5, 6], [5] * 4], SHARED, "2 tokens at its start are 0"),
        ([[5, 63, 6, 63], [5] * 4], OWN, "also stands inside it"),
        ([[63, 63], [5, 5]], OWN, "nothing but the padding token 63"),
        ([[5], []], (61, False), "prompt 1 has no tokens"),
        ([[]], (None, False), "prompt 0 has no tokens"),
    ],
)
def test_padding_that_cannot_be_told_is_refused(rows, pad, message):
    with pytest.raises(InputError, match=message):
        texts_of(rows, pad)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": 1}, "it needs input_ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, r"attention_mask \[1\]: the input_ids are \[2\]"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "tokens between others are masked"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[0, 0, 0]]}, "all its tokens are masked"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(llama, given, message):
    with pytest.raises(InputError, match=message):
        to_prompts(llama, given)


def test_padding_is_cut_beside_other_hooks(padding_model):
    model, (tokens, mask) = padding_model("llama"), padded("left")
    seen = []
    hooks = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: seen.append(1))]
    captures = captures_of(model, tokens, hooks=hooks, attention_mask=mask)
    assert seen
    assert_as_alone(model, captures)
