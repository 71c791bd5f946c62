"""What a list of hooks prints: the call that made it, and where its hooks are."""

import pandas as pd
import pytest
import torch

from tl_posgen import hooks
from tl_posgen.hooks import ablate_heads, at_dummy_distance, by_split, replace_scores, substitute, triangle

POINTS = "attn.hook_q, attn.hook_k, attn.hook_attn_scores"


@pytest.mark.parametrize(
    ("made", "printed"),
    [
        (lambda m: ablate_heads(m, "L3H1"), "ablate_heads('L3H1'): 1 hook at attn.hook_z of layer 3"),
        (lambda m: ablate_heads(m, [(0, 1), (2, 3)], "zero"),
         "ablate_heads([(0, 1), (2, 3)], 'zero'): 2 hooks at attn.hook_z of layers 0, 2"),
        (lambda m: at_dummy_distance(m, 3), f"at_dummy_distance(3): 12 hooks at {POINTS} of layers 0 to 3"),
        (lambda m: substitute(m, by_split(triangle(8)), heads=pd.DataFrame({"layer": [1], "head": [2]})),
         "substitute(by_split(distances=p(d) of d = 0 to 7, mean_key='prompt', part='both', query='own'), "
         f"heads=[L1H2]): 4 hooks at hook_embed; {POINTS} of layer 1"),
        (lambda m: ablate_heads(m, "0.1") + at_dummy_distance(m, beyond=4, layers=[0]) + [("hook_embed", print)],
         "ablate_heads('0.1') + at_dummy_distance(beyond=4, layers=[0]) + hooks[1]: 5 hooks at "
         f"attn.hook_z, {POINTS} of layer 0; hook_embed"),
    ],
)  # fmt: skip
def test_hooks_print_the_call_that_made_them_and_their_places(mini, made, printed):
    assert repr(made(mini)) == printed


def test_printed_hooks_are_the_list_that_transformerlens_takes(mini):
    tokens = torch.arange(12)[None]
    made = ablate_heads(mini, "L0H1")
    made += ablate_heads(mini, "L3H1")
    found = mini.run_with_hooks(tokens, fwd_hooks=made)
    assert torch.equal(found, mini.run_with_hooks(tokens, fwd_hooks=ablate_heads(mini, ["L0H1", "L3H1"])))
    assert isinstance(made, list)


def test_every_function_of_the_namespace_that_returns_hooks_prints_them():
    made = [getattr(hooks, name) for name in hooks.__all__]
    returning = [
        one for one in made if str(getattr(one, "__annotations__", {}).get("return", "")).startswith("list[tup")
    ]
    assert len(returning) > 15
    assert all(hasattr(one, "__wrapped__") for one in returning)


def test_functions_that_hold_themselves_or_what_comes_later_are_printed_too(mini):
    def made(part):
        def scores(capture):
            return scores(capture) if part is None else later(capture)

        hooks_of_scores = replace_scores(mini, scores, heads="L0H1")
        later = None
        return hooks_of_scores

    printed = repr(made("content"))
    assert printed.startswith("replace_scores(test_functions_that_hold_themselves_or_what_comes_later_are_printed_too(")
    assert "part='content'" in printed
    assert repr(replace_scores(mini, lambda capture: capture.scores())).startswith("replace_scores(test_functions")
