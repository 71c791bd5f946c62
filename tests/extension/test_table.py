"""Every rule of context extension is one row, which both comparisons run."""

from typing import get_args

import numpy as np
import pytest

from tl_posgen.extension.table import RULES, Extended, RuleName
from tl_posgen.frequencies import Gap
from tl_posgen.position.length import LengthExtrapolation

QUICK = {"null_seeds": (), "progress": False}


def test_every_name_has_a_row():
    assert list(get_args(RuleName)) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_run_by_the_gap_and_beyond_the_training_length(mini_bridge, alice, rule):
    cut = {"length": 32, "n_prompts": 2, **QUICK}
    gap = Gap(gaps=(0, 500), rules=[rule], at=64, skip=2, needle=4)(mini_bridge, alice, **cut)
    long = LengthExtrapolation(inside=16, times=2, conditions=[rule])(mini_bridge, alice, n_prompts=2, **QUICK)
    for result, dim in ((gap, "gap"), (long, "segment")):
        loss = result.own["loss" if dim == "gap" else "segment_loss"].mean("prompt")
        assert loss["condition"].values.tolist()[1] == rule
        assert np.isfinite(loss.values).all()
    of_text = gap.own["loss"].sel(task="text", gap=500, condition=rule)
    assert not np.allclose(of_text, gap.own["loss"].sel(task="text", gap=500, condition="unchanged"))


def test_far_tokens_share_positions_so_that_the_context_reaches_far_enough():
    for trained, factor in ((256, 2), (8192, 4), (64, 1)):
        of = Extended(trained, factor)
        assert (trained - of.near) * of.group + of.near >= factor * trained
        assert of.group == 1 or (trained - of.near) * (of.group - 1) + of.near < factor * trained
