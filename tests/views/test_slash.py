"""Pictures of slash scores show the numbers of their results."""

import numpy as np
import pytest

import tl_posgen
from tl_posgen.experiments.slash import slash_transfer
from tl_posgen.experiments.slash_toy import slash_toy
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.words.slash_toy import found, table
from tl_posgen.views.slash_transfer import examples

OPTIONS = {"length": 40, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def report(mini):
    return tl_posgen.analyze(mini, bundled_text(), analyzers=["slash"], **OPTIONS)


@pytest.fixture(scope="module")
def moved(mini):
    return slash_transfer(mini, bundled_text(), **OPTIONS)


def test_the_map_shows_trained_and_null_scores(report):
    result = report["slash"]
    maps = result.plot(kind="map").data
    assert len(maps) == 6
    np.testing.assert_array_equal(maps[0].z, result.dataset["best_score"])
    np.testing.assert_array_equal(maps[4].z, result.null["previous_token"])


def test_profiles_have_a_curve_a_head_and_the_baseline_of_each_layer(report):
    result = report["slash"]
    traces = result.plot(kind="profiles").data
    baselines = [trace for trace in traces if trace.name == "uniform attention"]
    assert len(traces) == 2 * 16 + 4
    assert baselines[0].x.tolist() == list(range(1, 21))
    np.testing.assert_array_equal(baselines[0].y, result.dataset["baseline"].sel(layer=0, distance=baselines[0].x - 1))


def test_the_attention_distance_is_drawn_in_tokens(report):
    figure = report["slash"].plot(kind="distance")
    assert figure.layout.coloraxis.cmax == pytest.approx(
        max(
            float(side[name].max())
            for side in (report["slash"].dataset, report["slash"].null)
            for name in ("attention_distance", "attention_distance_without_first")
        )
    )


def test_the_report_says_how_many_heads_are_dominant(report, tmp_path):
    page = report.write(tmp_path).read_text(encoding="utf-8")
    n = int(report["slash"].dataset["dominant"].any("short_distance").sum())
    assert f"{n} of 16 heads (random init " in page
    assert "Which heads attend at a fixed distance?" in page


def test_the_scatter_has_a_point_a_head(moved):
    traces = moved.plot(kind="scatter").data
    assert len(traces) == 2 * 5 * 3
    trained, null = traces[3:5]
    assert len(null.x) == len(trained.x) == 16
    np.testing.assert_array_equal(trained.y, moved.dataset["score"].sel(source="random", distance=1).values.flat)
    np.testing.assert_array_equal(null.x, moved.null["score"].sel(source="natural", distance=1).values.flat)


def test_the_scatter_titles_tell_the_correlation_and_the_null(moved):
    r, of_null = (float(data.pearson.sel(variant="all", at=1)) for data in (moved.dataset, moved.null))
    titles = [annotation.text for annotation in moved.plot(kind="scatter").layout.annotations]
    assert titles[1].startswith(f"D = 1: r {r:.2f} (null {of_null:.2f})")


def test_a_page_shows_a_head_on_text_beside_random_tokens(moved):
    page = moved.show(example=1).local_src
    assert '"text", "random"' in page
    assert len(examples(moved.dataset)) == 3
    assert f"layer {int(moved.dataset.example_layer[1])}, head" in examples(moved.dataset)[1]


def test_ablation_bars_are_the_scores_of_the_strongest_heads(moved):
    bars = [trace for trace in moved.plot(kind="ablations").data if trace.type == "bar" and trace.xaxis == "x"]
    assert [bar.name for bar in bars][:2] == ["as it is", "RoPE removed"]
    assert len(bars) == moved.dataset.sizes["ablation"]
    np.testing.assert_allclose(bars[0].y, np.sort(moved.dataset["natural"].values.flat)[::-1][:8], atol=1e-6)


@pytest.mark.parametrize("name", ["slash", "transfer"])
def test_an_unknown_kind_is_refused(report, moved, name):
    with pytest.raises(ValueError, match="nonsense"):
        (report["slash"] if name == "slash" else moved).plot(kind="nonsense")


@pytest.fixture(scope="module")
def toy():
    return slash_toy(steps=4, batch=4, every=2, seeds=(0, 1), n_tokens=12, snapshots=(0, 4), progress=False)


def test_training_has_a_curve_a_seed_in_every_panel_and_two_kinds_of_features_for_the_score(toy):
    traces = toy.plot(kind="training").data
    assert len(traces) == 2 * (1 + 2 + 1 + 1)
    np.testing.assert_array_equal(traces[0].y, toy.dataset["loss"].isel(seed=0))


def test_the_toy_maps_show_the_attention_at_every_snapshot(toy):
    maps = toy.plot(kind="maps").data
    assert len(maps) == 4
    np.testing.assert_array_equal(maps[1].z, toy.dataset["pattern"].sel(features="trained", snapshot=4, seed=0))


def test_the_toy_profile_stands_beside_uniform_attention(toy):
    traces = toy.plot(kind="profile").data
    np.testing.assert_array_equal(traces[-1].y, toy.dataset["baseline"])
    np.testing.assert_array_equal(traces[0].y, toy.dataset["profile"].sel(features="trained", seed=0))


def test_the_toy_is_told_with_its_spread_over_seeds(toy):
    ends = toy.dataset["score_trained"]
    assert f"to {float(ends.mean()):.3f} ± {float(ends.std(ddof=1)):.3f}" in found(toy)[0]


def test_the_toy_table_has_a_row_a_seed(toy):
    assert table(toy.dataset)["seed"].tolist() == [0, 1]
