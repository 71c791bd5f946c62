"""Scores of chosen heads beside their position part and their content part."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from declared import assert_declared

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.position import SplitExamples, split_examples
from tl_posgen.position.substitution.split_examples import MAPS, labels
from tl_posgen.summary import jsonable

CUT = {"length": 80, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def result(mini, alice):
    return split_examples(mini, alice, null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="module")
def loaded(result, tmp_path_factory):
    return load(result.save(tmp_path_factory.mktemp("saved") / "r.nc"))["split_examples"]


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
    for model, data in ((mini, result.dataset), (random, result.null)):
        for number in range(2):
            one = data.isel(example=number)
            rows, r = maps_by_hand(model, tokens, int(one["layer"]), int(one["head"]))
            reach = float(rows["scores"].nan_to_num().abs().max())
            for name in MAPS:
                np.testing.assert_allclose(one[name], rows[name], atol=1e-4 * reach, err_msg=name)
            for name, expected in zip(("position_r", "content_r", "split_r"), r, strict=True):
                assert float(one[name]) == pytest.approx(expected, abs=1e-3)


def test_the_heads_are_those_of_most_and_least_position_and_the_null_has_the_same(mini, alice, result):
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    every = {(layer, head): maps_by_hand(mini, tokens, layer, head)[1][0] for layer in range(4) for head in range(4)}
    ranked = sorted(every, key=every.get)
    for data in (result.dataset, *result.nulls):
        heads = list(zip(data["layer"].values, data["head"].values, data["why"].values, strict=True))
        assert heads == [(*ranked[-1], "most position"), (*ranked[0], "least position")]
    assert [null.attrs["model"] for null in result.nulls] == ["random init (seed 0)", "random init (seed 1)"]


def test_only_heads_that_are_asked_for_are_shown(mini, alice):
    few = split_examples(mini, alice, heads=[(0, 1), (2, 3), (2, 0)], examples=3, null_seeds=(), **CUT)
    assert set(few.summary["heads"]) <= {"0.1", "2.3", "2.0"}
    one = split_examples(mini, alice, heads=[(1, 2)], null_seeds=(), **CUT)
    assert (one.summary["heads"], one.summary["why"]) == (["1.2"], ["most position"])


def test_both_backends_give_the_same_maps(alice, result):
    bridge = split_examples(load_model("mini", backend="bridge"), alice, null_seeds=(), **CUT)
    assert bridge.summary["heads"] == result.summary["heads"]
    for name in MAPS:
        np.testing.assert_allclose(bridge.dataset[name], result.dataset[name], atol=1e-3)


def test_every_variable_is_declared_and_comes_back_from_disk(result, loaded):
    assert_declared(result)
    assert set(result.measure.variables) == set(result.dataset.data_vars)
    assert loaded.dataset.identical(result.dataset)
    assert loaded.kinds == ["maps"]
    assert loaded.plot("maps").to_json() == result.plot("maps").to_json()
    assert loaded.findings() == result.findings()


def test_the_figure_shows_the_maps_and_the_null_below_on_one_scale_a_row(loaded):
    figure = loaded.plot()
    assert len(figure.data) == 2 * 2 * 3
    rows = [(data, number) for number in range(2) for data in (loaded.dataset, loaded.null)]
    titles = iter(annotation.text for annotation in figure.layout.annotations)
    for row, (data, number) in enumerate(rows):
        one = data.isel(example=number)
        reach = np.nanquantile(np.abs(one["scores"]), 0.98)
        for column, name in enumerate(MAPS):
            trace = figure.data[3 * row + column]
            np.testing.assert_array_equal(trace.z, one[name])
            assert (trace.zmin, trace.zmax) == pytest.approx((-reach, reach))
        assert next(titles) == f"L{int(one['layer'])}H{int(one['head'])}, {one['why'].item()} · {data.attrs['model']}"
        assert next(titles) == f"position, r {float(one['position_r']):.2f}"
        assert next(titles) == f"content, r {float(one['content_r']):.2f} (both {float(one['split_r']):.2f})"


def test_the_page_of_a_head_shows_softmax_of_each_map(mini, alice, result):
    page = result.show(example=1).local_src
    props = json.loads(re.findall(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S)[0])
    assert props["attentionHeadNames"] == ["true", "position", "content"]
    tokens = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    assert result.dataset["token"].values.tolist() == token_strings(mini, tokens[:64])
    kept, one = [], result.dataset.isel(example=1)
    run_capture(mini, tokens[None, :64], kept.append, frozenset({"pattern"}), layers=[int(one["layer"])])
    pattern = kept[0].pattern[int(one["head"]), 1:, 1:]
    true, position, content = np.array(props["attention"])
    np.testing.assert_allclose(true[1:, 1:], pattern / pattern.sum(-1, keepdim=True), atol=2e-4)
    assert not true[0].any()
    assert not true[:, 0].any()
    for part, name in ((position, "position"), (content, "content")):
        expected = torch.from_numpy(one[name].values[1:, 1:]).nan_to_num(-torch.inf).softmax(-1)
        np.testing.assert_allclose(part[1:, 1:], expected, atol=1e-4)


def test_the_sentences_and_labels_say_the_summary(result):
    assert json.loads(json.dumps(jsonable(result.summary), allow_nan=False)) == result.summary
    said, alone = result.findings(), replace(result, nulls=()).findings()
    assert len(said) == len(alone) == len(labels(result.dataset)) == 2
    for place, sentence in enumerate(said):
        own = float(result.dataset["position_r"][place])
        null = np.mean([float(one["position_r"][place]) for one in result.nulls])
        assert f"position part at {own:.2f} (random init {null:.2f})" in sentence
        assert f"position part at {own:.2f} (no null measured)" in alone[place]
        assert f"position {own:.2f}," in labels(result.dataset)[place]


def test_learned_positions_have_no_position_part_to_show(family_model):
    tokens = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    found = split_examples(family_model("gpt2"), tokens, null_seeds=(0,), progress=False)
    assert found.dataset.sizes["example"] == found.null.sizes["example"] == 0
    assert (found.kinds, found.findings()) == ([], [found.caveat])
    assert_declared(found)


def test_of_alibi_the_position_part_is_the_slope(family_model):
    tokens = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    found = split_examples(family_model("bloom"), tokens, null_seeds=(), progress=False)
    rows = found.dataset["position"].isel(example=0).values
    steps = np.diff(rows[2:, 1:], axis=1)
    assert np.nanmin(steps) > 0
    np.testing.assert_allclose(steps[~np.isnan(steps)], np.nanmean(steps), rtol=1e-4)
    assert found.findings()[-1] == found.caveat


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "two"])
def test_a_number_of_examples_that_cannot_be_is_refused(wrong, unchecked):
    with pytest.raises(InputError, match="examples"):
        SplitExamples(examples=wrong)
