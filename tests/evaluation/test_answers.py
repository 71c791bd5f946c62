"""The LM's answers are those of plain Hugging Face and of the harness' own HFLM; hooks at work."""

import json
import random
import shutil

import pytest
import torch
from plain_answers import PAIRS, STOP, TEXT, assert_alike, encoded, expected, greedy_text, plain_model, scored, silence

from tl_posgen import load_model
from tl_posgen.errors import InputError
from tl_posgen.evaluation import LensLM
from tl_posgen.hooks.replace_scores import replace_scores

BOTH = [(name, backend) for name in ("mini", "stories260K") for backend in ("hooked", "bridge")]


@pytest.mark.parametrize(("name", "backend"), BOTH)
def test_log_likelihoods_are_those_of_plain_hugging_face_in_the_order_of_the_requests(ask, load, plain, name, backend):
    pairs = 2 * PAIRS
    random.Random(0).shuffle(pairs)
    answers = LensLM(load(name, backend), batch_size=3, progress=False).loglikelihood(ask("loglikelihood", *pairs))
    assert_alike(answers, expected(plain(name), pairs))
    assert len({round(log_p, 3) for log_p, _ in answers}) > 8  # a constant would be in order too


def test_a_pass_holds_whole_sequences_of_one_length_the_longest_first(ask, lens):
    seen = []
    lm = lens(lambda tokens: seen.append(tokens.tolist()) or [], batch_size=2)
    lm.loglikelihood(ask("loglikelihood", *PAIRS))
    assert all(len({len(row) for row in batch}) == 1 for batch in seen)
    lengths = [len(batch[0]) for batch in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert max(len(batch) for batch in seen) == 2
    inputs = {tuple(encoded(lm.tokenizer, *pair)[0][:-1]) for pair in PAIRS}
    assert sorted(tuple(row) for batch in seen for row in batch) == sorted(inputs)
    assert len(inputs) < len(PAIRS)  # " the" and " a" after one context share a pass


def silenced(model):
    """Hooks that take away what attention adds in layer 1; and the same done to a model of transformers."""
    return [("blocks.1.attn.hook_z", silence)], lambda hf: hf.model.layers[1].self_attn.o_proj.weight


def uniform(model):
    """Hooks that set the scores of layer 0 to 0, in an intervention that refuses padding; and the same."""
    hooks = replace_scores(model, lambda capture: torch.zeros_like(capture.scores()), layers=[0])
    return hooks, lambda hf: hf.model.layers[0].self_attn.q_proj.weight


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "backend", "intervention"),
    [
        ("mini", "hooked", uniform),
        ("mini", "bridge", silenced),
        ("stories260K", "hooked", silenced),
        ("stories260K", "bridge", uniform),
    ],
)
def test_hooks_are_at_work_in_every_pass_and_gone_after_it(ask, load, lens, directory, name, backend, intervention):
    model, tokens = load(name, backend), torch.arange(8)[None]
    hooks, weights_of = intervention(model)
    before, lm, pairs = model(tokens), lens(hooks, model=model, batch_size=4), PAIRS[:8]
    changed = plain_model(directory(name)), lm.tokenizer
    weights_of(changed[0]).data.zero_()
    answers = lm.loglikelihood(ask("loglikelihood", *pairs))
    assert_alike(answers, expected(changed, pairs))
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer(TEXT).input_ids]  # the harness puts a BOS before that of the text
    rolling = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT,)))
    assert rolling == pytest.approx([scored(changed[0], ids, 1)[0]])
    requests = [(context, STOP) for context, _ in PAIRS[:3]]
    assert lm.generate_until(ask("generate_until", *requests)) == [greedy_text(changed, *one) for one in requests]
    without = lens(model=model).loglikelihood(ask("loglikelihood", *pairs))
    assert max(abs(one - other) for (one, _), (other, _) in zip(answers, without, strict=True)) > 0.1
    assert torch.equal(model(tokens), before)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_hooks_are_gone_after_an_error_in_them(ask, load, lens):
    def fail(value, hook):
        raise ValueError("from the hook")

    with pytest.raises(ValueError, match="from the hook"):
        lens([("blocks.0.attn.hook_z", fail)]).loglikelihood(ask("loglikelihood", PAIRS[0]))
    assert not any(point.fwd_hooks for point in load("mini").hook_dict.values())


def test_hooks_may_depend_on_the_tokens(ask, load, lens):
    """A hook made for one length, where prompts have several: the last token sees all keys alike."""

    def hooks_of(tokens):
        def uniform_for_the_last(pattern, hook):
            pattern[:, :, -1] = 1 / tokens.shape[1]
            return pattern

        return [("blocks.0.attn.hook_pattern", uniform_for_the_last)]

    lm = lens(hooks_of, batch_size=1)
    answers = lm.loglikelihood(ask("loglikelihood", *PAIRS))
    for pair, answer in zip(PAIRS, answers, strict=True):
        ids, start = encoded(lm.tokenizer, *pair)
        tokens = torch.tensor([ids[:-1]])
        with torch.no_grad():
            log_p = load("mini").run_with_hooks(tokens, fwd_hooks=hooks_of(tokens))[0].double().log_softmax(-1)
        assert answer[0] == pytest.approx(sum(log_p[at - 1, ids[at]].item() for at in range(start, len(ids))), abs=1e-4)
    assert lm.get_model_info()["fwd_hooks"] == [hooks_of.__qualname__]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini", "stories260K"])
def test_greedy_texts_are_those_of_hugging_face_up_to_their_stops(ask, load, lens, plain, name):
    requests = [
        ("Once upon a time", {"max_gen_toks": 16}),
        ("He was one of", STOP),
        ("She looked at him, and", {"until": " the", "max_gen_toks": 16}),
        ("The sun", {"until": [], "max_new_tokens": 5}),
        ("", STOP),
    ]
    texts = lens(model=load(name), batch_size=3).generate_until(ask("generate_until", *requests))
    assert texts == [greedy_text(plain(name), *request) for request in requests]
    assert len({len(text) for text in texts}) > 2


@pytest.mark.parametrize("end", ["</s>", "<unk>"])
def test_a_text_ends_at_eos_and_at_a_stop_that_is_a_special_token(ask, load, lens, monkeypatch, end):
    lm = lens(model=load("stories260K"))
    start, end = len(lm.tok_encode("Once")), lm.tokenizer.convert_tokens_to_ids(end)
    written = lm.tok_encode("Once there was a cat")[start:]
    passes = []

    def scripted(rows):
        """The context is followed by " there was a cat", then by the end, and by that for ever."""
        passes.append(len(rows))
        following = (written + 9 * [end])[len(rows[0]) - start]
        return torch.nn.functional.one_hot(torch.tensor(len(rows) * [[following]]), lm.model.cfg.d_vocab).float()

    monkeypatch.setattr(lm, "logits", scripted)
    whole, short = {"until": ["<unk>"], "max_gen_toks": len(written) + 5}, {"max_gen_toks": 2}
    texts = lm.generate_until(ask("generate_until", ("Once", whole), ("Once", short), ("Once", whole)))
    assert texts == [lm.tokenizer.decode(ids) for ids in (written, written[:2], written)]
    assert passes == [3, 3] + [2] * (len(written) - 1)  # who has finished leaves the batch


def test_leading_bos_is_no_padding_where_the_tokenizer_pads_on_the_left(ask, load, lens, plain, monkeypatch):
    model = load("mini", "hooked")
    monkeypatch.setattr(model.tokenizer, "padding_side", "left")
    assert model.tokenizer.pad_token_id == model.tokenizer.bos_token_id
    hf, tokenizer = plain("mini")
    [answer] = lens(model=model).loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT,)))
    assert answer == pytest.approx(scored(hf, [tokenizer.bos_token_id, *tokenizer(TEXT).input_ids], 1)[0], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True, "temperature": 1.0}, "do_sample"),
        ({"temperature": 0.7}, "temperature"),
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"max_gen_toks": 512}, "max_gen_toks 512"),
    ],
)
def test_other_than_greedy_decoding_is_refused_before_anything_runs(ask, lens, options, words):
    seen = []
    lm = lens(lambda tokens: seen.append(tokens) or [])
    with pytest.raises(InputError, match=words):
        lm.generate_until(ask("generate_until", ("He", STOP), ("She", {"until": ["."], **options})))
    assert not seen


def test_what_greedy_decoding_does_not_read_is_no_obstacle(ask, lens):
    options = {"temperature": 0.0, "top_p": 0.95, "num_beams": 1, **STOP}
    ours, same = lens().generate_until(ask("generate_until", ("He was", options), ("He was", STOP)))
    assert ours == same != ""


@pytest.mark.parametrize(
    ("continuation", "match"),
    [
        ("", "has 0 tokens of its own"),
        (" not there, and not here", r"' not there, and not here' of 'He was' has \d+ tokens.* 1 to 4"),
    ],
)
def test_a_continuation_that_cannot_be_scored_is_named(ask, lens, continuation, match):
    with pytest.raises(InputError, match=match):
        lens(max_length=4).loglikelihood(ask("loglikelihood", ("He was", continuation)))


def test_texts_begin_with_bos_as_the_tokenizer_does_it(ask, load, lens, plain, hflm, directory, tmp_path):
    model, reference = load("stories260K"), hflm("stories260K")
    lm = lens(model=model)
    for text in ("He was", "<s>He was", "", " He "):
        assert lm.tok_encode(text) == reference.tok_encode(text)
        assert lm.tok_encode(text)[0] == lm.tokenizer.bos_token_id
    without = shutil.copytree(directory("stories260K"), tmp_path / "without")
    written = json.loads((without / "tokenizer.json").read_text())
    (without / "tokenizer.json").write_text(json.dumps({**written, "post_processor": None}))
    bare = lens(model=load_model(without, "bridge"))
    assert bare.tok_encode("He was") == lm.tok_encode("He was")[1:] == bare.tokenizer("He was").input_ids
    pairs = [("", "He was"), (" ", "He was")]  # nothing to condition on but the token that the harness puts there
    assert_alike(bare.loglikelihood(ask("loglikelihood", *pairs)), expected(plain("stories260K"), pairs))
    assert bare.generate_until(ask("generate_until", ("", STOP))) == [greedy_text(plain("stories260K"), "", STOP)]
