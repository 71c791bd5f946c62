"""True and additive attention of the most and least position-driven heads."""

import json
import re
import sys

import numpy as np
import pytest
import torch

import tl_posgen
from tl_posgen.analysis import analyze
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.decomposition import AttentionExamples, attention_examples
from tl_posgen.position.decomposition.attention_examples import labels, pick_heads
from tl_posgen.position.decomposition.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.three_axis_fit import fit_three_axis


@pytest.fixture(scope="module")
def result(report):
    return report["attention_examples"]


def test_the_heads_are_those_with_the_highest_and_lowest_r_within_rows(report, result):
    ranked = report["three_axis"].dataset["r_within_rows"].to_series().sort_values(ascending=False)
    picked = list(zip(result.dataset["layer"].values, result.dataset["head"].values, strict=True))
    assert picked == [*ranked.index[:2], *ranked.index[-2:]]
    assert (
        result.dataset["why"].values.tolist()
        == ["closest to position + key"] * 2 + ["furthest from position + key"] * 2
    )
    assert result.summary["heads"] == [f"{layer}.{head}" for layer, head in picked]


def test_the_maps_are_softmax_of_the_scores_and_of_the_fit_on_the_first_prompt(mini, prompts, result):
    kept = {}
    run_capture(mini, prompts[:1], lambda one: kept.__setitem__(one.layer, one), needs=frozenset({"pattern"}))
    everything = torch.arange(64)
    for number in range(4):
        one = result.dataset.isel(example=number)
        layer, head = kept[int(one["layer"])], int(one["head"])
        np.testing.assert_allclose(one["pattern"], layer.pattern[head], atol=1e-5)
        fit = fit_three_axis(pair_moments_from_scores(layer.scores()[[head]]))
        additive = fit.fitted(everything, everything).nan_to_num(-torch.inf).softmax(-1)[0]
        np.testing.assert_allclose(one["additive_pattern"], additive, atol=1e-4)
        np.testing.assert_allclose(one["residual"], one["pattern"] - one["additive_pattern"], atol=1e-6)
        assert float(one["r_within_rows_first_prompt"]) == pytest.approx(float(fit.r_within_rows), abs=1e-5)


def test_tokens_are_those_of_the_first_prompt(mini, prompts, result):
    assert result.dataset["token"].values.tolist() == token_strings(mini, prompts[0])


def test_no_random_init_is_run_for_it(result):
    assert result.nulls == ()
    assert result.provenance["null_seeds"] == []
    assert result.provenance["prompts"] == 1


def test_only_the_chosen_heads_go_through_the_model_again(mini, prompts, monkeypatch):
    asked = []

    def spy(model, tokens, consumer, **where):
        asked.append((len(tokens), where["heads"]))
        return run_capture(model, tokens, consumer, **where)

    monkeypatch.setattr(sys.modules[AttentionExamples.__module__], "run_capture", spy)
    measures = ["three_axis", AttentionExamples(examples=1)]
    report = analyze(mini, prompts[:2], measures=measures, null_seeds=(), progress=False)
    heads = [tuple(map(int, head.split("."))) for head in report["attention_examples"].summary["heads"]]
    assert asked == [(1, heads)]


def test_asked_for_by_name_it_brings_the_fit_along(mini, prompts):
    report = analyze(mini, prompts[:1], measures=["attention_examples"], layers=[2], null_seeds=(), progress=False)
    assert list(report) == ["three_axis", "attention_examples"]
    assert set(report["attention_examples"].dataset["layer"].values) == {2}


def test_one_head_is_shown_once(report):
    one = report["three_axis"].dataset["r_within_rows"].isel(layer=[1], head=[3]).to_series()
    assert pick_heads(one, 2, ("highest", "lowest")) == [(1, 3, "highest")]


def test_heads_of_constant_scores_leave_nothing_to_show(mini):
    def still(value, hook):
        return torch.zeros_like(value)

    with mini.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_q", still) for layer in range(4)]):
        report = analyze(mini, torch.arange(12)[None], measures=["attention_examples"], null_seeds=(), progress=False)
    result = report["attention_examples"]
    assert result.dataset.sizes["example"] == 0
    assert result.kinds == []
    assert labels(result.dataset) == []
    assert "scores of every head are constant" in report["three_axis"].findings()[0]


def test_long_prompts_are_cropped_after_the_fit(mini, alice):
    options = {"length": 140, "n_prompts": 1, "layers": [1], "null_seeds": (), "progress": False}
    report = analyze(mini, alice, measures=["three_axis", AttentionExamples(examples=1)], **options)
    data = report["attention_examples"].dataset
    assert data["pattern"].shape == (2, 128, 128)
    assert len(data["token"]) == 128
    r = report["three_axis"].dataset["r_within_rows"].sel(layer=1, head=int(data["head"][0]))
    assert float(data["r_within_rows_first_prompt"][0]) == pytest.approx(float(r), abs=1e-6)


def test_the_page_of_an_example_shows_its_three_maps(result):
    page = result.show(example=2).local_src
    props = json.loads(re.findall(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S)[0])
    assert props["attentionHeadNames"] == ["true", "additive", "true - add."]
    drawn, one = np.array(props["attention"]), result.dataset.isel(example=2)
    for shown, name in zip(drawn, ("pattern", "additive_pattern", "residual"), strict=True):
        np.testing.assert_allclose(shown, one[name], atol=1e-4)


def test_the_r_of_an_example_has_another_name_than_that_over_all_prompts(report, result):
    assert result.frame().columns.tolist() == ["example", "layer", "head", "why", "r_within_rows_first_prompt"]
    layer, head = (int(result.dataset[name][0]) for name in ("layer", "head"))
    over_prompts = float(report["three_axis"].dataset["r_within_rows"].sel(layer=layer, head=head))
    assert result.frame()["r_within_rows_first_prompt"][0] != pytest.approx(over_prompts, abs=1e-4)


def test_labels_say_which_head_and_why(result):
    layer, head = result.summary["heads"][0].split(".")
    r = result.summary["r_within_rows_first_prompt"][0]
    label = f"layer {layer}, head {head}: closest to position + key (r within rows, first prompt: {r:.3f})"
    assert labels(result.dataset)[0] == label


def test_the_heat_maps_are_the_same_maps(result):
    drawn = result.plot("patterns").data
    assert len(drawn) == 12
    np.testing.assert_array_equal(drawn[4].z, result.dataset["additive_pattern"].isel(example=1))
    assert (drawn[4].zmin, drawn[4].zmax, drawn[5].zmid) == (0, 1, 0)


def test_a_word_that_is_no_option_is_refused(mini):
    with pytest.raises(tl_posgen.PosgenError, match="it has examples"):
        attention_examples(mini, "Down, down, down.", heads_each=2)
