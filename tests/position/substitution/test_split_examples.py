"""Scores of chosen heads beside their position part and their content part."""

import json
import re

import numpy as np
import pytest
import torch

from tl_posgen import load_model
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.position import SplitExamples
from tl_posgen.position.substitution.split_examples import MAPS, PARTS

CUT = {"length": 80, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def result(mini, alice):
    return SplitExamples()(mini, alice, null_seeds=(0, 1), **CUT)


def maps_by_hand(model, tokens, layer, head):
    """W, f and g within rows in float64, from captured q and k plane by plane; and r of W with f, g and f + g."""
    kept = []
    run_capture(model, tokens[None, :64], kept.append, layers=[layer])
    q, k = kept[0].q[head].double(), kept[0].k[head].double()
    rope, scale = kept[0].geometry.rope, kept[0].geometry.scale
    turns = [torch.polar(torch.ones_like(rope.inv_freq), rope.inv_freq.double() * d) for d in range(64)]
    assert rope.pairing == "half"

    def turned(x, turn):
        real, imag = x.chunk(2, -1)
        z = torch.complex(real, imag) * turn
        return torch.cat([z.real, z.imag], -1)

    kbar = k[1:].mean(0)
    sides = (q, k, kbar.expand(64, -1))
    all_q, all_k, all_kbar = (torch.stack([turned(*one) for one in zip(x, turns, strict=True)]) for x in sides)
    whole = {
        "scores": scale * all_q @ all_k.T,
        "position": scale * all_q @ all_kbar.T,
        "content": scale * turned(q, sum(turns) / 64) @ (k - kbar).T,
    }
    counted = torch.ones(64, 64).tril().bool()
    counted[:, 0] = False
    rows = {name: one.masked_fill(~counted, torch.nan) for name, one in whole.items()}
    rows = {name: one - one.nanmean(1, keepdim=True) for name, one in rows.items()}
    flat = {name: one[counted] for name, one in rows.items()}
    parts = (flat["position"], flat["content"], flat["position"] + flat["content"])
    return rows, [float(torch.corrcoef(torch.stack([flat["scores"], part]))[0, 1]) for part in parts]


def test_the_maps_are_f_and_g_of_captured_q_and_k(mini, alice, result):
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    random = random_like(mini, 0)
    for model, data in ((mini, result.own), (random, result.null)):
        for number in range(2):
            one = data.isel(example=number)
            rows, r = maps_by_hand(model, tokens, int(one["layer"]), int(one["head"]))
            reach = float(rows["scores"].nan_to_num().abs().max())
            for name in MAPS:
                np.testing.assert_allclose(one[name], rows[name], atol=1e-4 * reach, err_msg=name)
            assert one["part"].values.tolist() == list(PARTS)
            assert one["r"].values.tolist() == pytest.approx(r, abs=1e-3)


def test_the_heads_are_those_of_most_and_least_position_and_the_null_has_the_same(mini, alice, result):
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    every = {(layer, head): maps_by_hand(mini, tokens, layer, head)[1][0] for layer in range(4) for head in range(4)}
    ranked = sorted(every, key=every.get)
    for data in (result.own, *result.nulls):
        heads = list(zip(data["layer"].values, data["head"].values, data["why"].values, strict=True))
        assert heads == [(*ranked[-1], "most position"), (*ranked[0], "least position")]
    assert [null.attrs["model"] for null in result.nulls] == ["random init (seed 0)", "random init (seed 1)"]


def shown_heads(result):
    return list(zip(*(result.own[name].values.tolist() for name in ("layer", "head", "why")), strict=True))


def test_only_heads_that_are_asked_for_are_shown(mini, alice):
    few = SplitExamples(examples=3)(mini, alice, heads=[(0, 1), (2, 3), (2, 0)], null_seeds=(), **CUT)
    assert {one[:2] for one in shown_heads(few)} <= {(0, 1), (2, 3), (2, 0)}
    one = SplitExamples()(mini, alice, heads=[(1, 2)], null_seeds=(), **CUT)
    assert shown_heads(one) == [(1, 2, "most position")]


def test_both_backends_give_the_same_maps(alice, result):
    bridge = SplitExamples()(load_model("mini", backend="bridge"), alice, null_seeds=(), **CUT)
    assert shown_heads(bridge) == shown_heads(result)
    for name in MAPS:
        np.testing.assert_allclose(bridge.own[name], result.own[name], atol=1e-3)


def test_the_figure_shows_the_maps_and_the_null_below_on_one_scale_a_row(result):
    figure = result.plot()
    assert len(figure.data) == 2 * 2 * 3
    rows = [(data, number) for number in range(2) for data in (result.own, result.null)]
    titles = iter(annotation.text for annotation in figure.layout.annotations)
    for row, (data, number) in enumerate(rows):
        one = data.isel(example=number)
        reach = np.nanquantile(np.abs(one["scores"]), 0.98)
        for column, name in enumerate(MAPS):
            trace = figure.data[3 * row + column]
            np.testing.assert_array_equal(trace.z, one[name])
            assert (trace.zmin, trace.zmax) == pytest.approx((-reach, reach))
        assert next(titles) == f"L{int(one['layer'])}H{int(one['head'])}, {one['why'].item()} · {data.attrs['model']}"
        position, content, both = one["r"].values
        assert next(titles) == f"position, r {position:.2f}"
        assert next(titles) == f"content, r {content:.2f} (both {both:.2f})"


def test_the_page_of_a_head_shows_softmax_of_each_map(mini, alice, result):
    page = result.show(example=1).local_src
    props = json.loads(re.findall(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S)[0])
    assert props["attentionHeadNames"] == ["true", "position", "content"]
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    assert result.own["token"].values.tolist() == token_strings(mini, tokens[:64])
    kept, one = [], result.own.isel(example=1)
    run_capture(mini, tokens[None, :64], kept.append, frozenset({"pattern"}), layers=[int(one["layer"])])
    pattern = kept[0].pattern[int(one["head"]), 1:, 1:]
    true, position, content = np.array(props["attention"])
    np.testing.assert_allclose(true[1:, 1:], pattern / pattern.sum(-1, keepdim=True), atol=2e-4)
    assert not true[0].any()
    assert not true[:, 0].any()
    for part, name in ((position, "position"), (content, "content")):
        expected = torch.from_numpy(one[name].values[1:, 1:]).nan_to_num(-torch.inf).softmax(-1)
        np.testing.assert_allclose(part[1:, 1:], expected, atol=1e-4)


def test_the_sentences_and_labels_say_the_correlations(result):
    lines, labels = result.findings(), result.token_labels()
    assert len(lines) == len(labels) == 2
    for place, sentence in enumerate(lines):
        own, *nulls = (float(one["r"][place, 0]) for one in (result.own, *result.nulls))
        assert f"position part at {own:.2f} (random init {np.mean(nulls):.2f})" in sentence
        assert f"position {own:.2f}," in labels[place]


def test_learned_positions_have_no_position_part_to_show(family_model):
    tokens = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    found = SplitExamples()(family_model("gpt2"), tokens, null_seeds=(0,), progress=False)
    assert found.own.sizes["example"] == found.null.sizes["example"] == 0
    assert (found.kinds, found.findings()) == ([], [found.caveat])


def test_of_alibi_the_position_part_is_the_slope(family_model):
    tokens = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    found = SplitExamples()(family_model("bloom"), tokens, null_seeds=(), progress=False)
    rows = found.own["position"].isel(example=0).values
    steps = np.diff(rows[2:, 1:], axis=1)
    assert np.nanmin(steps) > 0
    np.testing.assert_allclose(steps[~np.isnan(steps)], np.nanmean(steps), rtol=1e-4)
    assert found.findings()[-1] == found.caveat
