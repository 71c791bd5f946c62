"""Task files of the field's usual forms, and scores on the bundled model."""

import json

import pytest
import torch

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.downstream import downstream, encode
from tl_posgen.experiments.items import Item, cloze_items, item_of, read_items
from tl_posgen.experiments.loss import token_losses
from tl_posgen.models.tokens import bundled_text


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    items = cloze_items(bundled_text(), 2, words=20)
    return downstream(mini, items, ratios=(0, 0.5), arms=("tokens", "positions"), progress=False)


@pytest.mark.parametrize(
    ("record", "item"),
    [
        ({"query": "A b", "choices": ["c", "d"], "gold": 1}, Item("A b", ("c", "d"), 1)),
        ({"ctx": "A b", "endings": ["c", "d"], "label": "1"}, Item("A b", ("c", "d"), 1)),
        ({"question": "A b", "choices": ["c", "d"], "answer": "B"}, Item("A b", ("c", "d"), 1)),
        ({"question": "A b", "choices": ["c", "d"], "answer": "d"}, Item("A b", ("c", "d"), 1)),
        (
            {"question": "A b", "choices": {"text": ["c", "d"], "label": ["1", "2"]}, "answerKey": "2"},
            Item("A b", ("c", "d"), 1),
        ),
        ({"text": "A b", "target": "c"}, Item("A b", ("c",))),
        ({"text": "A b c"}, Item("A b", ("c",))),
        ({"doc_id": 0, "doc": {"query": "A b", "choices": ["c", "d"], "gold": 0}}, Item("A b", ("c", "d"), 0)),
    ],
)
def test_the_usual_forms_are_read(record, item):
    assert item_of(record) == item


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "an object"),
        ('{"choices": ["a", "b"], "gold": 0}', "no context"),
        ('{"query": "x", "choices": ["a"], "gold": 0}', "two texts"),
        ('{"query": "x", "choices": ["a", ""], "gold": 0}', "not empty"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 2}', "0 to 1"),
        ('{"query": "x", "choices": ["a", "b"]}', "None"),
        ('{"text": "one"}', "two words"),
    ],
)
def test_a_malformed_line_is_named_with_its_reason(tmp_path, line, reason):
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"query": "x", "choices": ["a", "b"], "gold": 0}) + "\n\n" + line + "\n")
    with pytest.raises(InputError, match=f"line 3: .*{reason}"):
        read_items(path)


def test_the_built_in_task_is_the_same_every_time():
    items = cloze_items(bundled_text(), 5)
    assert items == cloze_items(bundled_text(), 5)
    assert items != cloze_items(bundled_text(), 5, seed=1)
    for item in items:
        assert len(set(item.choices)) == 4
    with pytest.raises(InputError, match="passages"):
        cloze_items("too short a text", 5)


def test_the_score_of_a_choice_is_its_loss(mini):
    item = Item("Alice was beginning to get very tired of sitting by her", ("sister",))
    found = downstream(mini, [item], ratios=(0,), arms=("tokens",), null_seed=None, progress=False).dataset
    context, (choice,) = encode(mini, item, 0)
    losses = token_losses(mini, torch.cat([context, choice])[None])[0, -len(choice) :]
    assert found.log_likelihood.item() == pytest.approx(-float(losses.mean()), abs=1e-6)


def test_with_nothing_moved_all_arms_agree(result):
    ordered = result.dataset.log_likelihood.sel(ratio=0)
    assert float(ordered[0]) == pytest.approx(float(ordered[1]), abs=1e-4)


def test_order_lost_changes_scores_but_never_the_choices(result):
    assert abs(result.dataset.log_likelihood.diff("ratio")).min() > 1e-3
    assert float(result.dataset.chance) == 0.25


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("accuracy", "accuracy_per_byte", "log_likelihood"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert {"arm", "ratio", "accuracy"} <= set(result.frame().columns)
    assert load(result.save(tmp_path / "r.nc"))["downstream"].dataset.equals(result.dataset)


def test_bad_input_is_refused(mini):
    item = Item("A b", ("c", "d"), 0)
    for items, wrong in (([], {}), ([item], {"ratios": (2,)}), ([item], {"arms": ("x",)}), (["A b"], {})):
        with pytest.raises(InputError):
            downstream(mini, items, **wrong)
    with pytest.raises(InputError, match="item 1"):
        downstream(mini, [Item("word " * 2000, ("c", "d"), 0)])
