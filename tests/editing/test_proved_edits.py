"""Hooks that replace scores prove the model's own as they are used, not only as they are made."""

import pytest
import torch

import tl_posgen
from tl_posgen.editing import layer_edit as module
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError
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


def test_each_use_is_proved_once_for_heads_whose_scores_no_other_hook_edits_before(model, monkeypatch):
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
    for uses in (1, 2):
        with model.hooks(fwd_hooks=hooks):
            for _ in range(3):
                model(TOKENS)
        assert proved == uses * n * [[0], [1, 2]]
    proved.clear()
    with model.hooks(fwd_hooks=[(lambda name: name.endswith("attn_scores"), lambda x, hook: 2 * x), *hooks]):
        model(TOKENS)
    assert proved == []


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
