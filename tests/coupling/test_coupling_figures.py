"""Pictures of coupling show the numbers of their results, trained beside null."""

import numpy as np
import pytest

from tl_posgen.coupling.coupling import MEASURE
from tl_posgen.coupling.coupling_figures import FIGURES

NULL = "random init (seed 0)"


def off_diagonal(values):
    return values[~np.eye(len(values), dtype=bool)]


def panel_titles(figure):
    return [annotation.text for annotation in figure.layout.annotations]


@pytest.mark.parametrize("kind", FIGURES)
def test_every_picture_names_the_model_and_the_seed_of_its_null(result, kind):
    figure = result.plot(kind=kind)
    assert figure.layout.title.text.split("</b>")[0].endswith("· llama")
    assert any(title.startswith(NULL) for title in panel_titles(figure))


def test_the_map_has_a_row_a_k_of_trained_and_null_couplings_without_the_diagonal(result):
    maps = result.plot(kind="map").data
    expected = [(data, k) for k in (2, 5) for data in (result.dataset, result.null)]
    for trace, (data, k) in zip(maps, expected, strict=True):
        np.testing.assert_array_equal(off_diagonal(trace.z), off_diagonal(data.coupling.sel(k=k).values))
        assert np.isnan(np.diag(trace.z)).all()


def test_the_map_says_the_means_of_the_summary(result):
    figure, own = result.plot(kind="map"), result.summary
    assert panel_titles(figure)[0] == f"llama, K = 2: mean {own['coupling']:.3f}"
    assert panel_titles(figure)[3] == f"{NULL}, K = 5: mean {result.null_summary.seeds[0]['coupling_k5']:.3f}"
    assert f"random bases reach {own['chance']:.3f}, {own['chance_k5']:.3f}" in figure.layout.title.text


def test_the_colours_span_what_is_drawn(result):
    figure = result.plot(kind="map")
    values = np.concatenate([off_diagonal(trace.z) for trace in figure.data])
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (values.min(), values.max())


def test_the_chance_picture_has_the_band_of_every_layer_and_a_point_a_pair(result):
    figure = result.plot(kind="chance")
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    np.testing.assert_array_equal(bands[1].y[:2], result.null.chance_high.sel(k=2))
    np.testing.assert_array_equal(bands[2].y[2:], result.dataset.chance_low.sel(k=5)[::-1])
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert sum(len(trace.x) for trace in points) == 2 * 2 * 2
    assert points[0].y[0] == result.dataset.coupling.sel(k=2, layer=1, layer_2=0)
    assert sum(bool(trace.showlegend) for trace in figure.data) == 3  # the band and two layers, once each


def test_alignment_is_drawn_in_units_of_the_first_singular_value(result):
    figure = result.plot(kind="alignment")
    assert len(figure.data) == 4
    k = result.null.sizes["row"]
    for trace, name in ((figure.data[1], "alignment"), (figure.data[3], "alignment_swapped")):
        expected = result.null[name].sel(layer=0, layer_2=1) / result.null.singular_value.sel(layer=0, rank=0)
        np.testing.assert_allclose(trace.z[:k, k + 1 :], expected)
        assert np.isnan(trace.z[k]).all()  # between the layers
    assert np.isnan(figure.data[0].z[:k, :k]).all()  # a layer in its own bases is diagonal by definition


def test_every_singular_value_has_a_line_over_depth(result):
    figure, values = result.plot(kind="spectra"), result.dataset.singular_value
    assert len(figure.data) == 2 * values.sizes["rank"]
    np.testing.assert_array_equal(figure.data[1].y, values.sel(rank=1))


def test_trajectories_are_the_last_tokens_paths(result):
    lines = [trace for trace in result.plot(kind="trajectories").data if trace.mode == "lines+markers"]
    assert len(lines) == 2 * 16
    np.testing.assert_array_equal(lines[15].x, result.dataset.trajectory.sel(prompt=0, position=19, component=0))


def test_growth_stands_beside_its_fit_and_the_first_token(result):
    figure, own = result.plot(kind="growth"), result.summary
    assert len(figure.data) == 2 * 3
    np.testing.assert_allclose(figure.data[0].y, result.dataset.log_norm.mean("prompt"))
    np.testing.assert_allclose(figure.data[4].y, result.null.log_norm_line.mean("prompt"))
    assert panel_titles(figure)[0] == f"llama: R² {own['growth_r2']:.2f}, {own['growth_slope']:.2f} a layer"


def test_pictures_without_data_are_not_offered(result):
    data = result.dataset
    assert "map" not in MEASURE.kinds(data.isel(layer=[0]))
    with pytest.raises(ValueError, match="trajectories"):
        result.plot(kind="nonsense")
