"""Figure primitives for models of many layers and heads: names, colours, curves and rows stay few."""

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr
from made_up import dataset_of, result_of

from tl_posgen.core.saved import unknown_measure
from tl_posgen.report.figures import Panels, line, titled
from tl_posgen.report.head_figures import MOST_CURVES, by_head, layer_curves, said_of_rows

PER_HEAD = ("init", "layer", "head", "d")


def test_a_legend_names_few_of_the_layers_and_all_conditions():
    panels = Panels(["r"])
    for name in ("no RoPE", "window 4", "window 8", *(f"layer {number}" for number in range(48))):
        panels.add(0, line([0, 1], [0, 1], name))
    shown = [trace.name for trace in panels.titled("r").data if trace.showlegend]
    assert shown == ["no RoPE", "window 4", "window 8", *(f"layer {number}" for number in range(0, 48, 6))]


def test_ticks_of_given_places_are_thinned_with_their_texts():
    ticks = {"tickvals": list(range(48)), "ticktext": [f"L{number}" for number in range(48)]}
    axis = titled(go.Figure().update_xaxes(**ticks), "r").layout.xaxis
    assert axis.tickvals == tuple(range(0, 48, 3))
    assert axis.ticktext == tuple(f"L{number}" for number in range(0, 48, 3))


def test_a_column_a_layer_has_its_place():
    panels = Panels([f"layer {number}" for number in range(48)], columns=48)
    assert len({axis.domain for axis in panels.figure.select_xaxes()}) == 48


@pytest.mark.parametrize("n", [MOST_CURVES, MOST_CURVES + 1])
def test_many_heads_are_a_median_and_a_band(n):
    curves = np.random.default_rng(0).normal(size=(1, 1, n, 5))
    data = dataset_of({"r": (PER_HEAD, curves)}, layer=[3], head=range(n), d=range(5), init=["trained"])
    result = result_of(unknown_measure("someones_measure"), data.isel(init=0, drop=True))
    words = {"title": "r", "subtitle": "r", "y_title": "r"}
    drawn = layer_curves(result, "r", "d", **words)
    if n == MOST_CURVES:
        np.testing.assert_allclose([trace.y for trace in drawn.data], curves[0, 0], rtol=1e-6)
        return
    area, middle = drawn.data
    np.testing.assert_allclose(middle.y, np.median(curves[0, 0], 0), rtol=1e-6)
    low, high = np.quantile(curves[0, 0], [0.05, 0.95], 0)
    np.testing.assert_allclose(area.y, [*high, *low[::-1]], rtol=1e-6)
    assert "median over heads" in drawn.layout.meta["subtitle"]


def test_rows_are_heads_and_of_many_heads_their_layers_means():
    array = xr.DataArray(np.arange(2 * 100 * 3.0).reshape(2, 100, 3), {"layer": [4, 7]}, ("layer", "head", "plane"))
    array = array.assign_coords(head=range(100))
    few, many = (by_head(one).transpose(..., "plane") for one in (array.isel(head=[5, 6]), array))
    assert few["head"].values.tolist() == ["L4H5", "L4H6", "L7H5", "L7H6"]
    np.testing.assert_array_equal(few.values, array.values[:, 5:7].reshape(4, 3))
    assert many["layer"].values.tolist() == [4, 7]
    np.testing.assert_allclose(many.values, array.values.mean(1))
    assert "mean over the heads of each layer" in said_of_rows(many)
    assert said_of_rows(few) == ""
