"""Scores of chosen heads beside their position part and their content part."""

import numpy as np
import pytest
import torch
from rotated_heads import attention_of, captures_of

from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.position import SplitExamples
from tl_posgen.position.substitution.numbers import MAPS, split_maps
from tl_posgen.position.substitution.split_examples import PARTS
from tl_posgen.rope.rotation import rotate

pytestmark = pytest.mark.longer

CUT = {"length": 80, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def result(mini, alice):
    return SplitExamples()(mini, alice, nulls=2, **CUT)


def maps_of_captured(model, tokens, layer, head):
    """Maps of one head from captured q and k, in float64."""
    (one,) = captures_of(model, tokens[None, :64], heads=(layer, head))
    q, k, rope, scale = one.q.double(), one.k.double(), one.geometry.rope, one.geometry.scale
    turned_q, turned_k = (rotate(x, torch.arange(64), rope) for x in (q, k))
    hidden = torch.ones(64, 64).triu(1).bool()
    return split_maps((scale * turned_q @ turned_k.mT).masked_fill(hidden, -torch.inf), q, k, rope, scale)


def test_the_maps_are_f_and_g_of_captured_q_and_k(mini, alice, result):
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    for model, data in ((mini, result.trained), (random_like(mini, 0), result.null)):
        for number in range(2):
            one = data.isel(example=number)
            maps = maps_of_captured(model, tokens, int(one["layer"]), int(one["head"]))
            reach = float(maps.scores.nan_to_num().abs().max())
            for name in MAPS:
                np.testing.assert_allclose(one[name], getattr(maps, name)[0], atol=1e-4 * reach, err_msg=name)
            assert one["part"].values.tolist() == list(PARTS)
            np.testing.assert_allclose(one["r"], maps.r[:, 0], atol=1e-3)


def shown_heads(data):
    return list(zip(*(data[name].values.tolist() for name in ("layer", "head", "why")), strict=True))


def test_the_heads_are_those_of_most_and_least_position_and_the_null_has_the_same(mini, alice, result):
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    heads = [(layer, head) for layer in range(4) for head in range(4)]
    ranked = sorted(heads, key=lambda place: float(maps_of_captured(mini, tokens, *place).r[0, 0]))
    for data in (result.trained, *result.nulls):
        assert shown_heads(data) == [(*ranked[-1], "most position"), (*ranked[0], "least position")]


def test_all_heads_that_are_asked_for_are_shown_and_no_other(mini, alice):
    few = SplitExamples()(mini, alice, heads=[(0, 1), (2, 3), (2, 0)], nulls=0, **CUT)
    assert {one[:2] for one in shown_heads(few.trained)} == {(0, 1), (2, 3), (2, 0)}
    one = SplitExamples()(mini, alice, heads=[(1, 2)], nulls=0, **CUT)
    assert shown_heads(one.trained) == [(1, 2, "chosen")]


TOKENS = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(0))


def test_learned_positions_have_no_position_part_to_show(family_model):
    found = SplitExamples()(family_model("gpt2"), TOKENS, nulls=1, progress=False)
    assert found.trained.sizes["example"] == found.null.sizes["example"] == 0
    assert (found.kinds, found.findings()) == ([], [found.caveat])


def test_of_alibi_the_position_part_is_the_slope(family_model):
    found = SplitExamples()(family_model("bloom"), TOKENS, nulls=0, progress=False)
    rows = found.trained["position"].isel(example=0).values
    steps = np.diff(rows[2:, 1:], axis=1)
    assert np.nanmin(steps) > 0
    np.testing.assert_allclose(steps[~np.isnan(steps)], np.nanmean(steps), rtol=1e-4)
    assert found.findings()[-1] == found.caveat


def test_the_page_of_a_head_shows_softmax_of_each_map(mini, alice, result):
    props = attention_of(result.show(example=1).local_src)
    assert props["attentionHeadNames"] == ["true", "position", "content"]
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    assert result.trained["token"].values.tolist() == token_strings(mini, tokens[:64])
    one = result.trained.isel(example=1)
    (capture,) = captures_of(mini, tokens[None, :64], "pattern", layers=[int(one["layer"])])
    pattern = capture.pattern[int(one["head"]), 1:, 1:]
    true, position, content = np.array(props["attention"])
    np.testing.assert_allclose(true[1:, 1:], pattern / pattern.sum(-1, keepdim=True), atol=2e-4)
    assert not true[0].any()
    assert not true[:, 0].any()
    for part, name in ((position, "position"), (content, "content")):
        expected = torch.from_numpy(one[name].values[1:, 1:]).nan_to_num(-torch.inf).softmax(-1)
        np.testing.assert_allclose(part[1:, 1:], expected, atol=1e-4)
