"""Two reports side by side: differences per head, with intervals that are paired where the prompts are the same."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.cli import main
from tl_posgen.errors import InputError
from tl_posgen.models.tokens import bundled_text

pytestmark = pytest.mark.slow

MEASURES = ["three_axis", "variance", "loss"]
QUICK = {"measures": MEASURES, "length": 24, "n_prompts": 5, "progress": False}


@pytest.fixture(scope="module")
def intact():
    return tl_posgen.analyze("mini", bundled_text(), **QUICK)


@pytest.fixture(scope="module")
def ablated():
    """The attention of layer 1 writes nothing: layers 2 and 3 see other inputs."""
    model = tl_posgen.load_model("mini")
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    return tl_posgen.analyze(model, bundled_text(), **QUICK)


@pytest.fixture(scope="module")
def elsewhere():
    return tl_posgen.analyze("mini", bundled_text()[30_000:], **QUICK)


def test_differences_are_those_of_the_reports(intact, ablated):
    data = tl_posgen.compare(intact, ablated)["comparison"].dataset
    for number in data["number"].values:
        name, variable = number.split(".")
        expected = ablated[name].dataset[variable] - intact[name].dataset[variable]
        xr.testing.assert_allclose(data["difference"].sel(number=number, drop=True), expected, atol=1e-12)
        assert float(data["mean_difference"].sel(number=number)) == pytest.approx(float(expected.mean()), abs=1e-12)
    assert {"three_axis.r", "variance.position", "variance.additive_r"} <= set(data["number"].values)
    assert float(abs(data["difference"].sel(layer=[0, 1])).max()) == 0  # the ablation comes after them


def test_paired_intervals_are_those_of_the_difference_prompt_by_prompt(intact, ablated):
    data = tl_posgen.compare(intact, ablated)["comparison"].dataset.sel(number="three_axis.r")
    change = (ablated["three_axis"].dataset["r_per_prompt"] - intact["three_axis"].dataset["r_per_prompt"]).values
    half = 2.7764 * change.std(0, ddof=1) / np.sqrt(5)  # Student's interval: r is a mean over prompts
    np.testing.assert_allclose(data["difference_low"], change.mean(0) - half, atol=1e-9)
    np.testing.assert_allclose(data["difference_high"], change.mean(0) + half, atol=1e-9)
    means = change.mean((1, 2))
    half = 2.7764 * means.std(ddof=1) / np.sqrt(5)
    assert float(data["mean_difference_high"]) == pytest.approx(means.mean() + half, abs=1e-9)


def test_of_other_prompts_half_widths_add_as_squares(intact, elsewhere):
    found = tl_posgen.compare(intact, elsewhere)["comparison"]
    assert not found.summary["paired"]
    data = found.dataset.sel(number="three_axis.r")
    half = [(one["r_high"] - one["r_low"]) / 2 for one in (side["three_axis"].dataset for side in (intact, elsewhere))]
    width = data["difference_high"] - data["difference_low"]
    np.testing.assert_allclose(width / 2, np.hypot(*half), atol=1e-9)


def test_the_null_is_the_same_difference_between_random_inits(intact, elsewhere):
    (null,) = tl_posgen.compare(intact, elsewhere)["comparison"].nulls
    first, second = (one["variance"].nulls[0]["position"] for one in (intact, elsewhere))
    xr.testing.assert_allclose(null["difference"].sel(number="variance.position", drop=True), second - first)


def test_sentences_table_and_pictures_say_which_is_which(intact, ablated, tmp_path):
    report = tl_posgen.compare(intact, ablated, names=("intact", "ablated"))
    assert report.findings()[0] == "What changes from intact to ablated; intervals paired by prompt."
    assert "(random init" in report.findings()[2]
    table = report["comparison"].table()
    assert {"intact", "ablated"} <= set(table)
    page = report.write(tmp_path / "page").read_text()
    assert "ablated - intact" in page
    again = tl_posgen.load(tmp_path / "page")
    assert again.findings() == report.findings()
    assert [again["comparison"].plot(kind).layout.title.text for kind in again["comparison"].kinds]


def test_saved_reports_are_compared_by_the_command(intact, ablated, tmp_path, monkeypatch, capsys):
    intact.write(tmp_path / "a")
    ablated.save(tmp_path / "b.nc")
    words = [str(tmp_path / "a"), str(tmp_path / "b.nc"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["tl-posgen", "compare", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "intervals paired by prompt" in capsys.readouterr().out
    expected = tl_posgen.compare(intact, ablated)["comparison"].dataset["difference"]
    xr.testing.assert_allclose(tl_posgen.load(tmp_path / "out")["comparison"].dataset["difference"], expected)


def test_single_prompts_have_differences_without_intervals():
    one = tl_posgen.analyze("mini", bundled_text(), measures="variance", length=16, n_prompts=1, null_seeds=())
    data = tl_posgen.compare(one, one)["comparison"].dataset
    assert float(abs(data["difference"]).max()) == 0
    assert data["difference_low"].isnull().all()


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "c")])
def test_names_that_are_none_are_refused(intact, names):
    with pytest.raises(InputError, match="give two that differ"):
        tl_posgen.compare(intact, intact, names=names)


def test_reports_that_share_nothing_are_refused(intact):
    other = tl_posgen.analyze("mini", bundled_text(), measures="loss", length=16, n_prompts=1, null_seeds=())
    with pytest.raises(InputError, match="no per-head number is in both reports"):
        tl_posgen.compare(intact, other)
