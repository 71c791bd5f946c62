"""Results: tables, disk, and refusals."""

import numpy as np
import pytest
import xarray as xr

from tl_posgen.errors import InputError, OutputError
from tl_posgen.result import Result, load


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


def test_a_result_without_a_view_of_its_own_is_drawn_as_head_maps(result):
    figure = result.plot()
    assert len(figure.data) == 2
    assert "m" in figure.layout.title.text


def test_a_result_without_token_view_says_so(result):
    with pytest.raises(InputError, match="plot"):
        result.show()
