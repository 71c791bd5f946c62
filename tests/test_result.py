"""Results: tables, disk, and refusals."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core.netcdf import netcdf_bytes
from tl_posgen.core.report import Report, load
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError, OutputError
from tl_posgen.report.unknown import unknown_measure


@pytest.fixture
def result():
    heads = {"layer": [0, 2], "head": [0, 1, 3]}
    data = xr.Dataset(
        {"r": (("layer", "head"), np.arange(6.0).reshape(2, 3)), "curve": (("layer", "head", "d"), np.ones((2, 3, 4)))},
        heads,
        attrs={"model": "m"},
    )
    return Result("someones_measure", data, (data * 0,), {"model": "m", "null_seeds": [0]})


def test_the_frame_has_a_row_a_head_and_a_column_a_scalar(result):
    frame = result.frame()
    assert frame.columns.tolist() == ["layer", "head", "r"]
    assert frame.to_numpy().tolist()[3] == [2, 0, 3.0]
    assert (result.frame(null=True)["r"] == 0).all()


def test_rows_can_be_something_else_than_heads():
    data = xr.Dataset({"loss": (("condition",), [1.0, 2.0])}, {"condition": ["a", "b"]}, attrs={"rows": "condition"})
    assert Result("curve", data).frame().to_dict("list") == {"condition": ["a", "b"], "loss": [1.0, 2.0]}


def test_a_missing_null_is_named(result):
    with pytest.raises(InputError, match="null_seeds"):
        Result("x", result.dataset).frame(null=True)


def test_saving_and_loading_keeps_everything(result, tmp_path):
    loaded = load(result.save(tmp_path / "r.nc"))["someones_measure"]
    xr.testing.assert_identical(loaded.dataset, result.dataset)
    xr.testing.assert_equal(loaded.null, result.null)
    assert loaded.provenance == result.provenance


def test_what_was_loaded_needs_no_file(tmp_path):
    """A variable that is called as its measure is, too."""
    data = xr.Dataset({"coupling": (("layer", "head"), np.arange(4.0).reshape(2, 2)), "other": 1.0})
    path = Result("coupling", data, (data + 1,)).save(tmp_path / "coupling.nc")
    loaded = load(path)["coupling"]
    path.unlink()
    xr.testing.assert_equal(loaded.dataset, data)
    xr.testing.assert_equal(loaded.null, data + 1)


def test_a_failed_save_leaves_nothing_behind(result, tmp_path):
    broken = Result("x", result.dataset, (), {"unserialisable": object()})
    with pytest.raises(TypeError):
        broken.save(tmp_path / "r.nc")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_keeps_the_file_that_was_there(result, tmp_path):
    path = result.save(tmp_path / "r.nc")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Result("x", result.dataset, (), {"unserialisable": object()}).save(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(result, tmp_path):
    with pytest.raises(OutputError, match="nowhere"):
        result.save(tmp_path / "nowhere" / "r.nc")


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


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_refused(whole, count):
    data, loading = whole
    ends = [*range(0, 64), *range(8 * len(data) - 8 * 90, 8 * len(data))]
    for bit in [*ends, *np.random.default_rng(count).integers(0, 8 * len(data), count)]:
        with pytest.raises(InputError, match=r"r\.nc: (damaged|not a results file|ends without)"):
            loading(flipped(data, int(bit)))


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_file_cut_short_or_with_more_behind_it_is_refused(whole, count):
    data, loading = whole
    for size in [
        *range(10),
        *range(len(data) - 90, len(data)),
        *np.random.default_rng(1).integers(0, len(data), count),
    ]:
        with pytest.raises(InputError, match=r"r\.nc: (not a results file|ends without)"):
            loading(data[: int(size)])
    for more in (b"\n", data, data[-90:]):
        with pytest.raises(InputError, match=r"r\.nc: (damaged|ends without)"):
            loading(data + more)


def test_nothing_damaged_is_parsed(whole, monkeypatch):
    data, loading = whole
    monkeypatch.setattr(xr, "open_groups", lambda *_, **__: pytest.fail("a damaged file was parsed"))
    with pytest.raises(InputError, match="damaged"):
        loading(flipped(data, 4 * len(data)))


@pytest.mark.parametrize("error", [MemoryError, OverflowError, RecursionError, KeyError, RuntimeError("two\nlines")])
def test_whatever_a_parser_raises_is_one_line_that_names_the_file(whole, monkeypatch, error):
    data, loading = whole

    def failing(*_, **__):
        raise error

    monkeypatch.setattr(xr, "open_groups", failing)
    with pytest.raises(InputError, match=r"r\.nc: cannot be read") as caught:
        loading(data)
    assert "\n" not in str(caught.value)


FOREIGN = {
    "without a format": ({}, "cannot be read"),
    "of a later format": ({"format": 2, "order": "[]", "provenance": "{}"}, "saved in format 2 by another version"),
    "without an order": ({"format": 1, "provenance": "{}"}, "cannot be read"),
    "with a result that is not there": ({"format": 1, "order": '["r"]', "provenance": "{}"}, "cannot be read"),
    "with a name that leads elsewhere": ({"format": 1, "order": '[".."]', "provenance": "{}"}, "cannot be read"),
    "with a nested order": ({"format": 1, "order": "[" * 100_000, "provenance": "{}"}, "cannot be read"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_version_or_maker_is_refused(tmp_path, case):
    """Its checksum fits."""
    attributes, message = FOREIGN[case]
    (tmp_path / "r.nc").write_bytes(netcdf_bytes({"/": xr.Dataset(attrs=attributes)}))
    with pytest.raises(InputError, match=message):
        load(tmp_path / "r.nc")


def test_xarray_opens_the_file_by_itself(result, tmp_path):
    path = result.save(tmp_path / "r.nc")
    with xr.open_datatree(path) as tree:
        assert tree.attrs["format"] == 1
        np.testing.assert_equal(tree["someones_measure/r"].values, result.dataset["r"].values)


@pytest.mark.parametrize("name", ["a/b", "..", "", "null", "a b"])
def test_a_name_that_is_no_name_is_refused(result, name):
    with pytest.raises(InputError, match="its name must be"):
        Result(name, result.dataset)


def test_a_report_holds_results_under_their_own_names(result):
    with pytest.raises(InputError, match="someones_measure is given under the name 'other'"):
        Report({"other": result}, {})


def test_a_report_is_written_whole_or_not_at_all(result, tmp_path):
    report = Report({result.name: result}, {"model": "m"})
    report.write(tmp_path / "there")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    assert set(before) == {"index.html", "summary.json", "results.nc"}

    def findings(own, null):
        raise KeyError("share")

    broken = dataclasses.replace(unknown_measure(result.name), findings=findings)
    failing = Report({result.name: dataclasses.replace(result, declared=broken)}, {"model": "m"})
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


def test_a_result_without_a_view_of_its_own_is_drawn_as_head_maps(result):
    figure = result.plot()
    assert len(figure.data) == 2
    assert "m" in figure.layout.title.text


def test_a_result_without_token_view_says_so(result):
    with pytest.raises(InputError, match="plot"):
        result.show()
