"""Hooks that replace scores prove the model's own as they are used, not only as they are made."""

from contextlib import nullcontext

import pytest
import torch

import tl_posgen
from tl_posgen.editing import layer_edit as module
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.frequencies import PlaneCost
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of

TOKENS = torch.arange(4, 64).reshape(2, 30)
REFUSED = r"has scores that its q and k do not give: off by .*make them anew where the model has changed"


@pytest.fixture
def model(family_directory, backend):
    return load_model(family_directory("llama"), backend)


def other_frequencies(model) -> None:
    """Twice as high ones, in the tables that the model reads."""
    with torch.no_grad():
        for name, table in model.named_buffers():
            if name.endswith("inv_freq"):
                table.mul_(2)
            elif "rotary_" in name:
                table[: len(table) // 2] = table[::2].clone()


def other_scale(model) -> None:
    for block in model.blocks:
        if hasattr(block.attn, "original_component"):
            block.attn.original_component.scaling *= 2
        block.attn.attn_scale = 0.5 * getattr(block.attn, "attn_scale", 1.0)  # which divides


def same(capture):
    return capture.scores()


CASES = [(other_frequencies, same, False), (other_frequencies, RowByRow(same), True), (other_scale, same, False)]


@pytest.mark.parametrize(("change", "scores_of", "streamed"), CASES, ids=["frequencies", "streamed", "scale"])
def test_a_model_that_changed_after_its_hooks_were_made_is_refused(model, change, scores_of, streamed):
    hooks = replace_scores(model, scores_of)
    plain = model(TOKENS)
    torch.testing.assert_close(model.run_with_hooks(TOKENS, fwd_hooks=hooks), plain, rtol=1e-4, atol=1e-4)
    change(model)
    assert (model(TOKENS) - plain).abs().max() > 1e-3
    for _ in range(2):  # a refusal is no proof
        with model.hooks(fwd_hooks=hooks):
            if streamed:
                with tl_posgen.streaming(model), pytest.raises(InputError, match=REFUSED):
                    model(TOKENS)
            else:
                with pytest.raises(InputError, match=REFUSED):
                    model(TOKENS)
    if change is other_frequencies and session_of(model).backend.name == "bridge":  # the other reads its config
        tl_posgen.check(model)
        anew = model.run_with_hooks(TOKENS, fwd_hooks=replace_scores(model, scores_of))
        torch.testing.assert_close(anew, model(TOKENS), rtol=1e-4, atol=1e-4)


def test_every_pass_is_proved_for_heads_whose_scores_no_edit_makes_before(model, monkeypatch):
    proved, verify = [], module.verify_capture

    def verified(capture, *given, **options):
        proved.append(list(capture.heads))
        return verify(capture, *given, **options)

    monkeypatch.setattr(module, "verify_capture", verified)
    n = len(session_of(model).layers())
    hooks = [
        hook
        for heads, new in (([0], zeros), ([1, 2], zeros), ([2, 3], all_keys))
        for hook in replace_scores(model, new, heads=[(layer, head) for layer in range(n) for head in heads])
    ]
    with model.hooks(fwd_hooks=hooks):
        for _ in range(3):
            model(TOKENS)
    assert proved == 3 * n * (2 * [[0]] + 2 * [[1, 2]]), "both prompts; head 2 is edited before the last edit"


IS_SCORES = lambda name: name.endswith("attn_scores")  # noqa: E731


@pytest.mark.parametrize("row", [slice(None), 13, 29], ids=["all rows", "one row", "the last row"])
def test_scores_that_a_hook_before_edits_are_not_lost(model, row):
    def doubled(scores, hook):
        scores = scores.clone()
        scores[1, :, row] *= 2  # of the second prompt alone
        return scores

    hooks = replace_scores(model, zeros)
    with pytest.raises(InputError, match="hooks that change scores behind them"):
        model.run_with_hooks(TOKENS, fwd_hooks=[(IS_SCORES, doubled), *hooks])
    seen = []
    read = model.run_with_hooks(TOKENS, fwd_hooks=[(IS_SCORES, lambda x, hook: seen.append(x.shape)), *hooks])
    torch.testing.assert_close(read, model.run_with_hooks(TOKENS, fwd_hooks=hooks))
    assert seen
    edited = model.run_with_hooks(TOKENS, fwd_hooks=[(IS_SCORES, doubled)])
    for keeps in (all_keys, RowByRow(lambda capture, own: own, with_own=True)):
        both = model.run_with_hooks(TOKENS, fwd_hooks=[(IS_SCORES, doubled), *replace_scores(model, keeps)])
        torch.testing.assert_close(both, edited)


def test_positions_that_the_model_is_given_are_refused_in_any_pass(family_directory):
    model = load_model(family_directory("llama"), "bridge")
    hooks, plain = replace_scores(model, zeros), torch.arange(30).expand(2, -1)
    far = plain.clone()
    far[1, 15:] += 40  # of the second prompt alone
    with model.hooks(fwd_hooks=hooks):
        before = model(TOKENS)
        with pytest.raises(InputError, match="positions by tl_posgen"):
            model(TOKENS, position_ids=far)
        torch.testing.assert_close(model(TOKENS, position_ids=plain), before)
        torch.testing.assert_close(model(TOKENS, position_ids=plain + 7), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gapped", [[*range(10), *range(50, 70)], [*range(20), *range(10)]], ids=["gap", "packed"])
def test_positions_are_refused_within_windows_too(family_directory, gapped):
    model = load_model(family_directory("mistral"), "bridge")
    assert session_of(model).layer(0).geometry.window == 6
    for streamed in (False, True):
        hooks = hold_planes(model, "all", at=5) if streamed else replace_scores(model, zeros)
        with tl_posgen.streaming(model) if streamed else nullcontext(), model.hooks(fwd_hooks=hooks):
            model(TOKENS)
            with pytest.raises(InputError, match="positions by tl_posgen"):
                model(TOKENS, position_ids=torch.tensor(gapped).expand(2, -1))


def test_what_another_function_does_between_two_edits_or_to_queries_behind_is_not_lost(model):
    doubled = [(IS_SCORES, lambda scores, hook: scores * 2)]
    with pytest.raises(InputError, match="another function is hooked on the scores before"):
        model.run_with_hooks(
            TOKENS, fwd_hooks=[*replace_scores(model, all_keys), *doubled, *replace_scores(model, zeros)]
        )

    def patched(q, hook):
        q = q.clone()
        q[:, 5] = 0
        return q

    with pytest.raises(InputError, match="give hooks that change q or k before them"):
        model.run_with_hooks(TOKENS, fwd_hooks=[*replace_scores(model, zeros), ("blocks.0.attn.hook_q", patched)])
    model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_q", patched), *replace_scores(model, zeros)])


def test_a_measure_under_a_hook_on_scores_does_not_replace_what_it_edits(model):
    halved = [(IS_SCORES, lambda scores, hook: scores / 2)]
    with pytest.raises(InputError, match="hooks that change scores behind them"):
        PlaneCost(["drop"], ["thirds"])(model, TOKENS, fwd_hooks=halved, nulls=0, progress=False)


def zeros(capture):
    return torch.zeros_like(capture.scores())


def all_keys(capture):
    return torch.ones_like(capture.scores(), dtype=torch.bool)


def test_hooks_that_change_queries_afterwards_are_refused(model):
    turned = [("blocks.0.attn.hook_q", lambda q, hook: q.flip(1))]
    hooks = replace_scores(model, zeros)
    before = model.run_with_hooks(TOKENS, fwd_hooks=[*turned, *hooks])
    assert before.isfinite().all()
    with pytest.raises(InputError, match="give hooks that change q or k before them"):
        model.run_with_hooks(TOKENS, fwd_hooks=[*hooks, *turned])


def near_keys_of_most(capture):
    """Keys that q and k give more than the mean score of the row."""
    scores = capture.scores()
    seen = scores.isfinite()
    return scores >= scores.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)


KEEP_OLD = [near_keys_of_most, RowByRow(lambda capture, own: own + capture.scores().nan_to_num(), with_own=True)]


BY_USER = {
    "reads": lambda scores, hook: None,
    "edits": lambda scores, hook: scores * 2,
    "in place": lambda scores, hook: scores.mul_(2),
}


@torch.no_grad()
@pytest.mark.parametrize("by_user", BY_USER.values(), ids=BY_USER)
@pytest.mark.parametrize("scores_of", KEEP_OLD, ids=["booleans", "with own"])
def test_what_keeps_scores_that_another_function_made_is_proved_by_those_of_the_model(model, scores_of, by_user):
    """It takes q and k as well, which a model that changed since rotates otherwise."""
    hooks = [(IS_SCORES, by_user), *replace_scores(model, scores_of)]
    model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    points = [block.attn.hook_attn_scores for block in model.blocks]
    assert not any(point._forward_pre_hooks for point in points)
    other_frequencies(model)
    with pytest.raises(InputError, match=REFUSED):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert not any(point._forward_pre_hooks for point in points)


def test_positions_that_the_model_is_given_are_refused_behind_a_function_that_reads_scores(family_directory):
    model = load_model(family_directory("llama"), "bridge")
    far = torch.arange(30).expand(2, -1).clone()
    far[1, 15:] += 40
    hooks = [(IS_SCORES, lambda scores, hook: None), *replace_scores(model, near_keys_of_most)]
    with model.hooks(fwd_hooks=hooks):
        model(TOKENS)
        with pytest.raises(InputError, match="positions by tl_posgen"):
            model(TOKENS, position_ids=far)


def test_a_pass_that_ends_in_an_error_leaves_nothing_behind_the_next_one(model):
    """TransformerLens 4 keeps what was added during a pass that fails before it is called; the next pass removes it."""

    def fails(scores, hook):
        raise ValueError("of the user")

    points = [getattr(block.attn, f"hook_{name}") for block in model.blocks for name in ("attn_scores", "q", "k")]
    for where in (IS_SCORES, lambda name: name.endswith("hook_v")):
        with pytest.raises(ValueError, match="of the user"):
            model.run_with_hooks(
                TOKENS,
                fwd_hooks=[(IS_SCORES, lambda scores, hook: None), (where, fails), *replace_scores(model, all_keys)],
            )
        model(TOKENS)
        assert not any(point._forward_pre_hooks or point._forward_hooks for point in points)
