"""Replacement of scores: no change with the model's own scores, and changes only in the chosen heads and layers."""

from contextlib import nullcontext
from functools import partial

import pandas as pd
import pytest
import torch
from families import family_cases, save_family
from interventions import TOKENS, N, largest, logits, scores_under

from tl_posgen import load_model, streaming
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow, at_positions
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.position.substitution.hooks import query_profile, substitute

POSITIONLESS = ("gpt2", "opt", "gpt_neo")


def stretched(capture):
    """Return the scores with all distances doubled."""
    return at_positions(capture, 2 * capture.positions, 2 * capture.positions)


def zeros(capture):
    return torch.zeros_like(capture.scores())


@pytest.mark.parametrize(("name", "backend"), family_cases("llama", "bloom", "gemma2", "neox", "opt", "gptj"))
def test_at_the_true_positions_nothing_changes_and_at_others_it_does(family_model, name, backend):
    model = family_model(name, backend)
    plain = logits(model)
    at_rest = logits(model, replace_scores(model, lambda one: at_positions(one, one.positions, one.positions)))
    assert largest(at_rest - plain) < 1e-5 * max(1, plain.abs().max())
    if name in POSITIONLESS:
        with pytest.raises(UnsupportedModelError, match=r"layer 0: .*residual stream"):
            replace_scores(model, stretched, needs_positions=True)
    else:
        assert largest(logits(model, replace_scores(model, stretched, needs_positions=True)) - plain) > 1e-3


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_function_that_gives_no_number_is_named_in_the_last_layer_too(llama, layer, value):
    def broken(capture):
        return capture.scores().index_fill(1, torch.tensor([4]), value)

    for scores_of in (broken, RowByRow(broken), partial(broken)):
        message = rf"L{layer}H2: broken gives the new score {value} of query 4 and key 0; let it give finite numbers"
        with pytest.raises(InputError, match=message):
            logits(llama, replace_scores(llama, scores_of, heads=(layer, 2)))


def test_only_the_chosen_heads_of_the_chosen_layers_change(llama):
    untouched, edited = scores_under(llama, replace_scores(llama, zeros, heads=(1, 2)))
    below = torch.ones(N, N).tril().bool()
    assert largest((untouched.attn_scores - untouched.scores())[:, below]) < 1e-4
    assert largest(edited.attn_scores[2][below]) == 0
    others = [0, 1, 3]
    assert largest((edited.attn_scores - edited.scores())[others][:, below]) < 1e-4
    assert (edited.attn_scores[:, ~below] == -torch.inf).all()


def test_heads_may_differ_from_layer_to_layer(llama):
    pairs = [(1, 2), (0, 3), (1, 0)]
    hooks = replace_scores(llama, zeros, heads=pd.DataFrame(pairs, columns=["layer", "head"]))
    below = torch.ones(N, N).tril().bool()
    edited = [
        (c.layer, h) for c in scores_under(llama, hooks) for h in range(4) if largest(c.attn_scores[h][below]) == 0
    ]
    assert edited == sorted(pairs)
    apart = [hook for layer, head in pairs for hook in replace_scores(llama, zeros, heads=(layer, head))]
    assert torch.equal(logits(llama, hooks), logits(llama, apart))


INNER = [(layer, head) for layer in (0, 1) for head in (1, 2)]


def test_booleans_hide_keys_of_the_scores_that_are_there(llama):
    def even(capture):
        return (capture.positions % 2 == 0).expand(len(capture.heads), N, -1)

    def even_scores(capture):
        return capture.scores().masked_fill(~even(capture), -torch.inf)

    by_scores, by_keys = (logits(llama, replace_scores(llama, hidden, heads=INNER)) for hidden in (even_scores, even))
    torch.testing.assert_close(by_keys, by_scores)
    assert largest(by_keys - logits(llama)) > 1e-3
    doubled, hidden = (replace_scores(llama, one, heads=(0, 1)) for one in (stretched, even))
    both = replace_scores(llama, lambda of: stretched(of).masked_fill(~even(of), -torch.inf), heads=(0, 1))
    torch.testing.assert_close(logits(llama, [*doubled, *hidden]), logits(llama, both))


@pytest.mark.parametrize("streamed", [False, True])
def test_new_scores_of_a_head_are_not_undone_by_others_of_the_same_head(llama, streamed):
    first, second = (
        replace_scores(llama, RowByRow(new), heads=heads)
        for new, heads in ((stretched, (0, 1)), (zeros, [(0, 1), (1, 0)]))
    )
    with streaming(llama) if streamed else nullcontext():
        for hooks in ([*first, *second], [*second, *first]):
            with pytest.raises(InputError, match=r"L0H1: replace_scores\(.*\) makes new scores, and replace_scores"):
                logits(llama, hooks)
        apart = [*first, *replace_scores(llama, RowByRow(zeros), heads=(0, 2))]
        changes = [logits(llama, hooks) - logits(llama) for hooks in (first, second, apart)]
        assert min(map(largest, changes)) > 1e-3
        assert largest(changes[2] - changes[0]) > 1e-3
        lowered = replace_scores(llama, RowByRow(lambda capture, own: own - 1, with_own=True))  # no other attention
        torch.testing.assert_close(logits(llama, [*first, *lowered]), logits(llama, first), atol=1e-5, rtol=1e-5)
        keys = replace_scores(llama, RowByRow(lambda capture: capture.scores() > -torch.inf))
        torch.testing.assert_close(logits(llama, [*keys, *first]), logits(llama, first), atol=1e-5, rtol=1e-5)


def test_hooks_that_are_added_twice_are_refused(llama):
    hooks = replace_scores(llama, stretched)
    with pytest.raises(InputError, match="layer 0: these hooks were added twice"):
        logits(llama, [*hooks, *hooks])
    assert logits(llama, hooks).isfinite().all()


def test_tokens_at_other_positions_do_not_undo_hooks_around_them(llama):
    hooks = replace_scores(llama, RowByRow(stretched))
    undone = pytest.raises(InputError, match=r"makes new scores, and .* after it would undo them")
    with llama.hooks(fwd_hooks=hooks), tokens_at(llama, 2 * torch.arange(N)), undone:
        llama(TOKENS)
    with tokens_at(llama, 2 * torch.arange(N)):
        assert logits(llama, hooks).isfinite().all()


def test_every_prompt_of_a_batch_is_edited_by_its_own_scores(llama):
    hooks = replace_scores(llama, stretched)
    alone = torch.cat([logits(llama, hooks, row[None]) for row in TOKENS])
    torch.testing.assert_close(logits(llama, hooks), alone, atol=1e-5, rtol=1e-5)


def test_scores_of_a_wrong_shape_are_refused(llama):
    with pytest.raises(InputError, match=r"layer 0.*\[4, 24, 24\]"):
        logits(llama, replace_scores(llama, lambda capture: capture.scores()[:1]))


def test_a_half_precision_model_keeps_its_dtype(tmp_path):
    model = load_model(save_family("llama", tmp_path), dtype=torch.bfloat16)
    assert logits(model, replace_scores(model, stretched)).dtype == torch.bfloat16


def test_what_gives_no_scores_is_named_by_its_type(llama):
    """And not by its numbers."""
    with pytest.raises(InputError, match=r"substitute: query_profile gives distances, .* by_split\(query_profile\)$"):
        substitute(llama, query_profile)
    with pytest.raises(InputError, match=r"^layer 0: the new scores are a dict, and a tensor \[4, 4, 4\] \[head,"):
        llama.run_with_hooks(torch.arange(5, 9)[None], fwd_hooks=replace_scores(llama, lambda capture: {}))
