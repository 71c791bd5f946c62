"""Massive coordinates, and vectors with one coordinate moved, against the definitions coordinate by coordinate."""

import torch
from drawn import normal

from tl_posgen.frequencies.numbers.coordinates import (
    another_coordinate,
    largest_coordinate,
    massive_coordinates,
    with_coordinate_at,
)


def test_massive_coordinates_are_above_five_times_the_mean_of_their_head():
    square = normal(3, 64).square()
    square[0, 7] = 1e4
    square[1, 3] = (5.5 * square[1].sqrt().mean() / (1 - 5.5 / 64)) ** 2  # 5.5 times the mean, nearly
    size = square.sqrt()
    expected = [[bool(one > 5 * head.mean()) for one in head] for head in size]
    assert massive_coordinates(square).tolist() == expected
    assert massive_coordinates(square).sum(-1).tolist() == [1, 1, 0]


def test_one_coordinate_moves_and_the_others_stay():
    x = normal(3, 7, 6)
    x[0, :, 4] *= 9
    largest = [int(head.square().sum(0).argmax()) for head in x]
    assert largest_coordinate(x).tolist() == largest
    for seed in range(4):
        assert another_coordinate(x, seed).tolist() == another_coordinate(x, seed).tolist()
        assert all(a != b for a, b in zip(another_coordinate(x, seed).tolist(), largest, strict=True))
    for value, expected in (("mean", x.mean(1)), ("zero", torch.zeros(3, 6).double())):
        moved = with_coordinate_at(x, largest_coordinate(x), value)
        for head, at in enumerate(largest):
            rest = [d for d in range(6) if d != at]
            torch.testing.assert_close(moved[head][:, at], expected[head, at].expand(7))
            torch.testing.assert_close(moved[head][:, rest], x[head][:, rest])
