"""Copies of random tokens, recall and hits, against a loop over positions."""

import torch
from drawn import normal

from tl_posgen.frequencies.numbers.copies import copied_rows, foretold, induction_hits, recall_of_copy

HALF, START = 5, 2


def test_tokens_stand_twice_behind_the_first_and_are_drawn_from_the_pool():
    rows = copied_rows(torch.arange(40, 52), torch.tensor([7, 8]), HALF, 3, seed=1)
    assert rows.shape == (3, START + 2 * HALF)
    for row in rows.tolist():
        assert row[:2] == [7, 8]
        assert row[2:7] == row[7:]
        assert len({*row[2:7]} & {*range(40, 52)}) == HALF
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_recall_and_loss_are_those_of_the_tokens_that_the_first_copy_foretells():
    tokens, logits = copied_rows(torch.arange(9), torch.tensor([0, 0]), HALF, 1, seed=0)[0], normal(12, 9)
    logits[9] = torch.nn.functional.one_hot(tokens[10], 9) * 50.0
    at = range(12)[foretold(HALF, START)]
    assert [tokens[i + 1 - HALF] for i in at] == [tokens[i + 1] for i in at]
    assert min(at) == START + HALF + 1
    assert max(at) == len(tokens) - 2
    recall, loss = recall_of_copy(logits, tokens, HALF, START)
    right = [int(logits[i].argmax()) == int(tokens[i + 1]) for i in at]
    losses = [float(torch.nn.functional.cross_entropy(logits[i], tokens[i + 1])) for i in at]
    torch.testing.assert_close(
        (recall, loss), tuple(torch.tensor([sum(one) / len(at) for one in (right, losses)]).double())
    )


def test_a_hit_is_the_largest_attention_behind_the_earlier_occurrence():
    pattern = normal(2, 12, 12).softmax(-1).tril()
    for i in range(12)[foretold(HALF, START)][:2]:
        pattern[0, i, i - HALF + 1] = 2
    expected = [
        sum(int(head[i].argmax()) == i - HALF + 1 for i in range(12)[foretold(HALF, START)]) / 3 for head in pattern
    ]
    assert induction_hits(pattern, HALF, START).tolist() == expected
    assert expected[0] >= 2 / 3
