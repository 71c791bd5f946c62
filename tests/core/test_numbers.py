"""Numbers against plain numpy: means at labels, intervals by each kind of dim, random inits, their text."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr

from tl_posgen.core.formatting import format_bound, format_number
from tl_posgen.core.measure import ENDS, TOKENS, Measure, Variable
from tl_posgen.core.number import HeadNumber, Number
from tl_posgen.core.numbers import Numbers, leave_one_out, mean_over
from tl_posgen.errors import InputError
from tl_posgen.stats.intervals import jackknife_interval, mean_interval

RNG = np.random.default_rng(0)
GROUPS = 5
SHARES = np.array([0.3, 0.2, 0.2, 0.2, 0.1])


@dataclass(frozen=True)
class MadeUp(Measure):
    """x = x."""

    variables = {
        "r": Variable("r", dims=("tokens", "layer", "head"), interval=True, bounds=(-1, 1)),
        "loss": Variable("loss", "nats", dims=("condition", "prompt")),
        "score": Variable("score", dims=("kind", "item")),
        "gain": Variable("gain", dims=("kind", "end")),
        "alone": Variable("of the model alone", dims=("kind",)),
    }

    def usual(self):
        return {"condition": "few"}


@pytest.fixture(scope="module")
def data():
    sizes = {"init": 3, "group": 1 + GROUPS, "tokens": 2, "layer": 2, "head": 3, "condition": 2, "prompt": 6}
    sizes |= {"kind": 2, "item": 7, "end": 3}
    dims = {
        "r": ("init", "group", "tokens", "layer", "head"),
        "loss": ("init", "condition", "prompt"),
        "score": ("init", "kind", "item"),
        "gain": ("init", "kind", "end"),
        "alone": ("kind",),
    }
    arrays = {name: (one, RNG.uniform(0.2, 0.9, [sizes[dim] for dim in one])) for name, one in dims.items()}
    coords = {
        "init": ["trained", "0", "3"], "init_label": ("init", ["m", "a", "b"]), "tokens": list(TOKENS),
        "group": ["all", *map(str, range(GROUPS))], "prompt_share": ("group", [np.nan, *SHARES]),
        "layer": [1, 4], "head": [0, 2, 5], "condition": ["few", "many"], "kind": ["a", "b"], "end": list(ENDS),
    }  # fmt: skip
    return xr.Dataset(arrays, coords)


@pytest.fixture(scope="module")
def own(data):
    return Numbers(MadeUp(), data)


def same(number, value, low, high, inits):
    np.testing.assert_allclose([number.value, number.low, number.high], [value, low, high])
    np.testing.assert_allclose(number.inits, inits)


def test_a_number_has_the_jackknife_of_groups_students_interval_of_prompts_and_items_or_its_own_ends(own, data):
    means = data["r"].sel(tokens="without first").values.mean((-1, -2))  # [init, group]
    ends = jackknife_interval(means[0, :1].mean(), means[0, 1:], SHARES, (-1, 1))
    same(own("r", tokens="without first"), means[0, 0], *map(float, ends), means[1:, 0])
    loss = data["loss"].values[:, 0]
    same(own("loss"), loss[0].mean(), *map(float, mean_interval(loss[0])), loss[1:].mean(1))
    score = data["score"].values.mean(1)
    same(own("score"), score[0].mean(), *map(float, mean_interval(score[0])), score[1:].mean(1))
    gain = data["gain"].values
    same(own("gain", kind="b"), *gain[0, 1], gain[1:, 1, 0])
    same(own("gain"), gain[0, :, 0].mean(), np.nan, np.nan, gain[1:, :, 0].mean(1))  # a mean has no ends of its own


def test_labels_are_the_usual_ones_and_none_averages(own, data):
    assert own("r").value == pytest.approx(data["r"].values[0, 0, 0].mean())
    assert own("r", tokens=None, layer=4).value == pytest.approx(data["r"].values[0, 0, :, 1].mean())
    assert own("loss", condition=None).value == pytest.approx(data["loss"].values[0].mean())
    assert own("alone").inits == ()
    for is_in, label in ((False, "without first"), (True, "all")):
        assert own("r", first_token=is_in).value == own("r", tokens=label).value


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        ("r", {"tokens": "zzz"}, "made_up.r: no tokens 'zzz'; it has all, without first"),
        ("r", {"bogus": "x"}, "made_up.r has no dim 'bogus'; it has init, group, tokens, layer, head"),
        ("r", {"bogus": None}, "made_up.r has no dim 'bogus'; it has init, group, tokens, layer, head"),
        ("r", {"layer": 2}, "made_up.r: no layer 2; it has 1, 4"),
        ("r", {"layer": [1, 2]}, "made_up.r: no layer [1, 2]; it has 1, 4"),
        ("loss", {"tokens": "without first"}, "made_up.loss has no dim 'tokens'; it has init, condition, prompt"),
        ("loss", {"prompt": 6}, "made_up.loss: no prompt 6; it has 0, 1, 2, 3, 4, 5"),
        ("loss", {"prompt": "first"}, "made_up.loss: no prompt 'first'; it has 0, 1, 2, 3, 4, 5"),
        ("s", {}, "made_up has no 's'; it has r, loss, score, gain, alone"),
        (
            "r",
            {"first_token": "no"},
            "first_token='no': give True or False, or tokens= instead, one of all, without first",
        ),
        (
            "r",
            {"first_token": False, "tokens": "all"},
            "first_token=False: give True or False, or tokens= instead, one of all, without first",
        ),
        ("loss", {"first_token": False}, "made_up.loss has no dim 'tokens'; it has init, condition, prompt"),
    ],
)
def test_dims_and_labels_that_a_variable_lacks_are_refused(own, name, labels, said):
    for choose in (own, own.array, own.intervals, own.extreme, own.of_inits):
        with pytest.raises(InputError) as refused:
            choose(name, **labels)
        assert str(refused.value) == said


def test_expressions_have_intervals_and_random_inits_as_variables_have(own, data):
    ratio = own.array("r", head=0) / own.array("r", head=5)
    values = data["r"].values[:, :, 0]
    expected = (values[..., 0] / values[..., 2]).mean(-1)  # [init, group]
    ends = jackknife_interval(expected[0, :1].mean(), expected[0, 1:], SHARES)
    same(own.number(ratio), expected[0, 0], *map(float, ends), expected[1:, 0])


def test_functions_of_means_over_prompts_leave_each_prompt_out(data):
    loss = data["loss"].sel(init="trained", condition="few")
    groups = leave_one_out(loss)
    assert groups.sel(group="all").item() == pytest.approx(loss.values.mean())
    for n in range(6):
        assert groups.sel(group=str(n)).item() == pytest.approx(np.delete(loss.values, n).mean())
    assert groups["prompt_share"].values[1:].tolist() == [1 / 6] * 6


def test_intervals_at_every_place_are_those_of_each_place(own, data):
    found = own.intervals("r", tokens="without first")
    for layer, head in ((1, 0), (4, 5)):
        number = own("r", tokens="without first", layer=layer, head=head)
        at = [found[end].sel(layer=layer, head=head).item() for end in ENDS]
        np.testing.assert_allclose(at, [number.value, number.low, number.high])


def test_extremes_name_their_head(own, data):
    r = data["r"].values[0, 0, 0]
    for largest, place in ((True, r.argmax()), (False, r.argmin())):
        found = own.extreme("r", largest)
        layer, head = np.unravel_index(place, r.shape)
        assert (found.layer, found.head) == ([1, 4][layer], [0, 2, 5][head])
        assert f"{found:.3f}" == f"L{found.layer}H{found.head} ({r.flat[place]:.3f})"
    nowhere = Numbers(MadeUp(), data.assign(r=data["r"] * np.nan))
    assert f"{nowhere.extreme('r'):.3f}" == "none"


def test_numbers_of_random_inits_are_means_with_standard_deviations(own, data):
    means = data["r"].values[1:, 0, 0].mean((-1, -2))
    null = own.of_inits("r")
    assert null.value == pytest.approx(means.mean())
    assert null.spread == pytest.approx(means.std(ddof=1))
    assert f"{null.with_interval:.3f}" == f"{means.mean():.3f} ± {means.std(ddof=1):.3f}"
    assert null.inits == ()


def test_frames_have_the_value_of_each_row(own, data):
    columns = {"r": own.array("r"), "alone": own.array("alone", kind="a")}
    frame = own.frame({"r": columns["r"]}, "layer")
    assert frame["r"].tolist() == pytest.approx(data["r"].values[0, 0, 0].mean(1).tolist())
    null = own.of_inits.frame({"r": columns["r"]}, "layer")
    assert null["r"].tolist() == pytest.approx(data["r"].values[1:, 0, 0].mean((0, 2)).tolist())
    assert isinstance(frame, pd.DataFrame)


def test_the_summary_has_every_place_of_few_labels(own, data):
    found = own.summary()
    assert [one["name"] for one in found] == ["r"] * 2 + ["loss"] * 2 + ["score"] * 2 + ["gain"] * 2 + ["alone"] * 2
    assert found[1] == {"name": "r", "tokens": "without first"} | own("r", tokens="without first").as_dict()
    many = xr.Dataset({"r": (("init", "distance"), np.ones((1, 17)))}, {"init": ["trained"], "distance": range(17)})
    assert Numbers(MadeUp(), many).summary() == []


def test_the_summary_of_two_reports_takes_each_with_its_own_groups():
    """One report has five groups of prompts, the other four, so that its last share is NaN."""
    few = np.array([0.4, 0.3, 0.2, 0.1])
    shares = np.array([[np.nan, *SHARES], [np.nan, *few, np.nan]])
    values = RNG.uniform(0.2, 0.9, (1, 2, 1 + GROUPS))
    values[0, 1, -1] = np.nan
    coords = {"init": ["trained"], "report": ["a", "b"], "group": ["all", *map(str, range(GROUPS))]}
    data = xr.Dataset({"value": (("init", "report", "group"), values)}, coords)
    found = Numbers(MadeUp(), data.assign_coords(prompt_share=(("report", "group"), shares))).summary()
    ends = [jackknife_interval(values[0, 0, 0], values[0, 0, 1:], SHARES)]
    ends.append(jackknife_interval(values[0, 1, 0], values[0, 1, 1:5], few))
    assert [one["report"] for one in found] == ["a", "b"]
    np.testing.assert_allclose([[one["low"], one["high"]] for one in found], ends)


# As text


@pytest.mark.parametrize("form", [".3f", ".1%", "+.2f", ".0%", "+.3f"])
def test_a_zero_has_no_minus_sign(form):
    zero, expected = Number(-1e-9, -1e-9, -0.0, {"random init": (-1e-9,)}), format(0.0, form)
    assert f"{zero:{form}}" == f"{expected} [{expected}, {expected}] (random init {expected})"


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_number_that_is_not_defined_is_said_to_be(value):
    assert format_number(value, ".3f") == "not defined"
    assert f"{Number(math.nan).plain:.3f}" == "not defined"
    assert not Number(math.nan)
    assert Number(0.0)
    assert format_bound([0.2, math.nan]) == format_bound([math.nan, 0.2]) == "not defined"


def test_a_group_without_which_a_head_is_undefined_leaves_no_interval_of_the_mean():
    values = np.array([[1.0, 3.0], [1.1, 3.1], [0.9, np.nan], [1.0, 2.9], [1.0, 3.0]])
    whole = xr.DataArray(values, {"group": ["all", "0", "1", "2", "3"]}, ("group", "head"))
    assert mean_over(whole, ["head"]).isnull().values.tolist() == [False, False, True, False, False]


def test_random_inits_without_a_value_are_left_out():
    number = Number(1.0, by_null={"random init": (1.0, math.nan, 2.0)})
    assert (number.of_inits.value, number.of_inits.spread) == (1.5, pytest.approx(np.std([1, 2], ddof=1)))
    assert math.isnan(Number(1.0, by_null={"random init": (math.nan,)}).of_inits.value)
    assert number.as_dict() == {"value": 1.0, "low": None, "high": None, "inits": [1.0, None, 2.0], "shuffled": []}


@pytest.mark.usefixtures("unchecked")
def test_a_number_is_json_ready_whatever_holds_it():
    number = Number(np.float32(0.5), None, np.int64(1), {"random init": (np.float32(0.25), None)})
    found = json.loads(json.dumps(number.as_dict()))
    assert [found[name] for name in ("value", "low", "high", "inits")] == [0.5, None, 1, [0.25, None]]


def test_a_huge_number_has_few_digits():
    assert f"{Number(1e300):.2f}" == str(Number(1e300)) == "1.00e+300"
    assert f"{Number(-1e300).plain:+.0%}" == "-1.00e+300"
    assert str(Number(2.0**53 - 1)) == "9007199254740991"


def test_a_number_stands_beside_every_kind_of_null_model():
    number = Number(0.5, 0.4, 0.6, {"random init": (0.1, 0.3), "shuffled": (0.45,)})
    assert f"{number:.2f}" == "0.50 [0.40, 0.60] (random init 0.20 ± 0.14, shuffled 0.45)"
    assert (number.nulls, number.not_above) == ((0.1, 0.3, 0.45), "not above shuffled")
    assert number.as_dict()["shuffled"] == [0.45]
    assert (
        Number(3.0, by_null={"random init": (0.0, 2.0), "shuffled": (1.0,)}).null_range
        == "random init 0 to 2, shuffled 1"
    )
    third = Number(0.5, 0.4, 0.6, {"shuffled matrices": (0.55,)}, judged=True)
    assert f"{third:.2f}" == "0.50 [0.40, 0.60] (shuffled matrices 0.55; not above shuffled matrices)"
    assert third.as_dict()["shuffled_matrices"] == [0.55]


@given(
    st.floats(-1, 1), st.floats(0, 1), st.lists(st.floats(-1, 1), max_size=3), st.lists(st.floats(-1, 1), max_size=2)
)
def test_a_judged_number_says_where_a_null_does_as_well(value, half, inits, shuffled):
    by_null = {"random init": tuple(inits), "shuffled": tuple(shuffled)}
    number = Number(value, value - half, value + half, by_null, judged=True)
    for kind, nulls in (("random init", inits), ("shuffled", shuffled)):
        assert (kind in number.not_above) == (bool(nulls) and value - half <= max(nulls, default=0))
    assert (number.not_above in f"{number:.3f}") or not number.nulls
    assert "not above" not in f"{Number(0.5, by_null={'random init': (0.6,)}):.1f}"
    assert Number(0.5, by_null={"random init": (math.nan, 0.6)}, judged=True).not_above == "not above random init"


def test_layers_are_named_where_the_answer_changes_with_depth():
    class Judged(Measure):
        variables = {"r": Variable("r", judged=True)}

    r = xr.DataArray(np.full((4, 5, 2), 0.5), dims=("init", "layer", "head"))
    r = r.assign_coords(init=["trained", "0", "1", "shuffled 0"], layer=range(5), head=range(2))
    r.loc[{"init": "0", "layer": [1, 2, 3]}] = 0.6  # and as high as the model in layers 0 and 4
    own = Numbers(Judged(), r.to_dataset(name="r"))
    assert own.layers_not_above("r") == ""  # nowhere above
    assert f"{own('r'):.2f}".endswith("not above random init or shuffled)")
    r.loc[{"init": ["0", "1", "shuffled 0"], "layer": [0]}] = 0.4
    own = Numbers(Judged(), r.to_dataset(name="r"))
    assert own.layers_not_above("r") == "; not above random init in layers 1 to 4; not above shuffled in layers 1 to 4"
    shuffled = own.by_null["shuffled"].along(own.array("r"), "layer")
    assert {layer: number.value for layer, number in shuffled.items()} == {0: 0.4, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}


def test_numbers_along_a_dim_are_known_by_its_labels_as_python_has_them(own):
    array = own.array("score", kind=None)
    assert own.along(array, "kind") == {kind: own("score", kind=kind) for kind in ("a", "b")}
    assert [*own.along(array.drop_vars("kind"), "kind")] == [0, 1]
    assert [*own.along(array.assign_coords(kind=[0.5, 2.0]), "kind")] == [0.5, 2.0]
    heads = own.along(own.array("r").stack(place=("layer", "head")), "place")
    assert [*heads] == [(layer, head) for layer in (1, 4) for head in (0, 2, 5)]
    assert heads[4, 2].value == own("r", layer=4, head=2).value
    assert {type(label) for place in heads for label in place} == {int}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 4))
def test_a_bound_holds(values, digits):
    assert float(format_bound(values, digits)) >= max(values) - 1e-6


def test_numbers_print_as_they_are_written_in_sentences(own):
    one = Number(0.917, 0.905, 0.929, {"random init": (0.35,)})
    assert str(one) == one._repr_html_() == f"{one}" == "0.917 [0.905, 0.929] (random init 0.350)"
    assert repr(one) == f"Number({one})"
    assert str(one.plain) == repr(one.plain) == "0.917"
    assert str(HeadNumber(3, 6, one)) == "L3H6 (0.917)"
    assert [str(Number(value)) for value in (0.0, 3e-5, 162985152.0)] == ["0.000", "3e-05", "162985152"]
    printed = str(own).splitlines()
    assert printed[0] == "Numbers of made_up"
    assert f"r: {own('r')}" in printed[1:]
    assert str(own("r")) in own._repr_html_()


@pytest.mark.parametrize("ranks", [False, True])
def test_a_correlation_is_over_the_heads_that_have_both_values_in_every_model(ranks):
    heads = {"init": ["trained", "0", "shuffled 0"], "layer": range(2), "head": range(8)}
    x, y = (xr.DataArray(np.random.default_rng(seed).normal(size=(3, 2, 8)), heads) for seed in range(2))
    y = y + x
    x[0, 0, 0] = np.nan
    own = Numbers(Measure(), xr.Dataset({"x": x, "y": y}))
    found = own.correlation(x, y, ranks=ranks)
    known = [one.values[i].ravel() for one in (x, y) for i in range(3)]
    first, second = known[:3], known[3:]
    r = [
        (spearmanr if ranks else pearsonr)(a[np.isfinite(a)], b[np.isfinite(a)]).statistic
        for a, b in zip(first, second, strict=True)
    ]
    assert [found.value, *found.nulls] == pytest.approx(r)
    reach = 1.96 / np.sqrt(15 - 3)
    assert [found.low, found.high] == pytest.approx(np.tanh(np.arctanh(r[0]) + reach * np.array([-1, 1])))
