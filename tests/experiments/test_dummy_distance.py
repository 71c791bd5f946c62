"""Dummy distances on the bundled model."""

import numpy as np
import pytest
import torch
from families import save_family

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.dummy_distance import curve_under_intervention, dummy_distance
from tl_posgen.interventions.dummy_distance import dummy_distance as intervention
from tl_posgen.interventions.dummy_distance import seen_at
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.words import dummy_distance as words

OPTIONS = {"length": 40, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return dummy_distance(mini, bundled_text(), distances=(0, 64), limits=(1, 40), **OPTIONS)


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
    for dataset in (result.dataset, result.null):
        np.testing.assert_allclose(dataset.distance_share + dataset.key_share + dataset.interaction_share, 1)
        assert dataset.interaction_share.min() >= 0
        np.testing.assert_allclose(dataset.additive_r.max(), dataset.additive_r.max().clip(0, 1))
        assert abs(dataset.curve_r).max() <= 1 + 1e-9


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("map", "agreement", "curves", "loss"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert {"additive_r", "slope_intervention", "slope_fit"} <= set(result.frame().columns)
    assert load(result.save(tmp_path / "r.nc"))["dummy_distance"].dataset.equals(result.dataset)


@pytest.mark.parametrize(
    "wrong", [{"distances": (-1,)}, {"limits": (-2,)}, {"distances": ()}, {"length": 1}, {"length": 9999}]
)
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        dummy_distance(mini, bundled_text(), **{**OPTIONS, **wrong})


@pytest.mark.parametrize("wrong", [{"heads": [4]}, {"layers": [-1]}, {"distance": torch.full((3, 3), -1)}])
def test_what_does_not_exist_is_refused_before_work(mini, wrong):
    with pytest.raises(InputError):
        intervention(mini, **{"distance": 0, **wrong})


def test_distances_beyond_fixed_frequencies_are_refused(tmp_path):
    model = load_model(save_family("llama_dynamic", tmp_path), backend="bridge")
    with pytest.raises(InputError, match=r"distance 500: .* below distance 128"):
        intervention(model, 500)


def test_words_say_whether_the_key_part_stays(result):
    assert any("does not stay" in sentence and "random init" in sentence for sentence in words.found(result))


def test_the_short_table_has_a_row_per_distance_and_limit(result):
    table = words.table(result.dataset)
    assert len(table) == 4
    assert table.rise.iloc[-1] == pytest.approx(0, abs=1e-5)
