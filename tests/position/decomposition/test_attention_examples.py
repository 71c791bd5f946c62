"""True and additive attention of the most and least position-driven heads."""

import numpy as np
import pytest
import torch
from captures import collected
from rotated_heads import attention_of, captures_of

from tl_posgen.core.engine import analyze
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.decomposition import AttentionExamples
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis

MEASURE = "attention_examples"


def test_the_heads_are_those_with_the_highest_and_lowest_r_within_rows_on_the_first_prompt(single, result):
    ranked = single["three_axis"].sel(tokens="all")["r_within_rows"].to_series().sort_values(ascending=False)
    heads = list(zip(result.trained["layer"].values, result.trained["head"].values, strict=True))
    assert heads == [*ranked.index[:2], *ranked.index[-2:]]
    assert (
        result.trained["why"].values.tolist()
        == ["closest to position + key"] * 2 + ["furthest from position + key"] * 2
    )


def test_the_maps_are_softmax_of_the_scores_and_of_the_fit_on_the_first_prompt(mini, prompts, result):
    kept = captures_of(mini, prompts[:1], "pattern")
    everything = torch.arange(64)
    for number in range(4):
        one = result.trained.isel(example=number)
        layer, head = kept[int(one["layer"])], int(one["head"])
        np.testing.assert_allclose(one["pattern"].sel(scores="true"), layer.pattern[head], atol=1e-5)
        fit = fit_three_axis(pair_moments_from_scores(layer.scores()[[head]]))
        additive = fit.fitted(everything, everything).nan_to_num(-torch.inf).softmax(-1)[0]
        np.testing.assert_allclose(one["pattern"].sel(scores="three-axis fit"), additive, atol=1e-4)
        assert float(one["r_within_rows"]) == pytest.approx(float(fit.r_within_rows), abs=1e-5)


def test_the_first_prompt_is_shown_and_no_random_init_is_run(mini, prompts, result):
    assert result.trained["token"].values.tolist() == token_strings(mini, prompts[0])
    assert result.nulls == ()
    assert result.provenance["prompts"] == len(prompts)


def test_heads_of_constant_scores_leave_nothing_to_show(mini):
    def still(value, hook):
        return torch.zeros_like(value)

    with mini.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_q", still) for layer in range(4)]):
        tokens, measures = torch.arange(12)[None], ["three_axis", "attention_examples"]
        report = analyze(mini, tokens, measures=measures, nulls=0, progress=False)
    result = report["attention_examples"]
    assert result.trained.sizes["example"] == 0
    assert result.kinds == []
    assert result.token_labels() == []
    assert "scores of every head are constant" in report["three_axis"].findings()[0]


def test_the_pass_that_all_measures_share_gives_the_examples(mini, prompts, passes):
    how: dict = {"measures": [AttentionExamples(examples=1)], "nulls": 0}
    found = analyze(mini, prompts, **how)[MEASURE]
    assert sum(passes) == len(prompts)
    assert found.trained.sizes["example"] == 2
    chosen = analyze(mini, prompts, heads=[(1, 0), (2, 3)], **how)[MEASURE]
    assert chosen.trained["why"].values.tolist() == ["chosen"] * 2


def test_heads_with_the_same_r_are_shown_like_others():
    q, k = torch.randn(2, 1, 24, 4, generator=torch.Generator().manual_seed(0)).expand(2, 20, 24, 4)
    alike = LayerCapture(LayerGeometry(0, "none", 20, 20, 4, 0.5), range(20), 0, None, q, k)
    data = collected(AttentionExamples(examples=2), alike)
    assert data["head"].values.tolist() == [0, 1, 18, 19]
    assert data["r_within_rows"].values.tolist() == [data["r_within_rows"].values[0]] * 4


def test_long_prompts_are_cropped_after_the_fit(mini, alice):
    options = {"length": 140, "n_prompts": 1, "layers": [1], "nulls": 0, "progress": False}
    report = analyze(mini, alice, measures=["three_axis", AttentionExamples(examples=1)], **options)
    data = report["attention_examples"].trained
    assert data["pattern"].shape == (2, 2, 128, 128)
    assert len(data["token"]) == 128
    r = report["three_axis"].sel(tokens="all")["r_within_rows"].sel(layer=1, head=int(data["head"][0]))
    assert float(data["r_within_rows"][0]) == pytest.approx(float(r), abs=1e-6)


def test_the_page_of_an_example_shows_its_three_maps(result):
    props = attention_of(result.show(example=2).local_src)
    assert props["attentionHeadNames"] == ["true", "three-axis fit", "true - fit"]
    true, additive = result.trained["pattern"].isel(example=2).values
    np.testing.assert_allclose(props["attention"], [true, additive, true - additive], atol=1e-4)
    drawn = result.plot("patterns").data
    assert len(drawn) == 12
    np.testing.assert_array_equal(drawn[7].z, additive)
