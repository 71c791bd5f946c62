"""Pictures of coupling show the numbers of their results, trained beside null."""

import numpy as np
import pandas as pd
import pytest
from families import save_family

from tl_posgen import load_model
from tl_posgen.experiments.coupling import coupling
from tl_posgen.experiments.coupling_emergence import coupling_emergence
from tl_posgen.experiments.coupling_scores import coupling_scores
from tl_posgen.models.source import MINI
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import short_table
from tl_posgen.views.coupling import KINDS, drawable

OPTIONS = {"length": 20, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    model = load_model(save_family("llama", tmp_path_factory.mktemp("root") / "tiny"))
    text = "once there was a cat and a dog who ran " * 4
    return coupling(model, text, k=(3, 6), tokens=[5, 12, -1], token_wise=True, chance_samples=3, **OPTIONS)


@pytest.fixture(scope="module")
def emergence():
    return coupling_emergence([MINI], bundled_text(), tokenizer="mini", k=4, **OPTIONS)


@pytest.fixture(scope="module")
def scores():
    table = pd.DataFrame({"model": ["mini"], "score": [0.4]})
    return coupling_scores(table, bundled_text(), k=4, widths=(16, 32, 64), **OPTIONS)


def off_diagonal(values):
    return values[~np.eye(len(values), dtype=bool)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_names_the_model_and_the_seed_of_its_null(result, kind):
    figure = result.plot(kind=kind)
    assert "tiny" in figure.layout.title.text
    assert any("random init (seed 0)" in annotation.text for annotation in figure.layout.annotations)


def test_the_map_has_trained_and_null_couplings_without_the_diagonal(result):
    trained, null = result.plot(kind="map", k=6).data
    for trace, data in ((trained, result.dataset), (null, result.null)):
        np.testing.assert_array_equal(off_diagonal(trace.z), off_diagonal(data.coupling.sel(k=6).values))
        assert np.isnan(np.diag(trace.z)).all()


def test_the_chance_picture_has_the_band_of_every_layer_and_a_point_a_pair(result):
    figure = result.plot(kind="chance")
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    np.testing.assert_array_equal(bands[1].y[:2], result.null.chance_high.sel(k=3))
    assert sum(len(trace.x) for trace in figure.data if trace.mode == "markers") == 2 * 2


def test_alignment_is_drawn_in_units_of_the_first_singular_value(result):
    figure = result.plot(kind="alignment")
    assert len(figure.data) == 2
    expected = result.null.alignment.sel(lower_layer=0) / result.null.singular_value.sel(layer=0, row=0)
    np.testing.assert_allclose(figure.data[1].z, expected)


def test_trajectories_are_the_last_tokens_paths(result):
    lines = [trace for trace in result.plot(kind="trajectories").data if trace.mode == "lines+markers"]
    assert len(lines) == 2 * 16
    np.testing.assert_array_equal(lines[15].x, result.dataset.trajectory.sel(prompt=0, position=19, component=0))


def test_growth_stands_beside_its_fit_and_the_first_token(result):
    figure = result.plot(kind="growth")
    assert len(figure.data) == 2 * 3
    np.testing.assert_allclose(figure.data[0].y, result.dataset.log_norm.mean("prompt"))
    np.testing.assert_allclose(figure.data[4].y, result.null.log_norm_line.mean("prompt"))


@pytest.mark.parametrize("kind", ["self", "same_input", "same_output"])
def test_token_pictures_have_a_map_a_layer_and_side(result, kind):
    maps = result.plot(kind=kind).data
    assert len(maps) == 2 * 2
    expected = result.null.token_coupling.sel(kind=kind, k=3, layer=0)
    np.testing.assert_array_equal(off_diagonal(maps[2].z), off_diagonal(expected.values))


def test_pictures_without_data_are_not_offered(result):
    data = result.dataset
    assert "self" not in drawable(data.drop_vars("token_coupling"))
    assert "map" not in drawable(data.isel(layer=[0]))
    with pytest.raises(ValueError, match="same_input"):
        result.plot(kind="nonsense")


def test_coupling_is_told_with_its_interval_chance_and_null(result):
    sentences = " ".join(findings({"coupling": result}))
    data, null = result.dataset.sel(k=3), result.null.sel(k=3)
    interval = f"[{float(data.mean_coupling_low):.3f}, {float(data.mean_coupling_high):.3f}]"
    assert f"is {float(data.mean_coupling):.3f} {interval} (random init {float(null.mean_coupling):.3f})" in sentences
    assert f"random bases with the same spectra reach {float(data.mean_chance):.3f}" in sentences


def test_the_short_table_has_a_row_a_k_on_both_sides(result):
    for null in (False, True):
        table = short_table(result, null=null)
        assert table["K"].tolist() == [3, 6]
        assert len(table.columns) == 8


def test_emergence_is_drawn_with_chance_and_null(emergence):
    names = [trace.name for trace in emergence.plot().data]
    assert "random bases" in names
    assert "random init (seed 0)" in names
    assert len(emergence.plot(kind="controls").layout.annotations) == 4


def test_emergence_is_told_and_tabulated(emergence):
    assert "random init" in findings({"coupling_emergence": emergence})[0]
    assert short_table(emergence)["loss"].tolist() == emergence.dataset.loss.values.tolist()


def test_the_scatter_has_a_point_a_model_and_says_what_one_model_cannot_tell(scores):
    figure = scores.plot()
    np.testing.assert_array_equal(figure.data[0].x, scores.dataset.coupling)
    assert "needs 4 models, 1 given" in figure.layout.title.text
    assert "r not defined" in figure.layout.annotations[0].text


def test_the_warning_is_drawn_and_told(scores):
    curves = scores.plot(kind="width").data
    np.testing.assert_array_equal(curves[1].y, scores.dataset.width_coupling.sel(norm="trace"))
    assert findings({"coupling_scores": scores})[-1].startswith(
        "Warning: independent random Jacobians of width 16 to 64"
    )


def test_size_held_fixed_has_a_picture_of_its_own_and_measures_can_be_chosen(scores):
    assert "given size" in scores.plot(kind="given_size", measure="trace").layout.title.text
    with pytest.raises(ValueError, match="growth_r2"):
        scores.plot(measure="nonsense")
