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
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.distance.curves import curve_under_intervention
from tl_posgen.position.distance.distance_table import table_energies
from tl_posgen.position.distance.dummy_distance import MEASURE as dummy_distance
from tl_posgen.position.distance.dummy_distance import DummyDistance
from tl_posgen.position.distance.hooks import at_dummy_distance, scores_at_distance
from tl_posgen.report.sentences import with_interval

CUT = {"length": 40, "n_prompts": 4, "progress": False}


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
        brute = scores_at_distance(captures[0], d, None)[:, below].mean(1)
        torch.testing.assert_close(curve[:, d].float(), brute, atol=1e-4, rtol=1e-4)


def test_the_key_part_agrees_with_itself(result):
    for name in ("key_agreement", "key_agreement_without_first_token"):
        matrix = result.dataset[name]
        np.testing.assert_allclose(np.diagonal(matrix, axis1=2, axis2=3), 1)
        np.testing.assert_allclose(matrix, matrix.transpose("layer", "head", "other_d0", "d0").values)


def test_without_the_first_token_is_the_same_of_the_rest(mini, result, alice):
    tokens = to_prompts(mini, alice, length=40, n_prompts=4)
    rows = []
    for prompt in tokens:

        def take(capture):
            q, k = capture.q[:, 1:], capture.k[:, 1:]
            energies = table_energies(q, k, capture.geometry.rope, 1.0, torch.arange(40)).sum(-1)
            rows.append((energies[1] / energies[1:].sum(0)).sqrt())

        run_capture(mini, prompt[None], take)
    expected = torch.stack(rows).unflatten(0, (4, -1)).mean(0)
    np.testing.assert_allclose(result.dataset["key_part_r_without_first_token"], expected, rtol=1e-5)


def test_the_means_over_heads_have_their_intervals_over_prompts(result):
    data = result.dataset
    for name in ("additive_r", "key_part_r", "refit_r", "key_agreement_without_first_token"):
        low, mean, high = (data[f"mean_{name}{end}"] for end in ("_low", "", "_high"))
        np.testing.assert_allclose(mean, data[name].mean(("layer", "head")))
        assert bool((low <= mean + 1e-12).all())
        assert bool((mean <= high + 1e-12).all())
    assert result.summary["key_part_r_low"] == float(data["mean_key_part_r_low"])


def test_distances_are_those_below_the_training_length_unless_given(mini, alice):
    found = dummy_distance(mini, alice, layers=[0], heads=[0], limits=(8,), null_seeds=(), **CUT)
    assert found.dataset["d0"].values.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found.summary["training_length"] == mini.cfg.n_ctx == 512
    assert found.dataset["example"].size == 1  # the only head there is


def test_no_distance_is_compared_that_a_window_hides(family_model):
    model = family_model("mistral", "bridge")
    found = dummy_distance(model, torch.arange(2, 26)[None], distances=(0, 3, 64), null_seeds=(), progress=False)
    [window] = {wrap(model).layer(0).geometry.window}
    assert 3 < window <= 64
    assert found.dataset["refit_r"].sel(d0=64).isnull().all()
    assert found.dataset["key_agreement"].sel(d0=64).isnull().all()
    assert found.dataset["key_agreement"].sel(d0=0, other_d0=3).notnull().all()


def test_examples_are_tables_of_the_heads_whose_key_part_stays_most_and_least(mini, alice, result):
    data = result.dataset
    r = data["key_part_r_without_first_token"].stack(one=("layer", "head")).sortby(lambda data: data)
    assert data["example"].values.tolist() == [f"{layer}.{head}" for layer, head in r["one"].values[[-1, 0]]]
    captures = []
    run_capture(mini, to_prompts(mini, alice, length=40, n_prompts=1)[0][None], captures.append)
    layer, head = map(int, data["example"].values[0].split("."))
    capture = captures[layer]
    for d in (0, 7, 39):
        scores = scores_at_distance(capture, d, None)[head]
        np.testing.assert_allclose(data["table"][0, 0].sel(table_distance=d), scores[-1], atol=1e-4)
        np.testing.assert_allclose(data["table"][0, 1].sel(table_distance=d), scores.mean(0), atol=1e-4)


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
    tokens = torch.stack(to_prompts(mini, alice, length=40, n_prompts=4))
    hooks = at_dummy_distance(mini, 3, layers=[1], heads=[2])
    assert float(data["loss_at"].sel(d0=3)) == pytest.approx(float(token_losses(mini, tokens, hooks).mean()))
    assert "every pair in the chosen heads at one distance (3)" in of_one_head.findings()[-1]
    assert len(of_one_head.findings()) == 4  # no other distance to compare with
    assert of_one_head.summary["agreement_lowest"] is None


def test_distances_may_be_an_array(mini, alice, of_one_head, unchecked):
    cut = {"layers": [1], "heads": [2], "null_seeds": (), "length": 40, "n_prompts": 4, "progress": False}
    found = dummy_distance(mini, alice, distances=np.array([3]), limits=np.array([8]), **cut)
    assert found.dataset.equals(of_one_head.dataset)


def test_the_summary_has_the_agreement_of_all_pairs_its_mean_and_its_minimum(result):
    matrix = result.dataset["key_agreement_without_first_token"].mean(("layer", "head")).values
    assert result.summary["distances"] == [0, 64, 7]
    found = [result.summary[f"agreement_at_{d0}"] for d0 in (0, 64, 7)]
    np.testing.assert_allclose(found, matrix)
    pairs = {(0, 64): matrix[0, 1], (0, 7): matrix[0, 2], (7, 64): matrix[1, 2]}
    assert result.summary["agreement"] == pytest.approx(np.mean([*pairs.values()]))
    assert result.summary["agreement_lowest"] == pytest.approx(min(pairs.values()))
    assert tuple(result.summary["agreement_lowest_pair"]) == min(pairs, key=pairs.__getitem__)


def test_the_sentences_say_the_summary_with_the_null_or_without(result):
    assert json.loads(json.dumps(result.summary)) == result.summary
    said, alone = " ".join(result.findings()), " ".join(replace(result, nulls=()).findings())
    forms = {"additive_r": ".3f", "interaction_share_without_first_token": ".0%", "agreement": ".2f"}
    for key, form in (forms | {"loss": ".3f"}).items():
        own = with_interval(result.summary, key, form)
        nulls = [result.measure.summarise(null)[key] for null in result.nulls]
        spread = np.std(nulls, ddof=1)
        assert f"{own} (random init {np.mean(nulls):{form}} ± {spread:{form}})" in said
        assert f"{own} (no null measured)" in alone
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
    assert loaded.kinds == ["map", "agreement", "refits", "tables", "curves", "loss"]
    for kind in loaded.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()


def test_the_map_shows_the_three_shares_and_the_key_part_of_both_sides(result):
    maps = [trace.z for trace in result.plot("map").data]
    names = ("distance_share", "key_share", "interaction_share", "key_part_r_without_first_token")
    for found, (data, name) in zip(maps, [(d, n) for d in (result.dataset, result.null) for n in names], strict=True):
        np.testing.assert_array_equal(found, data[name])


def test_the_agreement_is_drawn_between_every_two_distances(result):
    traces = result.plot("agreement").data
    assert len(traces) == 4  # both sides, with the first token and without
    np.testing.assert_array_equal(traces[0].z, result.dataset["mean_key_agreement_without_first_token"])
    assert (list(traces[0].x), list(traces[0].y)) == (["0", "64", "7"],) * 2


def test_the_fits_made_again_are_drawn_at_every_distance(result):
    traces = [trace for trace in result.plot("refits").data if trace.name == "head 1"]
    np.testing.assert_array_equal(traces[2].x, [1, 65, 8])  # d0 + 1, on a logarithmic axis
    expected = result.dataset["refit_r_without_first_token"].sel(layer=2, head=1)
    np.testing.assert_allclose(traces[2].y, expected, rtol=1e-6)


def test_the_tables_are_drawn_a_row_an_example_on_both_sides(result):
    figure = result.plot("tables")
    assert len(figure.data) == 8
    np.testing.assert_array_equal(figure.data[1].z, result.dataset["table"][0, 1])
    np.testing.assert_array_equal(figure.data[4].z, result.null["table"][0, 0])


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
    for name in ("key_agreement", "key_part_r", "refit_r"):
        np.testing.assert_allclose(found.dataset[name], 1)
    assert abs(found.dataset["slope_intervention"]).min() > 0
    assert "1 by construction" in found.findings()[-1]


def test_the_short_table_has_a_row_per_distance_and_limit(result):
    table = result.table()
    assert len(table) == 5
    assert table.rise.iloc[-1] == pytest.approx(0, abs=1e-5)
    r = result.dataset["refit_r_without_first_token"].sel(d0=64).mean()
    assert table.loc[1, "refit_r"] == f"{r:.3f}"
