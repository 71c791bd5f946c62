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

CONTEXTS = ("query", "ctx", "question", "question_stem", "goal", "context", "prompt", "text")
CHOICES = ("choices", "endings", "options")
SOLUTIONS = ("sol1", "sol2")
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

    Multiple choice: a context (query, ctx, question, question_stem, goal, context, prompt or text), choices (choices,
    endings or options: a list of texts, a list of {"text", "label"}, or {"text": [...], "label": [...]}; or sol1 and
    sol2) and the right one (gold, label, answer, answer_index or answerKey: its number from 0, its letter, its label,
    or its text). So HellaSwag, PIQA, ARC, OpenBookQA, CommonsenseQA and MMLU are read as they are distributed.
    Cloze, as LAMBADA: {"text": ..., "target": ...}, or {"text": ...} alone, whose last word is the target.
    Samples that lm-evaluation-harness logged (samples_*.jsonl) are read through their `arguments`: the very texts that
    were scored there, few-shot examples included; a sample without them through its `doc`.

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
    if isinstance(record.get("doc"), Mapping):
        if record.get("arguments"):
            return logged_item(record)
        record = record["doc"]
    if isinstance(record.get("question"), Mapping):  # ARC and CommonsenseQA as first released
        record = {**record, **record["question"], "question": record["question"].get("stem")}
    context = first_of(record, CONTEXTS)
    if not isinstance(context, str) or not context.strip():
        raise InputError(f"no context: give a text under one of {', '.join(CONTEXTS)}")
    choices, labels = choices_of(record)
    if choices is None:
        return cloze_of(context, first_of(record, TARGETS))
    return Item(context, choices, gold_of(first_of(record, GOLDS), choices, labels))


def choices_of(record: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, Any]:
    """The choices, None for a cloze, and their labels where they have some."""
    choices: Any = first_of(record, CHOICES)
    labels: Any = None
    if choices is None and record.get(SOLUTIONS[0]) is not None:
        choices = [record.get(name) for name in SOLUTIONS]
    if choices is None:
        return None, None
    if isinstance(choices, Mapping):
        choices, labels = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and choices and all(isinstance(choice, Mapping) for choice in choices):
        labels = [choice.get("label") for choice in choices]
        choices = [choice.get("text") for choice in choices]
    if not isinstance(choices, list) or len(choices) < 2:
        raise InputError("choices must be a list of two texts at least")
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise InputError("every choice must be a text that is not empty")
    return tuple(choices), labels


def logged_item(sample: Mapping[str, Any]) -> Item:
    """A sample as lm-evaluation-harness logs it: arguments [[context, continuation], ...], or the same as objects
    {"gen_args_0": {"arg_0": context, "arg_1": continuation}, ...}, and the target as a number or text."""
    arguments = sample["arguments"]
    rows = list(arguments.values()) if isinstance(arguments, Mapping) else arguments
    rows = [list(row.values()) if isinstance(row, Mapping) else row for row in rows]
    if not all(isinstance(row, list) and len(row) == 2 and all(isinstance(x, str) for x in row) for row in rows):
        raise InputError("not a log-likelihood task: its arguments are no pairs of context and continuation")
    contexts, choices = zip(*rows, strict=True)
    if len(set(contexts)) > 1:
        raise InputError("its choices have different contexts (as in WinoGrande); one context per item is needed")
    if not contexts[0].strip() or not all(choice.strip() for choice in choices):
        raise InputError("its context or a continuation is empty")
    if len(choices) == 1:
        return Item(contexts[0], choices)
    bare = [choice.strip() for choice in choices]
    target = sample.get("target")
    if str(target).isdecimal() and int(str(target)) < len(bare):
        return Item(contexts[0], choices, int(str(target)))  # the harness logs numbers as text
    return Item(contexts[0], choices, gold_of(target, bare, None))


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
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
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
        raise InputError(
            f"the right choice {gold!r} is none of 0 to {len(choices) - 1}; give it as one of {', '.join(GOLDS)}"
        )
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
