"""Multiple-choice and cloze items: JSONL files as the field exports them, and a small task of our own."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tl_posgen.errors import InputError
from tl_posgen.models.tokens import read_text

CONTEXTS = ("query", "ctx", "question", "context", "prompt", "text")
CHOICES = ("choices", "endings", "options")
GOLDS = ("gold", "label", "answer", "answer_index", "answerKey")
TARGETS = ("target", "completion")


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations; `gold` is the right one. A cloze item has only the right one."""

    context: str
    choices: tuple[str, ...]
    gold: int = 0


def read_items(path: str | os.PathLike) -> list[Item]:
    """Items of a JSONL file, one object a line; empty lines are skipped.

    Multiple choice: a context (query, ctx, question, context, prompt or text), choices (choices, endings or options; a
    list of texts, or ARC's {"text": [...], "label": [...]}) and the right one (gold, label, answer or answerKey: its
    number, its letter, or its text). Cloze, as LAMBADA: {"text": ..., "target": ...}, or {"text": ...} alone, whose
    last word is the target. A lm-evaluation-harness sample ({"doc": {...}}) is read through its doc.

    Raises:
        InputError: no such file, or a line that is no such item: the message has its number and the reason.
    """
    items = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            items.append(item_of(json.loads(line)))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not items:
        raise InputError(f"{path}: no items")
    return items


def item_of(record: Any) -> Item:
    """One parsed line."""
    if not isinstance(record, Mapping):
        raise InputError(f"an object is needed, not {type(record).__name__}")
    record = record["doc"] if isinstance(record.get("doc"), Mapping) else record
    context = first_of(record, CONTEXTS)
    if not isinstance(context, str) or not context.strip():
        raise InputError(f"no context: give a text under one of {', '.join(CONTEXTS)}")
    choices = first_of(record, CHOICES)
    if choices is None:
        return cloze_of(context, first_of(record, TARGETS))
    labels = None
    if isinstance(choices, Mapping):
        choices, labels = choices.get("text"), choices.get("label")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
        raise InputError("choices must be a list of two texts at least")
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise InputError("every choice must be a text that is not empty")
    return Item(context, tuple(choices), gold_of(first_of(record, GOLDS), choices, labels))


def cloze_of(context: str, target: Any) -> Item:
    if target is None:
        context, _, target = context.rstrip().rpartition(" ")
    if not isinstance(target, str) or not target.strip() or not context.strip():
        raise InputError("no choices, and no target (or a text of two words at least) to make a cloze of")
    return Item(context, (target,))


def gold_of(gold: Any, choices: Sequence[str], labels: Any) -> int:
    """The number of the right choice, from a number, a digit, a label, a letter or the text itself."""
    if isinstance(gold, Sequence) and not isinstance(gold, str) and len(gold) == 1:
        gold = gold[0]
    if isinstance(gold, str):
        text = gold.strip()
        if isinstance(labels, Sequence) and text in labels:
            gold = list(labels).index(text)
        elif text in choices:
            gold = list(choices).index(text)
        elif text.isdecimal():
            gold = int(text)
        elif len(text) == 1 and text.isalpha():
            gold = ord(text.upper()) - ord("A")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise InputError(f"the right choice {gold!r} is none of 0 to {len(choices) - 1}; give it as {', '.join(GOLDS)}")
    return gold


def first_of(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def cloze_items(text: str, n: int = 100, *, n_choices: int = 4, words: int = 40, seed: int = 0) -> list[Item]:
    """n passages of `words` words, each to be finished with its own last word among n_choices - 1 others of the text.

    A passage ends before a word of four letters at least that occurs earlier in it, so that it can be found by
    reading; the wrong words also occur in the passage. Deterministic for a seed.

    Args:
        text: any text that the model was not trained on; `bundled_text()` is held out for the bundled model.

    Raises:
        InputError: a text with fewer than n such passages.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> items = cloze_items(bundled_text(), 3)
        >>> len(items), len(items[0].choices), items[0].choices[items[0].gold] in items[0].context
        (3, 4, True)
    """
    tokens = text.split()
    plain = [re.sub(r"[^a-z]", "", token.lower()) for token in tokens]
    rng = np.random.default_rng(seed)
    items: list[Item] = []
    for end in rng.permutation(np.arange(words, len(tokens))):
        before, answer = plain[end - words : end], plain[end]
        others = sorted({word for word in before if len(word) >= 4 and word != answer})
        if len(answer) < 4 or answer not in before or len(others) < n_choices - 1:
            continue
        choices = [answer, *rng.choice(others, n_choices - 1, replace=False).tolist()]
        order = rng.permutation(n_choices).tolist()
        context = " ".join(tokens[end - words : end])
        items.append(Item(context, tuple(str(choices[at]) for at in order), order.index(0)))
        if len(items) == n:
            return items
    raise InputError(f"the text has {len(items)} passages of {words} words for a cloze, fewer than the {n} asked for")


def as_items(items: Any) -> list[Item]:
    """Items as they are, or read from a file."""
    if isinstance(items, (str, Path)):
        return read_items(items)
    if not items or not all(isinstance(item, Item) for item in items):
        raise InputError("items: give a JSONL file, or a list of Item that is not empty")
    return list(items)
