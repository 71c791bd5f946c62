"""Task files of the field's usual forms, and scores on the bundled model."""

import json

import pytest
import torch

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.downstream import downstream, encode, scores_of
from tl_posgen.experiments.items import Item, cloze_items, item_of, read_items
from tl_posgen.experiments.loss import token_losses
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words import downstream as words


def logged(arguments, target):
    """A line of samples_*.jsonl, as lm-evaluation-harness writes it."""
    rows = {f"gen_args_{i}": {f"arg_{j}": text for j, text in enumerate(row)} for i, row in enumerate(arguments)}
    return {"doc_id": 0, "doc": {"any": "thing"}, "target": target, "arguments": rows, "resps": [], "acc": 1.0}


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
        ({"goal": "A b", "sol1": "c", "sol2": "d", "label": 1}, Item("A b", ("c", "d"), 1)),
        ({"question_stem": "A b", "choices": ["c", "d"], "label": 1.0}, Item("A b", ("c", "d"), 1)),
        (
            {
                "question": {"stem": "A b", "choices": [{"text": "c", "label": "A"}, {"text": "d", "label": "B"}]},
                "answerKey": "B",
            },
            Item("A b", ("c", "d"), 1),
        ),
        ({"text": "A b", "target": "c"}, Item("A b", ("c",))),
        ({"text": "A b c"}, Item("A b", ("c",))),
        ({"doc_id": 0, "doc": {"query": "A b", "choices": ["c", "d"], "gold": 0}}, Item("A b", ("c", "d"), 0)),
        (logged([["few shots A b", " c"], ["few shots A b", " d"]], "1"), Item("few shots A b", (" c", " d"), 1)),
        (logged([["A b", " 1"], ["A b", " 0"]], 0), Item("A b", (" 1", " 0"), 0)),
        (logged([["A b", " yes"], ["A b", " no"]], "no"), Item("A b", (" yes", " no"), 1)),
        (logged([["A b", " c"]], " c"), Item("A b", (" c",))),
        ({"doc": {}, "target": "1", "arguments": [["A b", " c"], ["A b", " d"]]}, Item("A b", (" c", " d"), 1)),
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
        ('{"goal": "x", "sol1": "a", "label": 0}', "not empty"),
        (json.dumps(logged([["A", " c"], ["B", " c"]], "0")), "different contexts"),
        (json.dumps(logged([["A", {"until": ["."]}]], "x")), "not a log-likelihood task"),
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


def test_an_item_beyond_the_training_context_is_named(mini):
    with pytest.raises(InputError, match=r"item 2: .* training context has 512; shorten it"):
        downstream(mini, [Item("A b", ("c", "d"), 0), Item("word " * 2000, ("c", "d"), 0)])


@pytest.mark.parametrize("arm", ["tokens", "jitter", "position_part"])
def test_a_choice_is_scored_alike_alone_and_among_others(mini, arm):
    context = to_prompts(mini, bundled_text(), length=24, n_prompts=1)[0]
    choices = [torch.tensor([7]), torch.tensor([8, 9, 10]), torch.tensor([11])]
    draw = {"seed": 0, "window": 4, "reach": "uniform"}
    together = scores_of(mini, context, choices, arm, 0.5, **draw)
    without_the_last = scores_of(mini, context, choices[:2], arm, 0.5, **draw)
    for one, other in zip(together[:2], without_the_last, strict=True):
        torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=1e-5)


def test_words_name_accuracy_chance_and_the_null(result):
    first, second = words.found(result)
    assert "chance 25%" in first
    assert "random init" in first
    assert "positions" in second


def test_the_short_table_has_the_undisturbed_row_once(result):
    assert words.table(result.dataset).arm.tolist() == ["none", "tokens", "positions"]
