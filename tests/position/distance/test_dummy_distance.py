"""Dummy distances on the bundled model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from declared import assert_declared

from tl_posgen import load
from tl_posgen.analysis import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.distance.dummy_distance import MEASURE as dummy_distance
from tl_posgen.position.distance.dummy_distance import DummyDistance, curve_under_intervention
from tl_posgen.position.distance.hooks import at_dummy_distance, seen_at

CUT = {"length": 40, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="session")
def result(mini, alice):
    return dummy_distance(mini, alice, distances=(0, 64, 7), limits=(1, 40), null_seeds=(0, 1), **CUT)


@pytest.fixture(scope="session")
def of_one_head(mini, alice):
    return dummy_distance(mini, alice, distances=(3,), limits=(8,), layers=[1], heads=[2], null_seeds=(), **CUT)


def test_the_curve_is_the_mean_score_with_every_pair_at_that_distance(mini):
    captures = []
    run_capture(mini, torch.arange(20)[None], captures.append, layers=[1])
    below = torch.ones(20, 20).tril().bool()
    curve = curve_under_intervention(captures[0])
    for d in (0, 7, 19):
        brute = seen_at(captures[0], d, None)[:, below].mean(1)
        torch.testing.assert_close(curve[:, d].float(), brute, atol=1e-4, rtol=1e-4)


def test_the_key_part_agrees_with_itself_at_the_reference(result):
    np.testing.assert_allclose(result.dataset.key_agreement.sel(d0=0), 1)


def test_freezing_beyond_the_prompt_changes_nothing(result):
    assert float(result.dataset.loss_beyond.sel(limit=40)) == pytest.approx(float(result.dataset.loss), abs=1e-5)


def test_the_trained_model_needs_its_distances(result):
    assert float(result.dataset.loss_at.min()) > float(result.dataset.loss) + 0.05


def test_shares_and_correlations_are_in_range(result):
    for dataset in (result.dataset, *result.nulls):
        np.testing.assert_allclose(dataset.distance_share + dataset.key_share + dataset.interaction_share, 1)
        assert dataset.interaction_share.min() >= 0
        assert 0 <= float(dataset.additive_r.min()) <= float(dataset.additive_r.max()) <= 1
        assert abs(dataset.curve_r).max() <= 1 + 1e-9


def test_chosen_heads_alone_are_measured_and_edited(mini, alice, result, of_one_head):
    data = of_one_head.dataset
    assert (data["layer"].values.tolist(), data["head"].values.tolist()) == ([1], [2])
    np.testing.assert_allclose(data["additive_r"], result.dataset["additive_r"].sel(layer=[1], head=[2]))
    tokens = torch.stack(to_prompts(mini, alice, length=40, n_prompts=2))
    hooks = at_dummy_distance(mini, 3, layers=[1], heads=[2])
    assert float(data["loss_at"].sel(d0=3)) == pytest.approx(float(token_losses(mini, tokens, hooks).mean()))
    assert "every pair in the chosen heads at one distance (3)" in of_one_head.findings()[-1]
    assert len(of_one_head.findings()) == 2  # no other distance to compare with
    assert of_one_head.summary["agreement_lowest"] is None


def test_distances_may_be_an_array(mini, alice, of_one_head, unchecked):
    cut = {"layers": [1], "heads": [2], "null_seeds": (), "length": 40, "n_prompts": 2, "progress": False}
    found = dummy_distance(mini, alice, distances=np.array([3]), limits=np.array([8]), **cut)
    assert found.dataset.equals(of_one_head.dataset)


def test_the_summary_has_the_agreement_by_distance_its_mean_and_its_minimum(result):
    agreement = result.dataset["key_agreement"].mean(("layer", "head"))
    assert result.summary["distances"] == [64, 7]
    found = [result.summary[f"agreement_at_{d0}"] for d0 in (64, 7)]
    np.testing.assert_allclose(found, agreement.sel(d0=[64, 7]))
    assert result.summary["agreement"] == pytest.approx(np.mean(found))
    assert result.summary["agreement_lowest"] == pytest.approx(min(found))


def test_the_sentences_say_the_summary_with_the_null_or_without(result):
    assert json.loads(json.dumps(result.summary)) == result.summary
    said, alone = " ".join(result.findings()), " ".join(replace(result, nulls=()).findings())
    forms = {"additive_r": ".3f", "interaction_share": ".0%", "agreement_at_64": ".2f", "agreement_lowest": ".2f"}
    for key, form in (forms | {"loss": ".3f"}).items():
        own, nulls = result.summary[key], [result.measure.summarise(null)[key] for null in result.nulls]
        spread = np.std(nulls, ddof=1)
        assert f"{own:{form}} (random init {np.mean(nulls):{form}} ± {spread:{form}})" in said
        assert f"{own:{form}} (no null measured)" in alone
    best = float(result.dataset["loss_at"].min())
    d0 = result.dataset["loss_at"].idxmin().item()
    assert f"becomes {best:.3f} at best with every pair at one distance ({d0:g})" in said
    assert "stay" not in said  # numbers; nothing is judged here


def test_every_variable_is_declared(result, of_one_head):
    assert_declared(result)
    assert_declared(of_one_head)


@pytest.mark.slow
def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    assert {"additive_r", "slope_intervention", "slope_fit"} <= set(result.frame().columns)
    loaded = load(result.save(tmp_path / "r.nc"))["dummy_distance"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.kinds == ["map", "agreement", "curves", "loss"]
    for kind in loaded.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()


def test_the_map_shows_the_three_shares_of_both_sides(result):
    maps = [trace.z for trace in result.plot("map").data]
    names = ("distance_share", "key_share", "interaction_share")
    for found, (data, name) in zip(maps, [(d, n) for d in (result.dataset, result.null) for n in names], strict=True):
        np.testing.assert_array_equal(found, data[name])


def test_the_agreement_is_drawn_at_every_distance(result):
    traces = [trace for trace in result.plot("agreement").data if trace.name == "head 1"]
    np.testing.assert_array_equal(traces[2].x, [1, 65, 8])  # d0 + 1, on a logarithmic axis
    np.testing.assert_allclose(traces[2].y, result.dataset["key_agreement"].sel(layer=2, head=1))


def test_both_curves_are_drawn_less_their_means(result):
    solid, dotted = [trace for trace in result.plot("curves").data if trace.name == "head 3"][:2]
    for trace, name in ((solid, "curve_intervention"), (dotted, "curve_fit")):
        curve = result.dataset[name].sel(layer=0, head=3)
        np.testing.assert_allclose(trace.y, (curve - curve.mean())[np.asarray(trace.x) - 1])
    assert (solid.line.dash, dotted.line.dash) == ("solid", "dot")
    assert (solid.showlegend, dotted.showlegend) == (True, False)


def test_the_losses_are_drawn_with_the_untouched_one_across(result):
    figure = result.plot("loss")
    at, beyond, null_at, _ = figure.data
    np.testing.assert_array_equal(at.y, result.dataset["loss_at"])
    np.testing.assert_array_equal(beyond.x, [2, 41])
    np.testing.assert_array_equal(null_at.y, result.null["loss_at"])
    untouched = [float(data["loss"]) for data in (result.dataset, result.null) for _ in range(2)]
    assert [shape.y0 for shape in figure.layout.shapes] == untouched


@pytest.mark.parametrize(
    "wrong",
    [
        {"distances": (-1,)},
        {"distances": ()},
        {"distances": 5},
        {"distances": "0,64"},
        {"distances": (0, 0)},
        {"distances": (0, None)},
        {"limits": (-2,)},
        {"limits": ()},
        {"limits": (float("inf"),)},
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError, match=next(iter(wrong))):
        DummyDistance(**wrong)


@pytest.mark.parametrize("wrong", [{"length": 1}, {"length": 9999}], ids=str)
def test_bad_prompts_are_refused(mini, alice, wrong):
    with pytest.raises(InputError):
        dummy_distance(mini, alice, **{**CUT, **wrong})


@pytest.mark.parametrize("wrong", [{"heads": [4]}, {"layers": [-1]}, {"distance": torch.full((3, 3), -1)}])
def test_what_does_not_exist_is_refused_before_work(mini, wrong):
    with pytest.raises(InputError):
        at_dummy_distance(mini, **{"distance": 0, **wrong})


def test_distances_beyond_fixed_frequencies_are_refused(family_model):
    model = family_model("llama_dynamic", "bridge")
    with pytest.raises(InputError, match=r"distance 500: .* below distance 128"):
        at_dummy_distance(model, 500)
    with pytest.raises(InputError, match=r"distance 500: .* below distance 128"):
        dummy_distance(model, torch.arange(2, 26)[None], distances=(0, 500), progress=False)


def test_a_model_without_distances_is_refused_or_skipped(family_model):
    model, tokens = family_model("gpt2", "bridge"), torch.arange(2, 26)[None]
    with pytest.raises(UnsupportedModelError, match="know no distance"):
        dummy_distance(model, tokens, progress=False)
    names = ["dummy_distance", "variance"]
    left = analyze(model, tokens, measures=names, null_seeds=(), progress=False, skip_unsupported=True)
    assert list(left) == ["variance"]
    names = ["dummy_distance", "planes"]
    with pytest.raises(
        UnsupportedModelError, match=r"dummy_distance cannot be had: .* know no distance.*; planes cannot"
    ):
        analyze(model, tokens, measures=names, null_seeds=(), progress=False, skip_unsupported=True)


def test_what_holds_by_construction_with_slopes_is_said(family_model):
    bloom, tokens = family_model("bloom", "bridge"), torch.arange(2, 26)[None]
    found = dummy_distance(bloom, tokens, distances=(0, 16), limits=(4,), null_seeds=(), progress=False)
    np.testing.assert_allclose(found.dataset["additive_r"], 1)
    np.testing.assert_allclose(found.dataset["key_agreement"], 1)
    assert abs(found.dataset["slope_intervention"]).min() > 0
    assert "1 by construction" in found.findings()[-1]


def test_the_short_table_has_a_row_per_distance_and_limit(result):
    table = result.table()
    assert len(table) == 5
    assert table.rise.iloc[-1] == pytest.approx(0, abs=1e-5)
    heads = result.dataset["key_agreement"].sel(d0=64)
    assert table.loc[1, ["key_agreement", "lowest_head"]].tolist() == [f"{heads.mean():.3f}", f"{heads.min():.3f}"]
