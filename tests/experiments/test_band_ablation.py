"""Bands of RoPE ablated in running models."""

import numpy as np
import pytest
import torch
from families import save_family
from torch.nn.functional import cross_entropy

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.band_ablation import band_ablation
from tl_posgen.experiments.slash import slash_transfer
from tl_posgen.interventions import ablate_bands
from tl_posgen.maths.bands import bands_by_thirds, bands_by_wavelength
from tl_posgen.models.probe import probe, supported
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words.band_ablation import found, table

OPTIONS = {"length": 48, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return band_ablation(mini, bundled_text(), splits=["thirds"], **OPTIONS)


def test_a_row_an_arm(result):
    frame = result.frame()
    assert len(frame) == 1 + 3 * 3 + 4
    assert frame.groupby("kind").size().to_dict()["drop"] == 3


def test_losses_are_those_of_the_hooked_model(mini, result):
    tokens = torch.stack(to_prompts(mini, bundled_text(), length=48, n_prompts=1))
    hooks = ablate_bands(mini, "drop", bands_by_thirds(16)[1])
    logits = mini.run_with_hooks(tokens, fwd_hooks=hooks).detach()
    expected = [float(cross_entropy(row[:-1], ids[1:])) for row, ids in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(result.dataset.loss.sel(arm="drop medium, thirds"), expected, rtol=1e-5)


def test_in_the_first_layer_running_and_alone_are_the_same(result):
    data = result.dataset.sel(layer=0)
    np.testing.assert_allclose(data.score, data.score_offline, atol=1e-5)


def test_in_later_layers_what_went_before_shows(result):
    data = result.dataset.sel(layer=3, arm="no_rope")
    assert float(abs(data.score - data.score_offline).max()) > 1e-4


def test_alone_is_what_slash_transfer_measures(mini, result):
    moved = slash_transfer(mini, bundled_text(), null_seed=None, **OPTIONS).dataset
    for arm, kind in {"no_rope": "no_rope", "rank_one": "rank_one", "drop high, thirds": "drop_high"}.items():
        np.testing.assert_allclose(result.dataset.score_offline.sel(arm=arm), moved[f"ablated_{kind}"], atol=1e-6)


def test_the_slash_goes_with_rope_and_stays_without_the_content(result):
    rows = result.frame().set_index("arm")
    assert rows.at["no_rope", "slash_heads_kept"] < rows.at["none", "slash_heads"] / 4
    assert rows.at["means", "slash_score"] > 2 * rows.at["no_rope", "slash_score"]


def test_uniform_attention_is_left_of_means_without_rope(result):
    data = result.dataset
    np.testing.assert_allclose(data.score.sel(arm="means_no_rope"), data.baseline_score, atol=1e-5)


def test_a_random_model_has_no_slash_heads_to_lose(result):
    assert int(result.null.slash_heads.max()) == 0
    assert float(abs(result.null.loss_mean - result.null.loss_mean[0]).max()) < 0.01


def test_bands_by_wavelength_go_by_each_layers_own_frequencies(tmp_path):
    model = tl_posgen.load_model(save_family("gemma3", tmp_path), backend="bridge")
    tokens = torch.randint(2, 64, (1, 100), generator=torch.Generator().manual_seed(0))
    options = {"length": None, "n_prompts": None, "null_seed": None, "progress": False}
    data = band_ablation(model, tokens, splits=["wavelength"], **options).dataset
    ropes = [supported(layer).geometry.rope for layer in probe(model)]
    expected = [int(bands_by_wavelength(rope, 100)[2].sum()) for rope in ropes]
    assert data.n_planes.sel(arm="keep low, wavelength").values.tolist() == expected
    assert expected[0] != expected[1]
    np.testing.assert_allclose(data.score.sel(layer=0), data.score_offline.sel(layer=0), atol=1e-5)


def test_the_words_tell_the_cost_of_every_band(result):
    rows = result.frame().set_index("arm")
    cost = rows.at["drop high, thirds", "loss_mean"] - rows.at["none", "loss_mean"]
    assert f"high {cost:+.3f}" in found(result)[0]


def test_the_short_table_fits_a_page(result):
    assert table(result.dataset).shape == (14, 6)


def test_it_comes_back_from_disk(result, tmp_path):
    assert tl_posgen.load(result.save(tmp_path / "b.nc"))["band_ablation"].frame().equals(result.frame())


@pytest.mark.parametrize(("kind", "traces"), [("loss", 2), ("slash", 6), ("heads", 1)])
def test_pictures_show_every_arm(result, kind, traces):
    figure = result.plot(kind=kind)
    assert len(figure.data) == traces
    assert all(len(trace.y) == result.dataset.sizes["arm"] for trace in figure.data)


def test_a_model_without_rope_is_refused(shared):
    model = tl_posgen.load_model(str(shared / "models" / "atome_vanilla_1m"))
    with pytest.raises(UnsupportedModelError, match="no layer of this model has rotary planes"):
        band_ablation(model, torch.arange(40)[None] + 60, length=None, n_prompts=None, progress=False)


@pytest.mark.parametrize("wrong", [{"splits": ["halves"]}, {"kappa": 0.0}, {"distances": [48]}])
def test_unusable_settings_are_refused(mini, wrong):
    with pytest.raises(InputError):
        band_ablation(mini, bundled_text(), **OPTIONS, **wrong)
