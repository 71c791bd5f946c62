"""Results: tables, disk, and refusals."""

import dataclasses
import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.core.files import netcdf_bytes
from tl_posgen.core.measure import TOKENS, Measure, Variable
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.saved import load, unknown_measure
from tl_posgen.errors import InputError, OutputError
from tl_posgen.position import ThreeAxis


@dataclass(frozen=True)
class SomeonesMeasure(Measure):
    """r = r. It is not registered here."""

    variables = {
        "r": Variable("r", dims=("tokens", "layer", "head"), headline="someones_r"),
        "curve": Variable("curve", dims=("layer", "head", "d")),
        "loss": Variable("loss", "nats", dims=("prompt",)),
    }


def dataset_of(**more):
    sizes = {"init": 2, "tokens": 2, "layer": 2, "head": 3}
    coords = {
        "init": ["trained", "0"], "init_label": ("init", ["m", "random init (seed 0)"]),
        "tokens": list(TOKENS), "layer": [0, 2], "head": [0, 1, 3],
    }  # fmt: skip
    arrays = {
        "r": (tuple(sizes), np.arange(24.0).reshape(*sizes.values())),
        "curve": (("init", "layer", "head", "d"), np.ones((2, 2, 3, 4))),
        "loss": (("init", "prompt"), [[1.0, 2.0], [3.0, 5.0]]),
    }
    return xr.Dataset(arrays | more, coords)


def result_of(**changes):
    whole = {"measure": unknown_measure("someones_measure"), "dataset": dataset_of()}
    return Result(**whole | {"provenance": {"model": "m", "nulls": 1}} | changes)


@pytest.fixture
def result():
    """Of a measure that is not installed."""
    return result_of()


@pytest.fixture
def declared():
    return result_of(measure=SomeonesMeasure())


def test_a_figure_that_prompts_give_nothing_for_is_not_called_undeclared(small_model):
    tokens = torch.tensor([[1, 2, 3]])
    result = tl_posgen.analyze(small_model, tokens, measures="attention_examples", nulls=0, progress=False)
    with pytest.raises(InputError, match="these prompts give nothing to draw as patterns"):
        result["attention_examples"].plot()


def test_the_frame_has_a_row_a_head_and_a_column_a_headline(declared):
    frame = declared.frame()
    assert frame.columns.tolist() == ["layer", "head", "r"]
    assert frame["r"].tolist() == np.arange(6.0).tolist()
    assert frame[["layer", "head"]].to_numpy().tolist()[3] == [2, 0]
    assert declared.frame(tokens="without first")["r"].tolist() == np.arange(6.0, 12).tolist()
    assert declared.frame(first_token=False)["r"].tolist() == np.arange(6.0, 12).tolist()
    assert float(declared.sel(first_token=False)["r"].sum()) == np.arange(6.0, 12).sum()
    assert declared.heads(1, first_token=False)["r"].tolist() == [11]
    assert declared.frame(init=0)["r"].tolist() == np.arange(12.0, 18).tolist()
    assert declared.headline_frame().columns.tolist() == ["layer", "head", "someones_r"]
    assert declared.headline_frame("random init")["someones_r"].tolist() == np.arange(12.0, 18).tolist()
    assert declared.findings() == ["R: 2.500 (random init 14.500)."]  # every headline, where nothing else is said


def test_null_models_are_left_out_by_a_zero_and_a_missing_text_is_named(small_model):
    text = "Down, down, down. Would the fall never come to an end?"
    cut = {"length": 8, "n_prompts": 1, "measures": "three_axis", "progress": False}
    assert tl_posgen.analyze(small_model, text, nulls=0, **cut)["three_axis"].nulls == ()
    for call in (lambda: tl_posgen.analyze(small_model), lambda: ThreeAxis()("no such model")):
        with pytest.raises(InputError, match=r"give the text to measure on .* such as tl_posgen\.bundled_text\(\)"):
            call()


def test_a_result_prints_how_many_heads_and_prompts_it_is_of_and_its_first_sentence(declared):
    assert repr(declared) == "Result(someones_measure; m, 6 heads): R: 2.500 (random init 14.500)."
    provenance = {"model": "m", "prompts": 1, "length": 8, "heads": ["L0H1", "L2H0"]}
    some = result_of(measure=SomeonesMeasure(), provenance=provenance)
    expected = "m, 2 heads, 1 prompt of 8 tokens): R: 2.500 (random init 14.500)."
    assert repr(Report({some.name: some}, provenance)) == f"Report(someones_measure; {expected}"


def test_a_column_is_left_out_of_all_models_or_of_none():
    """Two names of one number in the model; in a null model these differ, and two other numbers agree."""
    sides = {"trained": {"a": 0.5, "b": 0.5, "c": 0.25}, "0": {"a": 0.125, "b": 0.75, "c": 0.125}}
    heads = np.arange(6.0).reshape(2, 3) / 7
    results = {}
    for letter in "abc":

        @dataclass(frozen=True)
        class OfANumber(SomeonesMeasure):
            """r = r."""

            name = f"of_{letter}"
            variables = {"r": Variable("r", dims=("layer", "head"), headline=letter)}

        values = np.stack([side[letter] + heads for side in sides.values()])
        arrays = {"r": (("init", "layer", "head"), values)}
        data = xr.Dataset(arrays, {"init": list(sides), "layer": [0, 1], "head": [0, 1, 2]})
        results[f"of_{letter}"] = Result(OfANumber(), data)
    report = Report(results, {})
    for side in ("trained", "random init"):
        assert report.frame(side).columns.tolist() == ["layer", "head", "a", "c"]
    assert report.summary()["random init"]["mean"].keys() == report.summary()["mean"].keys() == {"a", "c"}


def test_whole_numbers_stay_such_in_tables_of_a_few_heads(small_model):
    how = {"measures": "slash", "heads": [(0, 1), (1, 3)], "nulls": 0, "progress": False}
    report = tl_posgen.analyze(small_model, "Down, down, down. Would the fall never end?", **how)
    slash = report["slash"]
    for table in (slash.frame(), slash.headline_frame(), slash.heads(2), report.frame()):
        (column,) = set(table) & {"slash_distance"}
        assert len(table) == 2
        assert table[column].dtype == int


def test_heads_are_chosen_by_the_name_that_a_report_gives_a_headline(declared):
    headline = declared.measure.variables["r"].headline
    assert headline != "r"
    by_name, by_headline = (declared.heads(2, by=by) for by in ("r", headline))
    assert by_headline.columns.tolist() == ["layer", "head", headline]
    assert by_headline.to_numpy().tolist() == by_name.to_numpy().tolist()


def test_whole_numbers_stay_such_under_either_name(small_model):
    text = "Down, down, down. Would the fall never come to an end?"
    result = tl_posgen.analyze(small_model, text, measures="slash", nulls=0, progress=False)["slash"]
    assert result.measure.variables["slash_distance"].headline == "slash_distance"
    assert result.heads(2, by="slash_distance")["slash_distance"].dtype == int


def test_heads_are_chosen_by_any_quantity_of_one_number_a_head(declared):
    assert declared.heads(2).to_dict("list") == {"layer": [2, 2], "head": [3, 1], "r": [5.0, 4.0]}
    assert declared.heads(1, tokens="without first")["r"].tolist() == [11.0]
    with pytest.raises(InputError, match="by='loss': someones_measure has, per head, r, curve"):
        declared.heads(by="loss")
    with pytest.raises(InputError, match="by='curve' has a value for each d: give d="):
        declared.heads(by="curve")
    assert len(declared.heads(None)) == len(declared.frame())
    assert declared.heads(1, lowest=True)["r"].tolist() == [declared.heads(None)["r"].min()]
    for top in (0, -1, True):
        with pytest.raises(InputError, match=f"top = {top}: give a whole number, 1 or more"):
            declared.heads(top)


def test_a_control_has_as_many_other_heads_of_the_same_layers():
    values = np.arange(12.0).reshape(3, 4)
    values[0, 0] = 20
    data = xr.Dataset({"r": (("layer", "head"), values)}, {"layer": range(3), "head": range(4)})
    result = Result(SomeonesMeasure(), data.expand_dims(init=["trained"]))
    top = result.heads(4)[["layer", "head"]]
    assert top["layer"].tolist() == [0, 2, 2, 2]
    drawn = [result.heads(4, random=seed) for seed in range(20)]
    for control in drawn:
        assert not set(map(tuple, top.values)) & set(map(tuple, control[["layer", "head"]].values))
        assert control["layer"].value_counts()[[0, 2]].tolist() >= [1, 1]  # layer 2 has one other head
        assert (control["layer"] == 0).any()
    assert len({tuple(control["r"]) for control in drawn}) > 5
    assert drawn[0].equals(result.heads(4, random=0))
    given = ["L1H0", "L0H1"]
    control = result.heads(random=0, other_than=given)
    assert control["layer"].tolist() == [0, 1] or control["layer"].tolist() == [1, 0]
    assert not {"L1H0", "L0H1"} & {f"L{layer}H{head}" for layer, head in control[["layer", "head"]].to_numpy()}
    with pytest.raises(InputError, match="other_than is of a control: give random="):
        result.heads(other_than=given)
    with pytest.raises(InputError, match="random = -1: give a whole number, 0 or more"):
        result.heads(4, random=-1)
    with pytest.raises(InputError, match="beside the 7 heads there are 5 others"):
        result.heads(7, random=0)


STRINGS = ["a\0b", "\0", "end\0", "\x01\x1b[31m", "\u202eright\u200f", "\r\n", "", "\ufffe", 'tl_posgen json "x"']
HALVES = ["\ud800", "half \udfff of a pair"]  # which pandas takes as numpy's strings alone


def test_every_string_comes_back_equal_from_every_file(tmp_path):
    """As a token, as a label, in attributes of arrays and datasets, in provenance."""
    tokens, every = np.array(STRINGS, dtype=object), [*STRINGS, *HALVES]
    data = dataset_of(token=("name", tokens), half=("other", np.array(HALVES)), at=("name", np.ones(len(tokens))))
    data = data.assign_coords(name=tokens, other=HALVES).assign_attrs(edited=every[0], every=every)
    data["at"].attrs |= {f"a{place}": text for place, text in enumerate(every)}
    words = {"model": f"m {'|'.join(every)}"}
    path = Report({"someones_measure": result_of(dataset=data, provenance=words)}, words).write(tmp_path / "there")
    found = load(path.parent)
    loaded = found["someones_measure"].dataset
    assert [*loaded["token"].values] == [*loaded["name"].values] == STRINGS
    assert [*loaded["half"].values] == [*loaded["other"].values] == HALVES
    assert loaded.attrs == data.attrs
    assert {f"a{place}": text for place, text in enumerate(every)}.items() <= loaded["at"].attrs.items()
    assert found.provenance == found["someones_measure"].provenance == words
    assert json.loads((path.parent / "summary.json").read_bytes())["model"] == words["model"]
    page = path.read_bytes().decode()
    assert not re.search("[\0-\x08\x0b-\x0c\x0e-\x1f]", page)  # which HTML drops
    assert r"m a\u0000b|\u0000|end\u0000|\u0001\u001b[31m|\u202eright" in page.replace("\u202e", r"\u202e")


def test_a_measure_of_this_session_reads_its_saved_result_as_it_was_defined_last(tmp_path):
    def define(words):
        @dataclass(frozen=True)
        class OfANotebook(Measure):
            """r = r."""

            power: int = 1

            def findings(self, numbers):
                return [f"{words} at power {self.power}: {numbers('r').plain:.1f}"]

        return OfANotebook

    first = define("first")
    path = result_of(measure=first(power=3), provenance={"options": {"power": 3}}).save(tmp_path / "r.nc")
    assert load(path)["of_a_notebook"].findings() == ["first at power 3: 2.5"]
    unknown_measure("of_a_notebook")  # what stands in for one that is not there is none
    second = define("second")
    found = load(path)["of_a_notebook"]
    assert found.measure == second(power=3)
    assert found.findings() == ["second at power 3: 2.5"]


def test_a_save_that_fails_keeps_the_file_that_was_there(result, tmp_path):
    path = result.save(tmp_path / "r.nc")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        result_of(provenance={"unserialisable": object()}).save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"not a results file"])
def test_a_file_that_is_no_results_file_is_refused(tmp_path, content):
    path = tmp_path / "r.nc"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"r\.nc"):
        load(path)


@pytest.fixture
def whole(result, tmp_path):
    """The bytes of a saved file, and a function that loads other ones in their place."""
    path = result.save(tmp_path / "r.nc")

    def loading(data):
        path.write_bytes(data)
        return load(path)

    return path.read_bytes(), loading


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_refused_before_anything_is_parsed(whole, monkeypatch, count):
    data, loading = whole
    monkeypatch.setattr(xr, "open_groups", lambda *_, **__: pytest.fail("a damaged file was parsed"))
    step = 7 if count < 1000 else 1
    ends = [*range(0, 64, step), *range(8 * len(data) - 8 * 90, 8 * len(data), step)]
    for bit in [*ends, *np.random.default_rng(count).integers(0, 8 * len(data), count)]:
        with pytest.raises(InputError, match=r"r\.nc: (damaged|not a results file|ends without)"):
            loading(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << int(bit) % 8]) + data[bit // 8 + 1 :])


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_file_cut_short_or_with_more_behind_it_is_refused(whole, count):
    data, loading = whole
    ends = [*range(10), *range(len(data) - 90, len(data))]
    for size in [*ends, *np.random.default_rng(1).integers(0, len(data), count)]:
        with pytest.raises(InputError, match=r"r\.nc: (not a results file|ends without)"):
            loading(data[: int(size)])
    for more in (b"\n", data, data[-90:]):
        with pytest.raises(InputError, match=r"r\.nc: (damaged|ends without)"):
            loading(data + more)


FOREIGN = {
    "without a format": ({}, "cannot be read"),
    "of a later format": ({"format": 5, "order": "[]", "provenance": "{}"}, "saved in format 5 by another version"),
    "of version 0.2": ({"format": 1, "order": "[]", "provenance": "{}"}, r"by tl_posgen 0\.2.*measure again, or load"),
    "of version 0.3": ({"format": 2, "order": "[]", "provenance": "{}"}, r"by tl_posgen 0\.3.*or load it with tl_.*3$"),
    "of version 0.4": ({"format": 3, "order": "[]", "provenance": "{}"}, r"by tl_posgen 0\.4.*or load it with tl_.*4$"),
    "without an order": ({"format": 4, "provenance": "{}"}, "cannot be read"),
    "with a result that is not there": ({"format": 4, "order": '["r"]', "provenance": "{}"}, "cannot be read"),
    "with a name that leads elsewhere": ({"format": 4, "order": '[".."]', "provenance": "{}"}, "cannot be read"),
    "with a nested order": ({"format": 4, "order": "[" * 100_000, "provenance": "{}"}, "cannot be read"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_version_or_maker_is_refused(tmp_path, case):
    attributes, message = FOREIGN[case]
    (tmp_path / "r.nc").write_bytes(netcdf_bytes({"/": xr.Dataset(attrs=attributes)}))
    with pytest.raises(InputError, match=message):
        load(tmp_path / "r.nc")


def test_xarray_opens_the_file_by_itself(result, tmp_path):
    path = result.save(tmp_path / "r.nc")
    with xr.open_datatree(path) as tree:
        assert tree.attrs["format"] == 4
        np.testing.assert_equal(tree["someones_measure/r"].values, result.dataset["r"].values)


@pytest.mark.parametrize("name", ["a/b", "..", "", "null", "a b"])
def test_a_name_that_is_no_name_is_refused(name):
    with pytest.raises(InputError, match="its name must be"):
        type(name, (Measure,), {})


def test_a_report_holds_results_under_their_own_names(result):
    with pytest.raises(InputError, match="someones_measure is given under the name 'other'"):
        Report({"other": result}, {})


def test_a_report_is_written_whole_or_not_at_all(result, tmp_path):
    report = Report({result.name: result}, {"model": "m"})
    report.write(tmp_path / "there")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    assert set(before) == {"index.html", "summary.json", "results.nc"}

    class SomeonesMeasure(Measure):
        """x = x."""

        def findings(self, numbers):
            raise KeyError("share")

    failing = Report({result.name: dataclasses.replace(result, measure=SomeonesMeasure())}, {"model": "m"})
    for directory in ("there", "elsewhere"):
        with pytest.raises(KeyError):
            failing.write(tmp_path / directory)
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before
    assert not (tmp_path / "elsewhere").exists()


def test_another_report_is_replaced_only_by_force(result, tmp_path):
    report = Report({result.name: result}, {"model": "m"})
    report.write(tmp_path)
    report.write(tmp_path)  # its own of before
    other = Report({result.name: result}, {"model": "another"})
    with pytest.raises(OutputError, match=r"another run's index\.html; choose another place, or give force=True"):
        other.write(tmp_path)
    assert load(tmp_path).provenance == {"model": "m"}
    other.write(tmp_path, force=True)
    assert load(tmp_path).provenance == {"model": "another"}
    (tmp_path / "results.nc").write_bytes(b"damaged")
    with pytest.raises(OutputError, match="holds another run's"):
        other.write(tmp_path)


@pytest.mark.parametrize("error", [MemoryError, OverflowError, RecursionError, KeyError, RuntimeError("two\nlines")])
def test_whatever_a_parser_raises_is_one_line_that_names_the_file(whole, monkeypatch, error):
    data, loading = whole

    def failing(*_, **__):
        raise error

    monkeypatch.setattr(xr, "open_groups", failing)
    with pytest.raises(InputError, match=r"r\.nc: cannot be read") as caught:
        loading(data)
    assert "\n" not in str(caught.value)


def test_large_arrays_are_stored_in_single_precision_and_said_to_be(result, tmp_path):
    many = np.random.default_rng(0).normal(size=2**17)
    beyond = np.where(many > 3, 1e39, np.where(many < -3, -np.inf, many))
    dataset = result.dataset.assign(many=("place", many), few=("some", many[:9]), beyond=("place", beyond))
    path = Result(result.measure, dataset, result.provenance).save(tmp_path / "r.nc")
    with xr.open_datatree(path) as tree:
        assert tree[result.name]["many"].dtype == np.float32
        assert "seven digits" in tree[result.name]["many"].attrs["stored"]
    again = load(path)[result.name].dataset
    assert again["many"].dtype == np.float64
    assert again["many"].attrs == {}
    np.testing.assert_allclose(again["many"], many, rtol=1e-6)
    np.testing.assert_array_equal(again["few"], many[:9])
    np.testing.assert_array_equal(again["beyond"], beyond)  # which float32 does not hold
