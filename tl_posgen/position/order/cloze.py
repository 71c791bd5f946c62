"""Cloze from a text: passages to be continued by their own last word, each choice scored by its probability."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.loss import run_prompts
from tl_posgen.models.session import Session
from tl_posgen.models.streaming.stream import prompts_at_once
from tl_posgen.models.tokens import given_prompts, start_of_texts
from tl_posgen.position.order.hooks import disturb, draw
from tl_posgen.position.order.numbers import Disturbance

ITEMS_OF_INITS = 200  # at most, as they are at chance
N_CHOICES = 4
_LEAST_LETTERS = 4
_TRIED = 4  # passages tried per wanted item, as some are too long for the model


@dataclass(frozen=True)
class ClozeItem:
    """Context and its possible continuations; `gold` is the index of the right one."""

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class EncodedItem:
    """Token ids of the context, with BOS if the model has one, and of every choice."""

    context: Int[Tensor, " pos"]
    choices: tuple[Int[Tensor, " _"], ...]
    gold: int

    def rows(self, condition: str) -> dict[tuple[int, ...], list[int]]:
        """Return the choices by the tokens that follow the context in the row that scores them: all but their last.

        A row also scores the choices that it begins with; not under "position_part", where the mean key is that of the
        whole row.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for number in sorted(range(len(self.choices)), key=lambda index: -len(self.choices[index])):
            follows = tuple(self.choices[number][:-1].tolist())
            longer = () if condition == "position_part" else (row for row in rows if row[: len(follows)] == follows)
            rows.setdefault(next(iter(longer), follows), []).append(number)
        return rows

    @property
    def longest(self) -> Int[Tensor, " pos"]:
        return torch.cat([self.context, max(self.choices, key=len)])


def cloze_items(text: str, *, words: int = 40, seed: int = 0) -> Iterator[ClozeItem]:
    """Yield passages of `words` words, each with its own last word and three others as choices, in a seeded order.

    The last word has at least four letters and occurs earlier in the passage, so that it can be found by reading; the
    wrong words also occur in the passage.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> item = next(cloze_items(bundled_text()))
        >>> len(item.choices), item.choices[item.gold] in item.context.lower()
        (4, True)
    """
    tokens = text.split()
    rng = np.random.default_rng(seed)
    for end in rng.permutation(np.arange(words, len(tokens))):
        *before, answer = (re.sub(r"[^a-z]", "", token.lower()) for token in tokens[end - words : end + 1])
        wrong_words = sorted({word for word in before if len(word) >= _LEAST_LETTERS and word != answer})
        if len(answer) < _LEAST_LETTERS or answer not in before or len(wrong_words) < N_CHOICES - 1:
            continue
        choices = [answer, *rng.choice(wrong_words, N_CHOICES - 1, replace=False).tolist()]
        order = rng.permutation(N_CHOICES).tolist()
        context = " ".join(tokens[end - words : end])
        yield ClozeItem(context, tuple(str(choices[at]) for at in order), order.index(0))


def encoded_items(session: Session, prompts: Any, n: int, seed: int = 0) -> list[EncodedItem]:
    """Return the first n items of the prompts' text that fit the model's context; fewer if the text has fewer, none of
    token ids where the model has no tokenizer."""
    if not n:
        return []
    text = prompts if isinstance(prompts, str) else ""
    if isinstance(prompts, Sequence) and not text and all(isinstance(prompt, str) for prompt in prompts):
        text = "\n".join(prompts)
    elif not text and session.model.tokenizer is not None:
        rows = given_prompts(session.model.tokenizer, prompts)
        text = "\n".join(session.model.tokenizer.batch_decode(rows, skip_special_tokens=True))
    encoded = (encode(session, item) for item in islice(cloze_items(text, seed=seed), _TRIED * n))
    return list(islice((item for item in encoded if len(item.longest) <= session.model.cfg.n_ctx), n))


def fewer_of_inits(n: int) -> str:
    """Say, of n items, that random inits get fewer; "" where they get all."""
    return f" (random init {ITEMS_OF_INITS})" if n > ITEMS_OF_INITS else ""


def encode(session: Session, item: ClozeItem) -> EncodedItem:
    """Tokenise context and choices separately, with a space between them."""

    def ids(text: str) -> list[int]:
        return session.model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    choices = tuple(torch.tensor(ids(f" {choice}")) for choice in item.choices)
    return EncodedItem(torch.tensor(start_of_texts(session) + ids(item.context)), choices, item.gold)


def score_items(
    session: Session,
    items: Sequence[EncodedItem],
    condition: str,
    ratio: int | float,
    *,
    seed: int,
    reach: str,
    window: int,
    where: Mapping[str, Any],
) -> dict[str, list[float]]:
    """Return of every item whether the right choice is the likeliest (1 or 0), and its ln p per token, after the
    disturbed context.

    Choices are never disturbed, and those of an item share one draw. Rows of one length share forward passes.

    Args:
        seed: of the first item; each further one has the next.
        where: layers and heads that hooks disturb.
    """
    log_p: list[dict[int, Float[Tensor, " _"]]] = [{} for _ in items]
    by_length: dict[int, list[tuple[int, list[int], Tensor, Disturbance]]] = {}  # item, its choices, tokens, draw
    for number, item in enumerate(items):
        n, total = len(item.context), len(item.longest)
        share = ratio if condition == "jitter" else ratio * n / total  # swaps move a share of all tokens
        options: dict[str, Any] = {"seed": seed + number, "window": window, "protected": [0, *range(n, total)]}
        drawn = draw(session, item.longest, condition, reach, share, **options)
        for follows, choices in item.rows(condition).items():
            row = torch.cat([item.context, torch.tensor(follows, dtype=torch.int64)])
            by_length.setdefault(len(row), []).append((number, choices, row, drawn))
    batches = []
    for length, entries in by_length.items():
        at_once = prompts_at_once(session, length)
        batches += [entries[at : at + at_once] for at in range(0, len(entries), at_once)]
    for entries in batches:
        rows, draws = torch.stack([row for *_, row, _ in entries]), [drawn for *_, drawn in entries]
        rows, hooks = disturb(session, rows, condition, draws, **where)
        first = min(len(items[number].context) for number, *_ in entries) - 1  # of the logits that are needed
        [logits] = run_prompts(session, rows, lambda logits, _: logits, hooks, first)
        for (number, choices, *_), of_row in zip(entries, logits, strict=True):
            begin = len(items[number].context) - 1 - first
            for choice in choices:
                choice_tokens = items[number].choices[choice]
                log_probs = double(of_row[begin : begin + len(choice_tokens)]).log_softmax(-1).cpu()
                log_p[number][choice] = log_probs.gather(-1, choice_tokens[:, None])[:, 0]
    sums = [[float(of_item[choice].sum()) for choice in sorted(of_item)] for of_item in log_p]
    return {
        "cloze_accuracy": [float(np.argmax(scores) == item.gold) for scores, item in zip(sums, items, strict=True)],
        "cloze_log_likelihood": [float(of_item[item.gold].mean()) for of_item, item in zip(log_p, items, strict=True)],
    }
