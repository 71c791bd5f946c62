"""Declared figures draw the numbers of their variables, with intervals, beside the null models."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.result import Result
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import bars, heat_maps, lines, points

INITS = ["trained", "0", "1", "shuffled 0"]
CONDITIONS = ["unchanged", "no_rope", "means"]
SIZES = {"init": 4, "prompt": 5, "condition": 3, "layer": 2, "head": 3, "layer_2": 2, "k": 2}
DIMS = {
    "loss": ("init", "condition", "prompt"),
    "score": ("init", "layer", "head", "prompt"),
    "other": ("init", "layer", "head", "prompt"),
    "square": ("init", "k", "layer", "layer_2", "prompt"),
}


@dataclass(frozen=True)
class Figures(Measure):
    """1."""

    of: int = 3
    question = "What is drawn?"
    words = {"no_rope": "RoPE removed"}
    variables = {name: Variable(name, dims=dims[1:]) for name, dims in DIMS.items()}


@pytest.fixture(scope="module")
def result():
    draw = np.random.default_rng(1)  # of no constant map: of seed 0 one null model's is so nearly, and is not drawn
    labels = {"init": INITS, "condition": CONDITIONS, "init_label": ("init", ["m", "m, 0", "m, 1", "m, shuffled"])}
    labels |= {dim: range(SIZES[dim]) for dim in ("layer", "head", "prompt", "layer_2")} | {"k": [5, 10]}
    arrays = {name: (dims, draw.normal(size=[SIZES[dim] for dim in dims])) for name, dims in DIMS.items()}
    return Result(Figures(), xr.Dataset(arrays, labels, {"model": "m"}), {})


def nulls_of(result, name, over):
    """The mean over random inits, and that of shuffled weights."""
    means = result.dataset[name].mean(over)
    return means.sel(init=["0", "1"]).mean("init"), means.sel(init="shuffled 0")


def ends(trace, axis):
    value, bar = np.asarray(trace[axis]), trace[f"error_{axis}"]
    return value, value - bar.arrayminus, value + bar.array


def expected_ends(result, name, along):
    numbers = result.numbers.along(result.numbers.array(name), along)
    return [[getattr(one, end) for one in numbers.values()] for end in ("value", "low", "high")]


def test_bars_are_means_over_prompts_with_intervals_beside_both_nulls(result):
    figure = bars({"loss": [("loss", "loss")]}, "condition", title="T", subtitle="of {of}")(result)
    own, *nulls = figure.data
    np.testing.assert_allclose(ends(own, "x"), expected_ends(result, "loss", "condition"))
    assert np.isfinite(own.error_x.array).all()
    assert list(own.y) == ["unchanged", "RoPE removed", "means"]
    for bar, expected in zip(nulls, nulls_of(result, "loss", "prompt"), strict=True):
        np.testing.assert_allclose(bar.x, expected)
    assert figure.layout.title.text.startswith("<b>T · m</b>")
    assert "of 3; 95 % intervals over prompts" in figure.layout.title.text


def test_bars_of_some_labels_stand_at_their_own_names(result):
    some = {"of some": [("means", lambda numbers: numbers.array("loss", condition=None).sel(condition=["means"]))]}
    figure = bars({**some, "of all": [("loss", "loss")]}, "condition", title="T")(result)
    by_name = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in figure.data}
    assert list(by_name["means"]) == ["means"]
    assert by_name["means"]["means"] == by_name["loss"]["means"]
    assert list(by_name["loss"]) == ["unchanged", "RoPE removed", "means"]


def test_lines_are_means_over_heads_and_functions_stand_for_variables(result):
    curves = [("score", "score"), ("twice", lambda numbers: 2 * numbers.array("score"))]
    figure = lines({"one": curves}, title="T")(result)
    np.testing.assert_allclose(ends(figure.data[0], "y"), expected_ends(result, "score", "layer"))
    for curve, expected in zip(figure.data[1:3], nulls_of(result, "score", ("prompt", "head")), strict=True):
        np.testing.assert_allclose(curve.y, expected)
    np.testing.assert_allclose(figure.data[3].y, 2 * figure.data[0].y)
    assert [trace.line.dash for trace in figure.data[:3]] == ["solid", "dash", "dot"]


def test_points_are_heads(result):
    figure = points(("score", {"prompt": 0}), ("other", {"prompt": 0}), title="T", equal=True)(result)
    for trace, init in zip(figure.data[:3], ("trained", "0", "shuffled 0"), strict=True):
        one = result.dataset.sel(init=init, prompt=0)
        np.testing.assert_array_equal((trace.x, trace.y), (one["score"].values.ravel(), one["other"].values.ravel()))
    assert list(figure.data[0].text) == [f"L{layer}H{head}" for layer in range(2) for head in range(3)]
    assert figure.data[3].name == "equal"


def test_heat_maps_have_a_row_a_label_and_a_column_a_side_on_one_scale(result):
    is_null = result.dataset["init"] != "trained"
    wide = result.dataset["square"] * (1 + 9 * is_null)  # a null model's map of little range would be a line
    result = replace(result, dataset=result.dataset.assign(square=wide))
    figure = heat_maps("square", "layer", "layer_2", per=["k"], title="T", diagonal=False)(result)
    off = ~np.eye(2, dtype=bool)
    places = [(k, init) for k in (5, 10) for init in ("trained", "0", "shuffled 0")]
    for trace, (k, init) in zip(figure.data, places, strict=True):
        expected = result.dataset["square"].sel(k=k, init=init).mean("prompt").transpose("layer", "layer_2").values
        np.testing.assert_allclose(trace.z[off], expected[off])
        assert np.isnan(np.diag(trace.z)).all()
    values = np.concatenate([trace.z[off] for trace in figure.data])
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (values.min(), values.max())
    assert figure.layout.annotations[3].text == "m, k = 10"


@pytest.mark.parametrize(
    ("bounds", "limits", "expected"),
    [
        ((None, None), {}, None),
        (((0, 1), None), {}, None),
        (((0, np.inf), (0, 1)), {}, None),
        (((0, 1), (0, 1)), {}, (0, 1)),
        (((-1, 1), (0, 1)), {}, (-1, 1)),
        (((0, 1), (0, 1)), {"limits": None}, None),
        ((None, None), {"limits": (0.0, 5.0)}, (0, 5)),
    ],
)
def test_the_colours_of_a_map_of_heads_span_the_bounds_of_its_variables(monkeypatch, result, bounds, limits, expected):
    names = ("score", "other")
    bounded = {name: replace(Figures.variables[name], bounds=pair) for name, pair in zip(names, bounds, strict=True)}
    monkeypatch.setattr(Figures, "variables", {**Figures.variables, **bounded})
    few = replace(result, dataset=result.dataset.mean("prompt"))
    axis = head_map(*names, title="T", **limits)(few).layout.coloraxis
    drawn = few.dataset[[*names]].sel(init=["trained", "0", "shuffled 0"]).to_array()
    assert (axis.cmin, axis.cmax) == pytest.approx(expected or (float(drawn.min()), float(drawn.max())))


@pytest.mark.parametrize("spread", [0.09, 0.11])
def test_a_null_models_map_that_is_nearly_constant_is_a_line_below_the_models(result, spread):
    data = result.dataset.copy(deep=True)
    for name in ("score", "square"):
        own = data[name].sel(init="trained").mean("prompt")
        own = own.sel(k=5) if "k" in own.dims else own
        steps = np.linspace(0, spread, own.size).reshape(own.shape) * float(own.max() - own.min())
        data[name].loc[{"init": "0"}] = xr.DataArray(steps, own.coords, own.dims).broadcast_like(
            data[name].sel(init="0")
        )
    flat = replace(result, dataset=data)
    drawn = head_map("score", ("other", {}), title="T")
    maps = heat_maps("square", "layer", "layer_2", per=["k"], title="T")
    of_heads = drawn(replace(flat, dataset=data.mean("prompt")))
    is_drawn = spread > 0.1
    assert len(of_heads.data) == 5 + is_drawn
    below = [str(axis.title.text) for axis in of_heads.select_xaxes()]
    assert [("m, 0: between 0 and " in text) for text in below] == [not is_drawn] + [False] * (4 + is_drawn)
    first = maps(flat)  # of the first k; the map of the other k has a range of its own
    assert [title.text for title in first.layout.annotations][:2] == [
        "m, k = 5",
        "m, 0, k = 5" if is_drawn else "m, shuffled, k = 5",
    ]


@pytest.mark.parametrize("highest", [0.5, np.inf])
def test_intervals_of_what_a_function_gives_do_not_leave_its_range(result, highest):
    def centred(numbers):
        loss = numbers.array("loss", condition=None)
        return (loss - loss.mean("prompt")).assign_attrs(range=(-np.inf, highest))

    figure = bars({"loss": [("loss", centred)]}, "condition", title="T")(result)
    _, _, high = ends(figure.data[0], "x")
    assert (high.max() > 0.5) == (highest == np.inf)
