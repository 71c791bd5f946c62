"""The cloze made from a text, and its scores on the bundled model."""

import re
from itertools import islice

import numpy as np
import pytest
import torch

from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.order.cloze import ClozeItem, EncodedItem, cloze_items, encode, encoded_items, score_items

EVERYWHERE = {"layers": None, "heads": None}
HOW = {"reach": "uniform", "window": 8, "seed": 0, "where": EVERYWHERE}


@pytest.fixture(scope="session")
def items(mini, alice):
    return [encode(session_of(mini), item) for item in islice(cloze_items(alice, words=20), 2)]


def test_items_are_the_same_every_time(alice):
    items = list(islice(cloze_items(alice), 5))
    assert items == list(islice(cloze_items(alice), 5))
    assert items != list(islice(cloze_items(alice, seed=1), 5))
    for item in items:
        assert len(set(item.choices)) == 4
        assert {*item.choices} <= {re.sub("[^a-z]", "", word.lower()) for word in item.context.split()}
        assert f"{item.context} " in " ".join(alice.split())
    assert list(cloze_items("too short a text")) == []


def test_as_many_items_as_the_text_has_and_the_context_holds(mini, alice, monkeypatch):
    assert len(encoded_items(session_of(mini), alice, 3)) == 3
    assert encoded_items(session_of(mini), alice, 0) == []
    assert encoded_items(session_of(mini), "too short a text", 3) == []
    lengths = [len(item.longest) for item in encoded_items(session_of(mini), alice, 10)]
    monkeypatch.setattr(mini.cfg, "n_ctx", sorted(lengths)[4])
    fitting = encoded_items(session_of(mini), alice, 3)
    assert [len(item.longest) for item in fitting] == [n for n in lengths if n <= mini.cfg.n_ctx][:3]


def test_token_ids_are_read_back_as_text(mini, alice):
    ids = to_prompts(mini, alice, length=256, n_prompts=4)
    from_ids = encoded_items(session_of(mini), torch.stack(ids), 2)
    assert len(from_ids) == 2
    masked = {"input_ids": torch.stack(ids), "attention_mask": torch.ones(4, 256)}
    assert [item.gold for one in (masked, ids) for item in encoded_items(session_of(mini), one, 2)] == 2 * [
        item.gold for item in from_ids
    ]
    text = "\n".join(mini.tokenizer.decode(row, skip_special_tokens=True) for row in ids)
    assert torch.equal(from_ids[0].context, encoded_items(session_of(mini), text, 1)[0].context)


def log_p_of(model, item):
    """ln p of every token of each choice, a pass a choice."""
    rows = [torch.cat([item.context, choice]) for choice in item.choices]
    return [-token_losses(model, row[None])[0, len(item.context) - 1 :] for row in rows]


def score_one(model, item, condition, ratio):
    return {name: values[0] for name, values in score_items(session_of(model), [item], condition, ratio, **HOW).items()}


@pytest.mark.parametrize("condition", ["tokens", "position_part"])
def test_items_are_scored_alike_together_and_alone_each_with_a_seed_of_its_own(mini, items, condition):
    together = score_items(session_of(mini), items, condition, 0.5, **HOW)
    for number, item in enumerate(items):
        alone = score_items(session_of(mini), [item], condition, 0.5, **HOW | {"seed": HOW["seed"] + number})
        for name, values in together.items():
            assert values[number] == pytest.approx(alone[name][0], abs=1e-5)


def test_scores_are_those_of_the_right_and_of_the_likeliest_choice(mini, items):
    for item in [
        *items,
        encode(session_of(mini), ClozeItem("Alice was beginning to get very tired of", ("sitting",), 0)),
    ]:
        found, log_p = score_one(mini, item, "tokens", 0.0), log_p_of(mini, item)
        assert found["cloze_log_likelihood"] == pytest.approx(float(log_p[item.gold].mean()), abs=1e-6)
        assert found["cloze_accuracy"] == (np.argmax([float(one.sum()) for one in log_p]) == item.gold)


@pytest.mark.parametrize(("condition", "n_rows"), [("tokens", 1), ("jitter", 1), ("position_part", 3)])
def test_choices_are_read_off_rows_that_begin_with_them(mini, condition, n_rows, passes):
    choices = tuple(map(torch.tensor, ([5], [7], [9, 3], [9, 4, 6], [9, 11])))
    item = EncodedItem(torch.arange(20, 40), choices, 3)
    assert item.rows("tokens") == {(9, 4): [3, 2, 4, 0, 1]}
    assert item.rows("position_part") == {(9, 4): [3], (9,): [2, 4], (): [0, 1]}
    assert EncodedItem(item.context, (*choices, torch.tensor([8, 1])), 3).rows("words").keys() == {(9, 4), (8,)}
    found = score_one(mini, item, condition, 0.0)
    assert sum(passes) == n_rows
    log_p = log_p_of(mini, item)
    assert found["cloze_log_likelihood"] == pytest.approx(float(log_p[3].mean()), abs=1e-5)
    assert found["cloze_accuracy"] == (np.argmax([float(one.sum()) for one in log_p]) == 3)


def test_with_nothing_moved_all_conditions_agree_and_order_lost_changes_scores(mini, items):
    def log_p(condition, ratio):
        return np.mean(score_items(session_of(mini), items, condition, ratio, **HOW)["cloze_log_likelihood"])

    assert log_p("tokens", 0.0) == pytest.approx(log_p("positions", 0.0), abs=1e-4)
    for condition in ("tokens", "positions"):
        assert abs(log_p(condition, 0.5) - log_p(condition, 0.0)) > 1e-3


@pytest.mark.parametrize("condition", ["tokens", "jitter", "position_part"])
def test_a_choice_is_scored_alike_alone_and_among_others(mini, alice, condition):
    context = to_prompts(mini, alice, length=24, n_prompts=1)[0]
    choices = tuple(map(torch.tensor, ([7], [8, 9, 10], [11])))
    for gold in (0, 1):
        together, without_the_last = (
            score_one(mini, EncodedItem(context, choices[:n], gold), condition, 0.5)["cloze_log_likelihood"]
            for n in (3, 2)
        )
        assert together == pytest.approx(without_the_last, abs=1e-5)
