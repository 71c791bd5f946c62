"""From what the user gives to the heads of each layer; and what is said of anything else."""

import numpy as np
import pandas as pd
import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.models.selection import one_head, select_heads

ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layers", "heads", "selected"),
    [
        (None, None, {0: ALL, 1: ALL}),
        ([1], None, {1: ALL}),
        (None, (1, 3), {1: [3]}),
        ({1, 0}, (np.int64(1), torch.tensor(3)), {1: [3]}),
        (range(2), ((1, 3), (0, 2)), {0: [2], 1: [3]}),
        (None, [(1, 2), (0, 3), (1, 0), (1, 2)], {0: [3], 1: [0, 2]}),
        ([1], [(1, 2)], {1: [2]}),
        ([0, 1], [[1, 2]], {1: [2]}),
        (None, ("L0H2", "L0H0"), {0: [0, 2]}),
        (None, np.array([[0, 2]]), {0: [2]}),
        (torch.tensor([1]), torch.tensor([[1, 3], [1, 2]]), {1: [2, 3]}),
        (None, pd.DataFrame({"layer": [1, 0], "head": [3, 0], "score": [0.5, 0.1]}), {0: [0], 1: [3]}),
        (np.array([1]), pd.Series(["L1H2", "L1H3"]), {1: [2, 3]}),
        (None, "1.3", {1: [3]}),
        (None, ["L1H3", "0.2", "l1h0", (0, 1)], {0: [1, 2], 1: [0, 3]}),
        ([1], " L1H3 ", {1: [3]}),
        (None, np.array(["L1H3", "1.2"]), {1: [2, 3]}),
    ],
)
def test_layers_and_heads_become_the_heads_of_each_layer(llama, unchecked, layers, heads, selected):
    found = select_heads(llama, layers, heads)
    assert found == selected
    assert list(found) == sorted(found)
    assert all(type(head) is int for of_layer in found.values() for head in of_layer)


FRAME = pd.DataFrame({"layer": [0], "head": [1]})


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [
        ([2], None, r"layer 2 does not exist: this model has layers 0 to 1"),
        ([], None, r"no layers chosen; choose from layers 0 to 1"),
        (True, None, r"layers=True: give a list of integers, such as layers=\[0, 1\]"),
        ([0.0], None, r"layer 0\.0 is float, not an integer; choose from layers 0 to 1"),
        (np.array([False, True]), None, r"layer False is bool, not an integer"),
        (None, [], r"no heads chosen; leave heads out to have all"),
        (None, 3, r'heads=3: name heads by layer and head: "L3H1", "3\.1" or \(3, 1\), or a list of these'),
        (None, [1, 3], r"heads=\[1, 3\]: 1 says no layer; name heads by layer and head"),
        ([1], np.array([1, 3]), r"heads=\[1, 3\]: 1 says no layer"),
        (None, iter(["L1H3"]), r"name heads by layer and head"),
        (None, (1,), r"head \(1,\): a pair is \(layer, head\)"),
        (None, "3.1", r"head \(3, 1\): layer 3 does not exist: this model has layers 0 to 1"),
        (None, ["1-3"], r"head '1-3': write a head as \"L3H1\" or \"3\.1\""),
        (None, ["1.3", 1], r"1 says no layer"),
        ([0], "1.3", r"head \(1, 3\) is in layer 1, which layers=\[0\] leaves out"),
        (None, {0: [1]}, r"heads=\{0: \[1\]\}: name heads"),
        (None, [(0, 4)], r"head \(0, 4\): head 4 does not exist: this model has heads 0 to 3"),
        (None, [(0, "1")], r"head \(0, '1'\): head '1' is str, not an integer"),
        (None, (0, torch.tensor(0.0)), r"head tensor\(0\.\) is Tensor, not an integer"),
        (None, pd.DataFrame({"layer": [1.5], "head": [3]}), r"layer 1\.5 is float, not an integer"),
        (None, [(0, 1, 2)], r"head \(0, 1, 2\): a pair is \(layer, head\)"),
        ([0], [(0, 1), (1, 1)], r"head \(1, 1\) is in layer 1, which layers=\[0\] leaves out; add it there"),
        (None, FRAME[["layer"]], r"needs the columns layer and head, a row a head; head missing among \[layer\]"),
    ],
)
def test_what_cannot_be_chosen_is_named_with_the_remedy(llama, unchecked, layers, heads, message):
    with pytest.raises(InputError, match=message):
        select_heads(llama, layers, heads)


@pytest.mark.parametrize(
    ("layer", "head"),
    [(1, 3), (None, "1.3"), (None, "L1H3"), (1, "1.3"), (None, (1, 3)), (None, ["1.3"]), (None, [(1, 3)]),
     (None, pd.DataFrame({"layer": [1], "head": [3], "r": [0.5]})), (np.int64(1), np.int64(3))],
)  # fmt: skip
def test_one_head_is_named_in_many_ways(llama, unchecked, layer, head):
    assert one_head(llama, layer, head) == (1, 3)


@pytest.mark.parametrize(
    ("layer", "head", "message"),
    [
        (None, None, r"head=None: give one head, layer=3, head=1 or head=\"L3H1\""),
        (1, None, r"head=None: give one head"),
        (None, 3, r"head=3: give one head, layer=3, head=1"),
        (None, ["0.1", "1.3"], r"these are 2 heads; give one"),
        (None, pd.DataFrame({"layer": [1, 0], "head": [3, 3]}), r"these are 2 heads"),
        (0, "1.3", r"head \(1, 3\) is in layer 1, which layers=\[0\] leaves out"),
        (5, 1, r"layer 5 does not exist"),
        (1, 9, r"head 9 does not exist"),
        (None, "first", r"head 'first': write a head as"),
    ],
)
def test_what_is_not_one_head_is_refused(llama, unchecked, layer, head, message):
    with pytest.raises(InputError, match=message):
        one_head(llama, layer, head)
