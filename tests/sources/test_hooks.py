"""What a source writes, removed in the running model."""

import pytest
import torch

from tl_posgen.residual.reference import reference_of
from tl_posgen.sources.hooks import remove_source

TOKENS = torch.randint(2, 60, (1, 14), generator=torch.manual_seed(0))


@pytest.mark.parametrize("on", ["keys", "queries"])
def test_without_any_source_scores_are_zero_and_the_parts_are_the_whole(mini, on):
    reference = reference_of(mini, length=32, n_prompts=2, layers=[1])
    names = reference.layers[1].sources["key" if on == "keys" else "query"]
    scores = {}
    for part in ("all", "constant"):
        hooks = remove_source(mini, names, part, on, [(1, 2)], reference)
        with mini.hooks(fwd_hooks=hooks):
            _, cache = mini.run_with_cache(TOKENS)
        scores[part] = cache["blocks.1.attn.hook_attn_scores"][0, 2].tril()
    _, cache = mini.run_with_cache(TOKENS)
    plain = cache["blocks.1.attn.hook_attn_scores"][0, 2].tril()
    assert scores["all"].abs().max() < 1e-4 * plain.abs().max()
    assert (scores["constant"] - plain).abs().max() > 0.1
