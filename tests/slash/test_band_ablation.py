"""Bands of RoPE ablated in running models."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import tl_posgen
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.report.sentences import with_interval
from tl_posgen.result import Result
from tl_posgen.rope.frequency_bands import bands_by_thirds, bands_by_wavelength
from tl_posgen.slash import ablate_bands, band_ablation
from tl_posgen.slash.band_ablation import of_condition

CUT = {"length": 112, "n_prompts": 2}


@pytest.fixture(scope="module")
def result(report):
    return report["band_ablation"]


def test_a_row_a_condition(result):
    frame = result.frame()
    assert len(frame) == 1 + 3 * 3 + 4
    assert frame.groupby("kind").size().to_dict()["drop"] == 3


def test_losses_are_those_of_the_hooked_model(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, **CUT))
    hooks = ablate_bands(mini, "drop", bands_by_thirds(16)[1])
    logits = mini.run_with_hooks(tokens, fwd_hooks=hooks).detach()
    expected = [float(cross_entropy(row[:-1], ids[1:])) for row, ids in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(result.dataset.loss.sel(condition="drop medium, thirds"), expected, rtol=1e-5)
    plain = mini(tokens).detach()
    expected = [float(cross_entropy(row[:-1], ids[1:])) for row, ids in zip(plain, tokens, strict=True)]
    np.testing.assert_allclose(result.dataset.loss.sel(condition="unchanged"), expected, rtol=1e-5)


def test_intervals_are_over_prompts_of_scores_and_of_what_each_prompt_loses(mini, alice, bands_of_four):
    data = bands_of_four.dataset
    change = data["loss"] - data["loss"].sel(condition="unchanged")
    half = 3.1824 * change.std("prompt", ddof=1) / 4**0.5
    for end, side in (("", 0), ("_low", -1), ("_high", 1)):
        np.testing.assert_allclose(data[f"loss_change{end}"], change.mean("prompt") + side * half, rtol=1e-4)
    one = band_ablation(mini, alice, length=112, n_prompts=1, schemes=["thirds"], null_seeds=(), progress=False)
    assert one.dataset["slash_score_low"].isnull().all()
    assert (data["slash_score_low"] <= data["slash_score"]).all()
    assert float(data["slash_score_low"][0]) < float(data["slash_score_high"][0])


def test_in_the_first_layer_running_and_alone_are_the_same(result):
    data = result.dataset.sel(layer=0)
    np.testing.assert_allclose(data.score, data.score_alone, atol=1e-5)


def test_in_later_layers_what_went_before_shows(result):
    data = result.dataset.sel(layer=3, condition="no_rope")
    assert float(abs(data.score - data.score_alone).max()) > 1e-4


def test_alone_is_what_slash_ablation_measures(report, result):
    ablated = report["slash_ablation"].dataset["score_at_best"]
    for condition in ("no_rope", "rank_one", "drop high, thirds"):
        alone = result.dataset.score_alone.sel(condition=condition)
        np.testing.assert_array_equal(alone, ablated.sel(condition=condition))


def test_unchanged_is_what_slash_measures(report, result):
    slash = report["slash"].dataset
    np.testing.assert_array_equal(result.dataset.score.sel(condition="unchanged"), slash["best_score"])
    assert int(result.dataset.slash_heads[0]) == report["slash"].summary["n_dominant"]


def test_the_slash_goes_with_rope_and_stays_without_the_content(result):
    rows = result.frame().set_index("condition")
    assert rows.at["no_rope", "slash_heads_kept"] < rows.at["unchanged", "slash_heads"] / 4
    assert rows.at["means", "slash_score"] > 2 * rows.at["no_rope", "slash_score"]


def test_uniform_attention_is_left_of_means_without_rope(result):
    data = result.dataset
    np.testing.assert_allclose(data.score.sel(condition="means_no_rope"), data.uniform_score, atol=1e-5)


def test_a_random_model_has_no_slash_heads_to_lose(result):
    assert int(result.null.slash_heads.max()) == 0
    assert float(abs(result.null.loss_mean - result.null.loss_mean[0]).max()) < 0.01


@pytest.mark.slow
def test_bands_by_wavelength_go_by_each_layers_own_frequencies(family_model):
    model = family_model("gemma3", "bridge")
    tokens = torch.randint(2, 64, (1, 100), generator=torch.Generator().manual_seed(0))
    data = band_ablation(model, tokens, schemes=["wavelength"], null_seeds=(), progress=False).dataset
    expected = [int(bands_by_wavelength(one.rope, 100)[2].sum()) for one in geometry_of(model)]
    assert data.n_planes.sel(condition="keep low, wavelength").values.tolist() == expected
    assert expected[0] != expected[1]
    np.testing.assert_allclose(data.score.sel(layer=0), data.score_alone.sel(layer=0), atol=1e-5)


def test_all_is_ablated_whatever_is_measured(mini, alice, result):
    options = {"schemes": ["thirds"], "heads": [(1, 2), (3, 1)], "null_seeds": (), "progress": False}
    some = band_ablation(mini, alice, **CUT, **options).dataset
    np.testing.assert_allclose(some.loss, result.dataset.loss, rtol=1e-6)
    for layer, head in options["heads"]:
        own, whole = (one.score.sel(layer=layer, head=head) for one in (some, result.dataset))
        np.testing.assert_allclose(own, whole, atol=1e-6)


# What is shown


def test_the_sentences_tell_the_cost_of_every_band_and_what_is_left(result):
    rows = result.frame().set_index("condition")
    null = result.frame(null=True).set_index("condition")
    bands, left, random = result.findings()
    cost = rows["loss_mean"] - rows.at["unchanged", "loss_mean"]
    parts = [
        f"{band} {with_interval(rows.loc[name].to_dict(), 'loss_change', '+.3f')} "
        f"({rows.at[name, 'slash_heads_kept']} kept)"
        for band, name in ((band, f"drop {band}, thirds") for band in ("high", "medium", "low"))
    ]
    assert bands == f"A third of the planes dropped in every layer, the loss changes by {', '.join(parts)}."
    score = {name: with_interval(dict(rows.loc[name]), "slash_score") for name in ("unchanged", "rank_one")}
    assert left.startswith(
        f"{rows.at['unchanged', 'slash_heads']} heads are slash-dominant (random init "
        f"{null.at['unchanged', 'slash_heads']}), mean score {score['unchanged']} "
        f"(loss {rows.at['unchanged', 'loss_mean']:.3f}); in the running model this becomes: Q, K of rank one "
        f"{score['rank_one']} (loss {rows.at['rank_one', 'loss_mean']:.3f}), RoPE removed "
    )
    largest = abs(null["loss_mean"] - null.at["unchanged", "loss_mean"]).max()
    assert random == f"The random-init model's loss changes by {math.ceil(largest * 10**4) / 10**4:.4f} at most."
    change = of_condition(result.summary, "loss_change", "drop high, thirds")
    assert change == pytest.approx(cost["drop high, thirds"], abs=1e-6)


def test_counts_of_several_random_inits_are_told_as_an_average(result):
    more = result.null.assign(slash_heads=result.null["slash_heads"] + 5)
    told = Result("band_ablation", result.dataset, (result.null, more, result.null)).findings()[1]
    assert "(random init 1.67 on average)" in told


def test_the_axes_name_conditions_in_words(result):
    for kind in result.kinds:
        for trace in result.plot(kind).data:
            assert {"Q, K of rank one", "RoPE removed"} <= set(trace.y)
            assert not any("_" in name for name in trace.y)


def test_the_short_table_fits_a_page(result):
    assert result.table().shape == (14, 6)


def test_it_comes_back_from_disk(result, tmp_path):
    assert tl_posgen.load(result.save(tmp_path / "b.nc"))["band_ablation"].frame().equals(result.frame())


@pytest.mark.parametrize(("kind", "traces"), [("loss", 2), ("slash", 6), ("heads", 1)])
def test_pictures_show_every_condition(result, kind, traces):
    figure = result.plot(kind=kind)
    assert len(figure.data) == traces
    assert all(len(trace.y) == result.dataset.sizes["condition"] for trace in figure.data)


def test_pictures_show_the_numbers(result):
    data, null = result.dataset, result.null
    loss, of_null = result.plot(kind="loss").data
    np.testing.assert_array_equal(loss.x, data["loss_mean"])
    np.testing.assert_array_equal(of_null.x, null["loss_mean"])
    bars = result.plot(kind="slash").data
    shown = [data["slash_score"], data["slash_score_alone"], null["slash_score"]]
    shown += [data["slash_heads"], data["slash_heads_kept"], null["slash_heads"]]
    for bar, expected in zip(bars, shown, strict=True):
        np.testing.assert_array_equal(bar.x, expected)
    (heads,) = result.plot(kind="heads").data
    strongest = np.sort(data["score"].sel(condition="unchanged").values.flat)[::-1][:12]
    np.testing.assert_array_equal(heads.z[0], strongest)


def test_a_model_without_rope_is_refused_before_anything_runs(family_model, monkeypatch):
    monkeypatch.setattr("tl_posgen.feed.run_capture", None)
    with pytest.raises(UnsupportedModelError, match="no layer of this model has rotary planes"):
        band_ablation(family_model("gpt2", "bridge"), torch.arange(40)[None] + 2, progress=False)


def test_a_trained_model_without_rope_is_refused(learned_positions):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has rotary planes"):
        band_ablation(learned_positions, torch.arange(40)[None] + 60, progress=False)
