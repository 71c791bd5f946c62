"""Every rule of context extension is one row, which both comparisons run."""

from typing import get_args

import numpy as np
import pytest
import torch

from tl_posgen.extension.table import CONTEXT_RULES, ContextRuleName, ExtensionSettings, hooks_of
from tl_posgen.frequencies import Gap
from tl_posgen.hooks import FrequencyRule, hold_planes, with_frequencies
from tl_posgen.models.session import session_of
from tl_posgen.position.length import LengthExtrapolation

QUICK = {"nulls": 0, "progress": False}


def test_every_name_has_a_row():
    assert list(get_args(ContextRuleName)) == list(CONTEXT_RULES)


@pytest.mark.parametrize("rule", CONTEXT_RULES)
def test_a_row_is_run_by_the_gap_and_beyond_the_training_length(mini_bridge, alice, rule):
    cut = {"length": 32, "n_prompts": 2, **QUICK}
    gap = Gap(gaps=(0, 500), rules=[rule], at=64, skip=2, needle=4)(mini_bridge, alice, **cut)
    long = LengthExtrapolation(inside=16, times=2, conditions=[rule])(mini_bridge, alice, n_prompts=2, **QUICK)
    for result, dim in ((gap, "gap"), (long, "segment")):
        loss = result.trained["loss" if dim == "gap" else "segment_loss"].mean("prompt")
        assert loss["condition"].values.tolist()[1] == rule
        assert np.isfinite(loss.values).all()
    of_text = gap.trained["loss"].sel(task="text", gap=500, condition=rule)
    assert not np.allclose(of_text, gap.trained["loss"].sel(task="text", gap=500, condition="unchanged"))


def test_far_tokens_share_positions_so_that_the_context_reaches_far_enough():
    for trained, factor in ((256, 2), (8192, 4), (64, 1)):
        settings = ExtensionSettings(trained, factor)
        assert (trained - settings.near) * settings.group + settings.near >= factor * trained
        assert (
            settings.group == 1 or (trained - settings.near) * (settings.group - 1) + settings.near < factor * trained
        )


@pytest.mark.parametrize(("rule", "by_hand"), [
    ("yarn", lambda model: with_frequencies(model, FrequencyRule("yarn", 4, training_length=64))),
    ("hold_planes", lambda model: hold_planes(model, range(5, 16), at=32)),  # theta_m 64 < 2 pi from plane 5 on
])  # fmt: skip
def test_rules_are_made_for_the_context_that_they_are_given_and_not_for_the_models(mini, rule, by_hand):
    tokens = torch.arange(100)[None] + 300
    given, expected, other = (
        mini.run_with_hooks(tokens, fwd_hooks=hooks)
        for hooks in (
            hooks_of(rule, session_of(mini), ExtensionSettings(64, 4), {}),
            by_hand(mini),
            hooks_of(rule, session_of(mini), ExtensionSettings(512, 4, at=32), {}),
        )
    )
    torch.testing.assert_close(given, expected)
    assert not torch.allclose(given, other, atol=1e-3)
