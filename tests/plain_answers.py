"""What transformers answers to requests of the harness, without TransformerLens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

PAIRS = [
    ("Once upon a time there was a little girl who lived in", " a house near the wood."),
    ("Once upon a time there was a little girl who lived in", " the"),
    ("Once upon a time there was a little girl who lived in", " a"),
    ("She looked at him, and he looked at  ", "her"),  # spaces that belong to the continuation
    ("The sun", " was"),
    ("", "The sun was very hot."),
    ("", "He"),
    ("   ", "and so on"),
    ("I do not", " know"),
    ("<s>I do not", " know"),
    ("One\ntwo\nthree", "\nfour"),
    ("The rabbit ran and ran until it came to the", " river, and then it stopped."),
]
STOP = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
TEXT = "The rabbit sat down. " * 12


def plain_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def encoded(tokenizer, context, continuation):
    """Token ids of a request, and where its continuation starts."""
    text, context = context + continuation, context.rstrip(" ")
    if not context:
        return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids], 1
    special = not context.startswith("<s>")
    whole, start = (tokenizer(part, add_special_tokens=special).input_ids for part in (text, context))
    return whole, len(start)


def scored(model, ids, start):
    """ln p of ids[start:] and whether they are greedy, one token at a time."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    total = sum(log_p[at - 1, ids[at]].item() for at in range(start, len(ids)))
    return total, all(log_p[at - 1].argmax().item() == ids[at] for at in range(start, len(ids)))


def expected(reference, pairs):
    model, tokenizer = reference
    return [scored(model, *encoded(tokenizer, *pair)) for pair in pairs]


def greedy_text(reference, context, options):
    """The text that transformers writes, up to the first stop."""
    model, tokenizer = reference
    ids = tokenizer(context, return_tensors="pt").input_ids
    limit = options.get("max_gen_toks", options.get("max_new_tokens"))
    known = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=limit, **known)
    text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    until = options.get("until", [])
    for stop in [until] if isinstance(until, str) else until:
        text = text.split(stop)[0]
    return text


def assert_alike(answers, references):
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in references]
    assert [log_p for log_p, _ in answers] == pytest.approx([log_p for log_p, _ in references], abs=1e-4)


def silence(z, hook):
    return torch.zeros_like(z)
