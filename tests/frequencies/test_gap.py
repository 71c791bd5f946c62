"""The gap on tiny models, the bundled one, and a real one."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.frequencies.gap import TASKS, Gap, next_tokens
from tl_posgen.frequencies.numbers.gap import apart, with_copy
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import Choices, session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.report.terminal import print_own
from tl_posgen.stats.intervals import mean_interval

QUIET = {"nulls": 0, "progress": False}
pytestmark = pytest.mark.longer
RULES = ("hold_planes", "quarter_turns", "hold_all", "lm_infinite", "self_extend", "interpolation", "ntk", "yarn")
N = 32
OPTIONS = {"gaps": (0, 480, 2000), "skip": 4, "needle": 4, "at": 240}


@pytest.fixture(scope="module")
def prompts(small_model, alice):
    return torch.stack(to_prompts(small_model, alice, N, 4))


@pytest.fixture(scope="module")
def result(small_model, prompts):
    return Gap(**OPTIONS, rules=RULES)(small_model, prompts, **QUIET)


def test_without_a_gap_it_is_the_plain_loss_of_the_second_half(small_model, prompts, result):
    first = int((prompts[:, 0] == small_model.tokenizer.bos_token_id).all())
    of_tasks = dict(zip(TASKS, (prompts, with_copy(prompts, first)), strict=True))
    for task, tokens in of_tasks.items():
        expected = token_losses(small_model, tokens)[:, N // 2 + 4 :].mean(-1)
        found = result.trained["loss"].sel(task=task, gap=0, condition="unchanged")
        np.testing.assert_allclose(found, expected, atol=1e-5)
        for condition in ("hold_planes", "hold_all", "lm_infinite", "self_extend"):  # which leave near pairs alone
            np.testing.assert_allclose(
                result.trained["loss"].sel(task=task, gap=0, condition=condition), found, atol=1e-5
            )
    without = torch.cat([prompts[:, :1], prompts[:, N // 2 :]], 1)
    np.testing.assert_allclose(result.trained["alone"], token_losses(small_model, without)[:, 5:].mean(-1), atol=1e-6)


def test_far_pairs_are_those_of_each_rule(result):
    """All pairs at one distance however wide the gap, where all planes are held; and no two rules the same."""
    loss = result.trained["loss"].sel(task="text")
    held = loss.sel(condition="hold_all")
    np.testing.assert_allclose(held.sel(gap=480), held.sel(gap=2000), atol=1e-5)
    for condition in ("unchanged", "hold_planes", "interpolation", "ntk", "yarn", "self_extend"):
        assert float(abs(loss.sel(condition=condition, gap=480) - loss.sel(condition=condition, gap=2000)).max()) > 1e-4
    at_last = loss.sel(gap=2000).mean("prompt").values
    assert len(set(at_last.round(7))) == len(RULES) + 1


def test_a_copy_leaves_out_the_token_that_the_user_put_in_front(small_model, alice):
    session, measure = session_of(small_model), Gap(skip=1, needle=2)
    with session.choosing(Choices(first=7)):
        rows = to_prompts(session, alice, 16, 2)
        text, copy, _ = measure.prompts(Run(measure, session, alice, rows, {}, 0)).split(2)
    assert text[:, 0].tolist() == [7, 7]
    assert torch.equal(copy[:, 9:], copy[:, 1:8])
    assert torch.equal(copy[:, 8], text[:, 8])


def test_recall_is_of_the_tokens_of_the_needle_that_were_not_given(small_model, prompts):
    loss, is_first = next_tokens(session_of(small_model), prompts, 3)
    with torch.no_grad():
        plain = small_model(prompts)
    assert torch.equal(is_first, plain[:, 3:-1].argmax(-1) == prompts[:, 4:])
    torch.testing.assert_close(loss, token_losses(small_model, prompts)[:, 3:])


def numbers_of(result, copy, text, alone=4.0, prompts=slice(None)):
    """Return the numbers of a result with other losses of the unchanged model in the place of its own."""
    data = result.trained.copy(deep=True)
    for task, loss in (("copy", copy), ("text", text)):
        data["loss"].loc[{"condition": "unchanged", "task": task}] = np.broadcast_to(loss, (3, 4))
    data["alone"][:] = alone
    return type(result.numbers)(result.measure, data.isel(prompt=prompts).expand_dims(init=["trained"]))


def bracket_of(result, own):
    row = result.measure.table(own).set_index("condition").loc["unchanged"]
    return row[["reads", "lost", "harmless", "harm"]].tolist()


def test_reading_back_and_harm_are_bracketed_by_the_gaps_that_were_tried(result):
    """The copy passes half of the loss alone, and text that loss, between the second gap and the third."""
    first, second, third = result.trained["gap"].values.tolist()
    copy, text = np.array([[1.0], [1.5], [2.5]]), np.array([[3.0], [3.5], [4.5]])
    own = numbers_of(result, copy, text)
    assert bracket_of(result, own) == [second, third, second, third]
    said = result.measure.findings(own)[0]
    assert f"read back across {second:,} tokens, and no longer across {third:,}" in said
    assert f"far text first does harm at {third:,} tokens" in said
    wide = copy + np.array([[0.0], [1.0], [0.0]]) * [-1, 0, 1, 3]  # prompts differ at the second gap: undecided there
    assert bracket_of(result, numbers_of(result, wide, text))[:2] == [first, third]
    undecided = numbers_of(result, wide[:2].repeat([1, 2], axis=0), text)
    assert bracket_of(result, undecided)[:2] == pytest.approx([first, np.nan], nan_ok=True)
    assert "beyond that undecided" in result.measure.findings(undecided)[0]
    back = numbers_of(result, copy, np.array([[3.0], [4.5], [3.0]]))  # comes back
    assert bracket_of(result, back)[2:] == [first, second]


def test_the_table_has_text_near_far_and_alone_and_the_paired_change(result):
    table = result.table().set_index("condition")
    loss, alone = result.trained["loss"].sel(task="text"), float(result.trained["alone"].mean())
    for condition, row in table.iterrows():
        near, far = (loss.sel(condition=condition, gap=gap).values for gap in (0, 2000))
        assert row[["near", "text", "alone"]].tolist() == pytest.approx([near.mean(), far.mean(), alone])
        low, high = mean_interval(far - near)
        assert row[["change", "low", "high"]].tolist() == pytest.approx([(far - near).mean(), float(low), float(high)])


def test_the_losses_of_text_stand_in_one_table_of_100_columns(result):
    text = io.StringIO()
    print_own(Console(file=text, width=100), result=result)
    lines = [line for line in text.getvalue().splitlines() if {"near", "text"} < {*line.split()}]
    assert lines[0].split()[:9] == ["condition", "near", "text", "alone", "change", "low", "high", "copy", "recall"]
    assert max(map(len, text.getvalue().splitlines())) <= 100


def test_without_copying_no_copy_is_read_and_with_few_prompts_values_decide(result):
    first, second, third = result.trained["gap"].values.tolist()
    text = np.array([[3.0], [3.5], [4.5]])
    own = numbers_of(result, 0.9 * text, text)
    assert bracket_of(result, own)[:2] == pytest.approx([np.nan, first], nan_ok=True)
    assert first == 0
    assert "unchanged: no copy is read back, not even without a gap" in result.measure.findings(own)[0]
    few = numbers_of(result, np.array([[1.0] * 4, [1.5, 1.9, 1.5, 1.5], [2.5] * 4]), text, prompts=slice(2))
    assert bracket_of(result, few)[:2] == [second, third]
    assert "By the values of 2 prompts, too few for intervals." in result.measure.findings(few)[0]


def test_one_gap_is_enough(small_model, prompts):
    found = Gap(**{**OPTIONS, "gaps": (0,)})(small_model, prompts, **QUIET)
    assert len(found.table()) == len(found.trained["condition"])
    assert found.findings()[0].startswith("Gaps of up to 0 tokens. ")
    found = Gap(**{**OPTIONS, "gaps": (9,)})(small_model, prompts, **{**QUIET, "nulls": 1})
    assert found.findings()[-1].startswith("A copy across a gap of 9 tokens costs")


def test_gaps_reach_as_far_as_the_table_of_learned_positions(family_model):
    tokens = torch.randint(2, 60, (4, N), generator=torch.Generator().manual_seed(0))
    gpt2 = family_model("gpt2")
    small = {"skip": 4, "needle": 4, "rules": ("interpolation",)}
    with pytest.raises(InputError, match="table of 128 learned positions; give gaps of 96 at most"):
        Gap(**small, gaps=(0, 97))(gpt2, tokens, **QUIET)
    found = Gap(skip=4, needle=4)(gpt2, tokens, **QUIET)
    assert found.trained["condition"].values.tolist() == ["unchanged"]
    assert found.trained["gap"].values.tolist() == [0, 12, 24, 48, 72, 96]
    assert found.findings()


def test_what_it_cannot_measure_is_refused(small_model, prompts, family_model):
    with pytest.raises(InputError, match="prompts of 32 tokens; give length=34 at least"):
        Gap()(small_model, prompts, **QUIET)
    with pytest.raises(InputError, match="a gap of 1152921504606846976 is too wide for exact angles"):
        Gap(**{**OPTIONS, "gaps": (0, 2**60)})(small_model, prompts, **QUIET)
    with pytest.raises(InputError, match="frequencies are fixed below"):
        Gap(**OPTIONS)(family_model("llama_dynamic", "bridge"), prompts % 60, **QUIET)
    assert apart(4, 0).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_held_planes_keep_the_bundled_model_from_harm(mini, alice):
    """Methods page: plane 9 alone fails beyond the context."""
    found = Gap(gaps=(0, 768), planes=[9], rules=("quarter_turns",))(mini, alice, length=256, n_prompts=4, **QUIET)
    loss = found.trained["loss"].sel(task="text").mean("prompt")
    alone = float(found.trained["alone"].mean())
    assert float(loss.sel(condition="unchanged", gap=768)) > alone + 1
    assert float(loss.sel(condition="quarter_turns", gap=768)) < alone + 0.2


def test_the_figure_has_text_without_anything_before_the_gap(mini, alice):
    result = Gap(gaps=(0, 64, 256), at=32)(mini, alice, length=64, n_prompts=4, nulls=0, progress=False)
    (curve,) = (trace for trace in result.plot().data if trace.name == "nothing before the gap")
    alone = result.numbers("alone")
    np.testing.assert_allclose(curve.y, alone.value)
    np.testing.assert_allclose(curve.y + curve.error_y.array, alone.high)
