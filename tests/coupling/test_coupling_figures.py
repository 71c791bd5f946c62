"""Pictures of coupling show the numbers of their results, trained beside null."""

import numpy as np
import pytest

from tl_posgen.coupling.coupling_figures import FIGURES

NULL = "random init (seed 0)"


def off_diagonal(values):
    return values[~np.eye(len(values), dtype=bool)]


def couplings(data, k):
    """Return the square of every pair of layers, means over prompts."""
    return data["coupling"].sel(k=k, version="absolute", bases="aligned").mean("prompt").transpose("layer", "layer_2")


def panel_titles(figure):
    return [annotation.text for annotation in figure.layout.annotations]


@pytest.mark.parametrize("kind", FIGURES)
def test_every_picture_names_the_model_and_the_seed_of_its_null(result, kind):
    figure = result.plot(kind=kind)
    assert figure.layout.title.text.split("</b>")[0].endswith("· llama")
    beside = [*panel_titles(figure), *(str(trace.name) for trace in figure.data)]
    assert any(words.startswith(NULL) or words.endswith(", random init") for words in beside)


def test_the_map_has_a_row_a_k_of_trained_and_null_couplings_without_the_diagonal(result):
    figure, own = result.plot(kind="map"), result.numbers
    expected = [(data, k) for k in (2, 5) for data in (result.own, result.null)]
    for trace, (data, k) in zip(figure.data, expected, strict=True):
        np.testing.assert_array_equal(off_diagonal(trace.z), off_diagonal(couplings(data, k).values))
        assert np.isnan(np.diag(trace.z)).all()
    values = np.concatenate([off_diagonal(trace.z) for trace in figure.data])
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (values.min(), values.max())
    assert panel_titles(figure)[0] == f"llama, K = 2: mean {own('coupling', k=2).plain:.3f}"
    assert panel_titles(figure)[3] == f"{NULL}, K = 5: mean {own('coupling', k=5).inits[0]:.3f}"
    chance = f"{own('chance', k=2).plain:.3f}, {own('chance', k=5).plain:.3f}"
    assert f"random bases reach {chance}" in figure.layout.title.text


def test_the_chance_picture_has_the_band_of_every_layer_and_a_point_a_pair(result):
    figure = result.plot(kind="chance")
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    for area, places, data, k, share in (
        (bands[1], [0, 1], result.null, 2, 0.975),
        (bands[2], [3, 2], result.own, 5, 0.025),
    ):
        draws = data["chance"].sel(k=k, version="absolute")
        np.testing.assert_allclose(np.array(area.y)[places], draws.quantile(share, ["prompt", "draw"]))
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert sum(len(trace.x) for trace in points) == 2 * 2 * 2
    assert points[0].y[0] == couplings(result.own, 2).sel(layer=1, layer_2=0)
    assert sum(bool(trace.showlegend) for trace in figure.data) == 3  # the band and two layers, once each


def test_alignment_is_drawn_in_units_of_the_first_singular_value(result):
    figure = result.plot(kind="alignment")
    assert len(figure.data) == 4
    k = result.null.sizes["row"]
    for trace, bases in ((figure.data[1], "aligned"), (figure.data[3], "swapped")):
        block = result.null["alignment"].sel(bases=bases, layer=0, layer_2=1)
        expected = block / result.null["singular_value"].sel(layer=0, rank=0)
        np.testing.assert_allclose(trace.z[:k, k + 1 :], expected)
        assert np.isnan(trace.z[k]).all()  # between the layers
    assert np.isnan(figure.data[0].z[:k, :k]).all()  # a layer in its own bases is diagonal by definition


def test_singular_values_paths_and_growth_are_those_of_the_result(result):
    figure, values = result.plot(kind="spectra"), result.own.singular_value
    assert len(figure.data) == 2 * values.sizes["rank"]
    np.testing.assert_array_equal(figure.data[1].y, values.sel(rank=1))
    lines = [trace for trace in result.plot(kind="trajectories").data if trace.mode == "lines+markers"]
    assert len(lines) == 2 * 16
    np.testing.assert_array_equal(lines[15].x, result.own.trajectory.sel(prompt=0, position=19, component=0))
    figure, own = result.plot(kind="growth"), result.numbers
    assert len(figure.data) == 2 * 3
    for number, init in enumerate((["trained"], own.inits)):
        expected = result.dataset["log_norm"].sel(init=init).mean(("init", "prompt"))
        np.testing.assert_allclose([trace.y for trace in figure.data[number::2]], expected)
    assert f"R² {own('growth_r2'):.2f}, {own('growth_slope'):.2f} a layer" in figure.layout.title.text
