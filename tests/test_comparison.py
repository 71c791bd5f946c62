"""Two reports side by side: differences per head, with intervals that are paired where the prompts are the same."""

import copy
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.core.numbers import intervals_of
from tl_posgen.core.report import Report
from tl_posgen.errors import InputError
from tl_posgen.frequencies import PlaneUse
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.position import ThreeAxis
from tl_posgen.rules import Rules

pytestmark = pytest.mark.slow

MEASURES = ["three_axis", "variance", "loss"]
QUICK = {"measures": MEASURES, "length": 24, "n_prompts": 5, "progress": False}


@pytest.fixture(scope="module")
def intact():
    return tl_posgen.analyze("mini", bundled_text(), **QUICK)


@pytest.fixture(scope="module")
def ablated_model():
    """The attention of layer 1 writes nothing: layers 2 and 3 see other inputs."""
    model = tl_posgen.load_model("mini")
    with torch.no_grad():
        model.blocks[1].attn.W_O.zero_()
    return model


@pytest.fixture(scope="module")
def ablated(ablated_model):
    return tl_posgen.analyze(ablated_model, bundled_text(), **QUICK)


@pytest.fixture(scope="module")
def elsewhere():
    return tl_posgen.analyze("mini", bundled_text()[30_000:], **QUICK)


def compared(*reports, **options):
    return tl_posgen.compare(*reports, **options)["comparison"]


def of_report(report, number):
    """A number's array in the report that was compared."""
    title, *labels = number.split(", ")
    (name, variable), *_ = [
        (result.name, variable)
        for result in report.values()
        for variable, one in result.measure.variables.items()
        if title in (one.headline, f"{result.name}.{variable}") and variable in result.dataset
    ]
    array = report[name].dataset[variable]
    at = {"tokens": "all", **report[name].measure.usual()}
    at |= {dim: label for label in labels for dim in ("tokens", "side", "part") if label in array.coords.get(dim, ())}
    return array.sel({dim: label for dim, label in at.items() if dim in array.dims}, drop=True)


def test_heads_are_ranked_by_either_name_of_a_number(intact, ablated_model):
    ablated = tl_posgen.analyze(ablated_model, bundled_text(), **QUICK)
    result = tl_posgen.compare(intact, ablated)["comparison"]
    for variable, column in (("position", "position_share"), ("r_within_rows", "three_axis_r_within_rows")):
        assert result.heads(3, by=variable).equals(result.heads(3, by=column))
        in_measure = next(kind for kind in intact.values() if variable in kind.measure.variables)
        assert (
            in_measure.heads(3, by=variable).to_numpy().tolist() == in_measure.heads(3, by=column).to_numpy().tolist()
        )
    with pytest.raises(InputError, match="by='nothing': comparison has, per head, "):
        result.heads(by="nothing")


def test_differences_are_those_of_the_reports(intact, ablated):
    result = compared(intact, ablated)
    change = result.trained["change"].sel(end="value")
    numbers = [str(one) for one in result.trained["number"].values]
    for number in numbers:
        first, second = (of_report(one, number).sel(init="trained", group="all") for one in (intact, ablated))
        expected, found = (second - first).values, change.sel(number=number).transpose("layer", "head").values
        np.testing.assert_allclose(found, expected, atol=1e-12)
        mean = result.numbers("mean_change", number=number)
        assert mean.value == pytest.approx(expected.mean(), abs=1e-12)
    assert {"three_axis_r", "three_axis_r, without first", "position_share", "additive_r"} <= set(numbers)
    assert float(abs(change.sel(layer=[0, 1])).max()) == 0  # the ablation comes after them


def test_the_numbers_print_as_the_change_of_each_and_not_as_a_mean_over_all(intact, ablated):
    numbers = compared(intact, ablated).numbers
    labels = [str(label) for label in numbers.data["number"].values]
    printed = [f"{label}: {numbers('mean_change', number=label)}" for label in labels]
    assert repr(numbers).splitlines() == ["Numbers of comparison", *printed]


def test_the_frame_has_both_values_the_change_and_its_interval(intact, ablated):
    rows = compared(intact, ablated).frame().query("number == 'three_axis_r'").reset_index(drop=True)
    for side, report in {"first": intact, "second": ablated}.items():
        np.testing.assert_allclose(rows[f"value, {side}"], report["three_axis"].frame()["r"], atol=1e-12)
    np.testing.assert_allclose(rows["change"], rows["value, second"] - rows["value, first"], atol=1e-12)
    assert (rows["change, low"] <= rows["change"]).all()
    assert (rows["change"] <= rows["change, high"]).all()
    assert (rows["change, low"] < rows["change, high"]).any()


def test_of_chosen_heads_means_are_made_again_and_have_no_interval(intact, ablated):
    some = compared(intact, ablated, names=("intact", "ablated")).of_heads(["L2H2", "L3H0"])
    rows = some.frame().query("number == 'three_axis_r'")
    number = some.numbers("mean_change", number="three_axis_r")
    assert number.value == pytest.approx(rows["change"].mean())
    assert np.isnan([number.low, number.high]).all()
    table = some.table().set_index("number").loc["r of position + query + key"]
    assert [table[name] for name in ("intact", "ablated")] == pytest.approx(
        [rows[f"value, {side}"].mean() for side in ("first", "second")]
    )
    assert "on average" in some.findings()[1]


def test_reports_of_the_same_prompts_are_paired_whatever_heads_each_has(mini, intact, ablated):
    chosen = tl_posgen.analyze(mini, bundled_text(), heads="L2H2", **QUICK)
    one = compared(chosen, ablated)
    whole = compared(intact, ablated).frame().query("layer == 2 and head == 2").set_index("number")
    assert one.trained.attrs["paired"] == 1
    pd.testing.assert_frame_equal(one.frame().set_index("number"), whole.loc[one.frame()["number"]], rtol=1e-5)


def test_heads_are_chosen_by_the_change_of_a_number_as_the_reports_frame_calls_it(intact, ablated):
    report = tl_posgen.compare(intact, ablated)
    before, after = (one.frame().set_index(["layer", "head"])["three_axis_r"] for one in (intact, ablated))
    change = after - before
    for lowest in (False, True):
        found = report.heads(top=3, by="three_axis_r", lowest=lowest)
        assert found["change"].tolist() == pytest.approx(sorted(change, reverse=not lowest)[:3])
    assert report.heads().equals(report.heads("comparison", by=str(report["comparison"].trained["number"].values[0])))
    labelled = report.heads(by="change", number="three_axis_r, without first", top=None)
    assert len(labelled) == len(change)
    with pytest.raises(InputError, match=r"by='nothing': comparison has, per head, .*three_axis_r; "):
        report.heads(by="nothing")
    with pytest.raises(InputError, match="heads: name a result: "):
        intact.heads()


def test_paired_intervals_are_those_of_the_difference_prompt_by_prompt(mini, intact, ablated_model, ablated):
    result = compared(intact, ablated)
    found = result.trained["change"].sel(number="three_axis_r").transpose("end", "layer", "head")
    prompts, alone = to_prompts(mini, bundled_text(), length=24, n_prompts=5), {"nulls": 0, "progress": False}
    change = np.stack(
        [
            np.subtract(*(ThreeAxis()(model, [one], **alone).sel(tokens="all")["r"] for model in (ablated_model, mini)))
            for one in prompts
        ]
    )
    half = 2.7764 * change.std(0, ddof=1) / np.sqrt(5)  # Student's interval: r is a mean over prompts
    np.testing.assert_allclose(found[1], change.mean(0) - half, atol=1e-5)
    np.testing.assert_allclose(found[2], change.mean(0) + half, atol=1e-5)
    means = change.mean((1, 2))
    half = 2.7764 * means.std(ddof=1) / np.sqrt(5)
    mean = result.numbers("mean_change", number="three_axis_r")
    assert (mean.low, mean.high) == pytest.approx((means.mean() - half, means.mean() + half), abs=1e-5)


def test_of_other_prompts_half_widths_add_as_squares(intact, elsewhere):
    result = compared(intact, elsewhere)
    assert not result.trained.attrs["paired"]
    _, low, high = result.trained["change"].sel(number="three_axis_r").transpose("end", "layer", "head")
    each = [intervals_of(of_report(one, "three_axis_r")) for one in (intact, elsewhere)]
    half = [(one["high"] - one["low"]).transpose("layer", "head") / 2 for one in each]
    np.testing.assert_allclose((high - low) / 2, np.hypot(*half), atol=1e-9)


def test_the_loss_is_compared_prompt_by_prompt_where_prompts_are_the_same(intact, ablated, elsewhere):
    change = ablated["loss"].trained["loss"].values - intact["loss"].trained["loss"].values
    half = 2.7764 * change.std(ddof=1) / np.sqrt(5)
    sentence = compared(intact, ablated).findings()[0].partition("prompt: ")[2]
    mean = change.mean()
    assert sentence.startswith(f"Loss: {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] nats a token, from ")
    assert "loss" not in compared(intact, elsewhere).dataset


def test_reports_of_unequal_prompts_are_said_to_differ_by_that_alone(mini, alice):
    cut = {"measures": "variance", "nulls": 0, "progress": False}
    cuts = [{"length": 16, "n_prompts": 2}, {"length": 16, "n_prompts": 4}, {"length": 12, "n_prompts": 2}]
    few, many, short = (tl_posgen.analyze(mini, alice, **one, **cut) for one in cuts)
    for other, words in ((many, "4 prompts of 16 tokens"), (short, "2 prompts of 12 tokens")):
        told = tl_posgen.compare(few, other)["comparison"].findings()[1]
        assert told.startswith(f"The reports are of 2 prompts of 16 tokens and {words}: ")
    assert "The reports are of" not in " ".join(tl_posgen.compare(few, few, names=("a", "b")).findings())


def test_the_null_is_the_same_difference_between_random_inits(intact, elsewhere):
    result = compared(intact, elsewhere)
    sides = [of_report(one, "position_share").sel(init="0", group="all") for one in (intact, elsewhere)]
    null = result.dataset["change"].sel(init="0", end="value", number="position_share")
    np.testing.assert_allclose(null.transpose("layer", "head"), sides[1] - sides[0])
    mean = result.numbers("mean_change", number="position_share")
    assert mean.inits == pytest.approx((float(sides[1].mean() - sides[0].mean()),))


def test_the_recall_of_every_rule_is_compared_head_by_head(mini, alice):
    rules = Rules(rules=["window", "vertical"], budget=6)
    changed = copy.deepcopy(mini)
    with torch.no_grad():
        changed.blocks[1].attn.W_O.zero_()
    cut = QUICK | {"measures": [rules, "variance"], "n_prompts": 9, "nulls": 0}
    reports = [tl_posgen.analyze(model, alice, **cut) for model in (mini, changed)]
    result = compared(*reports)
    numbers = {str(one) for one in result.trained["number"].values}
    assert {f"recall, {rule}" for rule in ("window", "vertical", "drawn", "oracle")} < numbers
    first, second = (one["rules"].sel(rule="vertical", tokens="all")["recall"] for one in reports)
    change = (second - first).transpose("prompt", "layer", "head").values  # of four prompts; variance has five groups
    found = result.trained["change"].sel(number="recall, vertical").transpose("end", "layer", "head")
    half = 3.1824 * change.std(0, ddof=1) / np.sqrt(4)
    for one, expected in zip(found, (change.mean(0), change.mean(0) - half, change.mean(0) + half), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)
    assert abs(change[:, 2:]).max() > 0.01
    position = result.numbers("mean_change", number="position_share")
    assert position.low <= position.value <= position.high


def test_of_models_of_different_shape_each_ones_own_means_are_compared(small_model, tmp_path, command):
    cut = {"nulls": 1, "progress": False, "measures": ["variance"]}
    tokens = torch.stack(to_prompts(small_model, bundled_text(), length=18, n_prompts=4))
    both = [tl_posgen.analyze(model, tokens, **cut) for model in ("mini", small_model)]
    assert [len(one.frame()) for one in both] == [16, 8]
    report = tl_posgen.compare(*both, names=("mini", "small"))
    result = report["comparison"]
    own = [one["variance"].numbers("position") for one in both]
    change = result.numbers("mean_change", number="position_share")
    assert change.value == pytest.approx(own[1].value - own[0].value, abs=1e-12)
    assert change.inits == pytest.approx((own[1].inits[0] - own[0].inits[0],), abs=1e-12)
    arrays = [one["variance"].numbers.array("position").sel(init="trained") for one in both]
    found = intervals_of(arrays[1].mean(("layer", "head")) - arrays[0].mean(("layer", "head")))
    low, high = found["low"], found["high"]
    assert (change.low, change.high) == pytest.approx((float(low), float(high)))  # of the same tokens: paired
    row = result.table().set_index("number").loc["position"]
    assert (row["mini"], row["small"]) == pytest.approx((own[0].value, own[1].value))
    first, *rest = result.findings()
    assert first.startswith("From mini to small, means over the 16 heads of the one and the 8 heads of the other, ")
    assert not any("most in L" in one for one in (first, *rest))
    assert result.kinds == []
    assert result.frame().empty
    with pytest.raises(InputError, match="comparison has, per head, nothing"):
        report.heads(by="position_share")
    path = report.write(tmp_path / "page").parent
    assert tl_posgen.load(path)["comparison"].findings() == result.findings()
    paths = [one.save(tmp_path / f"{number}.nc") for number, one in enumerate(both)]
    code, printed, _ = command("compare", *paths, "--out", tmp_path / "out")
    assert code == 0
    assert "16 heads" in printed


def test_sentences_table_and_pictures_name_both_sides(intact, ablated, tmp_path):
    report = tl_posgen.compare(intact, ablated, names=("intact", "ablated"))
    assert report.findings()[0].startswith("From intact to ablated, intervals paired by prompt: ")
    assert "(random init" in report.findings()[1]
    change = report["comparison"].trained["change"].sel(number="three_axis_r_within_rows")
    assert not ((change.sel(end="low") > 0) | (change.sel(end="high") < 0)).any()
    [said] = [line for line in report.findings() if line.startswith("r within rows: ")]
    assert said.endswith("; in 0 of 16 heads the interval leaves out zero.")  # so none is named
    assert tl_posgen.compare(intact, intact).findings()[1:] == ["No head changes."]
    rounded = {name: replace(one, dataset=one.dataset + 1e-5) for name, one in intact.items()}
    nearly = Report(rounded, intact.provenance)
    assert tl_posgen.compare(intact, nearly).findings()[1:] == ["No head changes by 0.0005 or more."]
    table = report["comparison"].table()
    assert {"intact", "ablated"} <= set(table)
    page = report.write(tmp_path / "page").read_text()
    assert "ablated - intact" in page
    again = tl_posgen.load(tmp_path / "page")
    assert again.findings() == report.findings()
    assert [again["comparison"].plot(kind).layout.title.text for kind in again["comparison"].kinds]


def test_saved_reports_are_compared_by_the_command(intact, ablated, tmp_path, command):
    intact.write(tmp_path / "a")
    ablated.save(tmp_path / "b.nc")
    code, printed, _ = command("compare", tmp_path / "a", tmp_path / "b.nc", "--out", tmp_path / "out")
    assert code == 0
    assert "intervals paired by prompt" in printed
    found = tl_posgen.load(tmp_path / "out")["comparison"].dataset["change"]
    xr.testing.assert_allclose(found, compared(intact, ablated).dataset["change"])


def test_single_prompts_have_differences_without_intervals():
    one = tl_posgen.analyze("mini", bundled_text(), measures="variance", length=16, n_prompts=1, nulls=0)
    result = compared(one, one)
    assert float(abs(result.trained["change"]).max()) == 0
    number = result.numbers("mean_change", number="position_share")
    assert (number.value, number.low) == (0, pytest.approx(np.nan, nan_ok=True))


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "c"), ("", "b")])
def test_names_that_are_none_are_refused(intact, names):
    with pytest.raises(InputError, match="give two that differ"):
        tl_posgen.compare(intact, intact, names=names)
    with pytest.raises(InputError, match="'to' is another column of the table; give two other names"):
        tl_posgen.compare(intact, intact, names=("from", "to"))


def test_passes_without_token_ids_are_not_taken_for_the_same_prompts(mini):
    def attached(start):
        prompts = mini.embed(torch.arange(start, start + 80).reshape(4, 20)).detach()
        with tl_posgen.attach(mini, ["three_axis"]) as run:
            for prompt in prompts:
                mini(prompt[None], start_at_layer=0)
        return run.report()

    reports = attached(0), attached(400)
    assert reports[0].provenance["tokens_sha256"] is None
    assert not compared(*reports).trained.attrs["paired"]


def test_reports_that_share_nothing_are_refused(intact):
    other = tl_posgen.analyze("mini", bundled_text(), measures="loss", length=16, n_prompts=1, nulls=0)
    with pytest.raises(InputError, match="no per-head number is in both reports"):
        tl_posgen.compare(intact, other)


def test_of_other_heads_the_means_beside_a_difference_are_of_the_heads_that_both_have(mini, alice):
    whole, some = (
        tl_posgen.analyze(mini, alice, heads=heads, **QUICK | {"measures": "variance", "nulls": 0})
        for heads in (None, ["L0H1", "L2H3"])
    )
    report = tl_posgen.compare(whole, some, names=("whole", "some"))
    table = report["comparison"].table()
    np.testing.assert_allclose(table["some"] - table["whole"], table["difference"], atol=1e-9)
    shared = whole.frame().set_index(["layer", "head"]).loc[[(0, 1), (2, 3)], "additive_r"].mean()
    assert table.set_index("number").loc["additive r", "whole"] == pytest.approx(shared)
    assert ", 2 heads, " in repr(report)


def test_numbers_that_know_nothing_of_an_option_are_compared_though_it_differs(mini, alice):
    near, far = (
        tl_posgen.analyze(mini, alice, **QUICK | {"measures": PlaneUse([context]), "nulls": 0})
        for context in (128, 512)
    )
    result = compared(near, far)
    assert "sine_of_phase" in result.trained["number"].values.tolist()
    assert not [name for name in result.trained["number"].values.tolist() if "half_turn" in name]
    assert any("plane_use (128 and 512)" in sentence for sentence in result.findings())


def test_a_yardstick_that_no_model_can_change_is_not_compared():
    one, other = (
        tl_posgen.analyze("mini", bundled_text()[start:], **QUICK | {"measures": ["slash"]}, nulls=0)
        for start in (0, 30_000)
    )
    numbers = compared(one, other).trained["number"].values.tolist()
    assert "slash_score" in numbers
    assert not [name for name in numbers if "uniform" in name]


def test_numbers_that_one_side_does_not_have_are_not_said_to_be_unchanged():
    model, quick = tl_posgen.load_model("mini", "auto"), QUICK | {"measures": "three_axis", "nulls": 0}
    reports = [tl_posgen.analyze(model, bundled_text(), **quick)]
    for n_layers in (1, 4):
        with torch.no_grad():
            for block in model.blocks[:n_layers]:
                block.attn.W_Q.zero_()
                block.attn.b_Q.zero_()
        reports.append(tl_posgen.analyze(model, bundled_text(), **quick))
    some, none = (" ".join(compared(reports[0], other).findings()) for other in reports[1:])
    assert "4 heads defined on one side only, left out" in some
    of_two = " ".join(compared(*reports[:2]).of_heads(["L0H1", "L2H0"]).findings())
    assert "1 head defined on one side only, left out" in of_two
    assert "No head changes" not in none
    assert "Not defined for any head on both sides: r of position + query + key, " in none


@pytest.mark.parametrize("paired", [True, False])
def test_an_interval_of_a_change_does_not_leave_what_a_change_can_be(intact, paired):
    """r is in [-1, 1], a change of it in [-2, 2]."""

    def with_r(value, sign, prompts):
        result = intact["three_axis"]
        data = result.dataset.copy(deep=True)
        groups = np.array([value, *(value - sign * 0.5 * (n % 2) for n in range(data.sizes["group"] - 1))])
        data["r"] = (data["r"] * 0).fillna(0) + xr.DataArray(groups, dims="group")
        provenance = {**intact.provenance, "tokens_sha256": prompts}
        return Report({"three_axis": replace(result, dataset=data)}, provenance)

    result = compared(with_r(-0.9, -1, "one"), with_r(0.9, 1, "one" if paired else "another"))
    change = result.numbers("mean_change", number="three_axis_r")
    assert change.value == pytest.approx(1.8)
    assert change.high == 2 if paired else 1.8 < change.high < 2
    rows = result.frame().query("number == 'three_axis_r'")
    np.testing.assert_allclose(rows["change, high"], change.high)


def test_the_frame_has_the_value_of_heads_that_are_defined_on_one_side_only():
    model, quick = tl_posgen.load_model("mini", "auto"), QUICK | {"measures": "three_axis", "nulls": 0}
    before = tl_posgen.analyze(model, bundled_text(), **quick)
    with torch.no_grad():
        model.blocks[1].attn.W_Q.zero_()
        model.blocks[1].attn.b_Q.zero_()
    frame = compared(before, tl_posgen.analyze(model, bundled_text(), **quick)).frame()
    rows = frame.query("number == 'three_axis_r' and layer == 1")
    assert len(rows) == 4
    assert rows["value, first"].notna().all()
    assert rows[["value, second", "change"]].isna().all(axis=None)
    assert set(frame) == {"number", "layer", "head", "value, first", "value, second", *CHANGE}


CHANGE = ("change", "change, low", "change, high")


def test_a_sentence_names_the_largest_of_heads_whose_interval_leaves_out_zero():
    cut = {"measures": "variance", "length": 24, "n_prompts": 4, "nulls": 0, "progress": False}
    first, second = (tl_posgen.analyze("mini", text, **cut) for text in (bundled_text(), bundled_text()[20_000:]))
    result = tl_posgen.compare(first, second, names=("one", "other"))["comparison"]
    change, named = result.trained["change"], 0
    for number, label in zip(change["number"].values, result.trained["label"].values, strict=True):
        sentence = next((line for line in result.findings() if f"{label}: " in line), "")
        if found := re.search(r"the largest change in L(\d+)H(\d+)", sentence):
            value, low, high = (change.sel(number=number, end=end) for end in ("value", "low", "high"))
            sure = abs(value.where((low > 0) | (high < 0)))
            assert float(sure.sel(layer=int(found[1]), head=int(found[2]))) == float(sure.max())
            named += 1
    assert named


def test_numbers_of_different_units_are_not_averaged():
    cut = {"measures": "variance", "length": 24, "n_prompts": 4, "nulls": 0, "progress": False}
    report = tl_posgen.analyze("mini", bundled_text(), **cut)
    with pytest.raises(InputError, match="different units; give number=, one of"):
        tl_posgen.compare(report, report)["comparison"].numbers("change")


def test_reports_of_other_options_say_so():
    cut = {"length": 24, "n_prompts": 4, "nulls": 0, "progress": False}
    reports = [tl_posgen.analyze("mini", bundled_text(), measures=[ThreeAxis(ridge=r)], **cut) for r in (0.0, 5.0)]
    sentences = tl_posgen.compare(*reports)["comparison"].findings()
    assert any("which alone make numbers differ: three_axis ridge 0.0 and 5.0" in line for line in sentences)
