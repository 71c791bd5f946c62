"""Measures over checkpoints: two real ones, random weights and the bundled model's."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from made_up import dataset_of, result_of

from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.saved import load
from tl_posgen.coupling import Coupling
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.files import MINI
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.studies.curves import ALIGNED
from tl_posgen.studies.emergence import Emergence, emergence

pytestmark = pytest.mark.slow

CUT = {"length": 32, "n_prompts": 4, "progress": False}
OPTIONS = {"tokenizer": "mini", **CUT}
WITHIN = "three_axis_r_within_rows"


def course_of(values, losses=None):
    """A result of one followed number over steps 0, 1, ..., as `emergence` makes it."""
    n = len(values)
    variables = {
        "loss": (("checkpoint", "prompt"), np.array(losses or np.arange(n, 0, -1.0))[:, None]),
        "step": (("checkpoint",), np.arange(n)),
        "coupling_growth_r2": (("checkpoint",), np.array(values)),
    }
    data = dataset_of(variables, checkpoint=[f"step{i}" for i in range(n)]).assign_attrs(measures=["coupling"])
    data["coupling_growth_r2"].attrs["measure"] = "coupling"
    return result_of(Emergence(per_head=False), data)


def mean_within_rows(per_head, init="trained"):
    """Of every checkpoint, the mean over heads."""
    return per_head.sel(init=init)[WITHIN].sel(tokens="all").mean(("layer", "head")).values


def test_the_last_checkpoint_measures_as_the_model_itself(per_head, of_coupling, mini, alice):
    """The loss, and every number of coupling at every place that a study keeps."""
    tokens = torch.stack(to_prompts(mini, alice, length=32, n_prompts=4))
    loss = float(token_losses(mini, tokens).mean())
    assert float(per_head.trained["loss"][-1].mean()) == pytest.approx(loss, abs=1e-3)
    result, compared = Coupling(k=4)(mini, alice, nulls=0, **CUT), 0
    last = of_coupling.trained.isel(checkpoint=-1)
    for name, array in result.trained.data_vars.items():
        if f"coupling_{name}" in last:
            found = last[f"coupling_{name}"]
            expected = array.sel(k=4) if "k" in array.dims else array
            expected = expected.mean([dim for dim in expected.dims if dim not in found.dims])
            np.testing.assert_allclose(found, expected.transpose(*found.dims), rtol=1e-3, atol=1e-3)
            compared += found.size
    assert compared > 27


def test_it_is_named_after_the_model_and_carries_steps_and_loss(per_head, of_coupling):
    assert of_coupling.trained.attrs["model"] == "some_model"
    assert of_coupling.provenance["measures"]["coupling"]["k"] == 4
    assert of_coupling.provenance["checkpoints"] == ["step0", "step10"]
    assert of_coupling.provenance["drawn"] == "spread over the text"
    for result in (per_head, of_coupling):
        assert result.trained["step"].values.tolist() == [0, 10]
        first, last = result.trained["loss"].mean("prompt").values
        assert last < first - 0.5
    first, last = mean_within_rows(per_head)
    assert last > first


def test_nulls_are_random_models_with_their_seeds_in_the_label(of_coupling):
    labels = of_coupling.dataset["init_label"].values.tolist()
    assert labels == ["some_model", "random init (seed 0)", "random init (seed 1)", "shuffled weights (seed 0)"]
    for null in of_coupling.nulls:
        coupling = null["coupling_coupling"].sel(ALIGNED)
        assert np.isfinite(coupling).all()
        assert (coupling == coupling.isel(checkpoint=0)).all()  # the same beside every checkpoint


def test_it_can_be_saved_drawn_again_and_tabulated(per_head, of_coupling, tmp_path):
    for result, kinds in ((per_head, ["means", "heads"]), (of_coupling, ["means"])):
        loaded = load(result.save(tmp_path / "r.nc"))["emergence"]
        xr.testing.assert_equal(loaded.dataset, result.dataset)
        assert loaded.kinds == result.kinds == kinds
        assert [loaded.plot(kind).to_json() for kind in kinds] == [result.plot(kind).to_json() for kind in kinds]
        assert loaded.findings() == result.findings()
    assert len(per_head.frame()) == 2 * 16
    assert np.isfinite(per_head.frame(init=0)["three_axis_r"]).all()
    assert of_coupling.frame()["checkpoint"].tolist() == ["step0", "step10"]


def test_words_and_table_have_both_ends_with_intervals_the_null_and_random_bases(per_head, of_coupling):
    for result, name, sentence in ((per_head, WITHIN, 1), (of_coupling, "coupling_coupling", 1)):
        first, last = result.measure.at_steps(result.numbers, name).values()
        assert first.low < first.value < first.high
        ends = f"from {first.with_interval:.3f} at step 0 to {last.with_interval:.3f} at step 10 ({last.null:.3f})"
        assert ends in result.findings()[sentence]
        assert result.table()["checkpoint"].tolist() == ["step0", "step10"]
        np.testing.assert_allclose(result.table()["loss"], result.trained["loss"].mean("prompt"))
    *nulls, shuffled = [
        float(null["coupling_coupling"].sel(ALIGNED).isel(checkpoint=0).mean()) for null in of_coupling.nulls
    ]
    assert (
        f"{last.null:.3f}" == f"random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f}, shuffled {shuffled:.3f}"
    )
    values = of_coupling.trained["coupling_coupling"].sel(ALIGNED).isel(checkpoint=-1).values
    half = 3.182446 * values.std(ddof=1) / 2
    assert last.high - last.low == pytest.approx(2 * half, rel=0.1)
    assert of_coupling.table()["coupling"][1] == last.value
    chance = of_coupling.trained["coupling_chance"].sel(version="absolute").mean("prompt").values
    np.testing.assert_allclose(of_coupling.table()["random bases"], chance)
    assert of_coupling.findings()[2].startswith(f"Coupling of random bases goes from {chance[0]:.3f} [")
    assert of_coupling.measure.at_steps(of_coupling.numbers, "slash_score") == {}


@pytest.mark.parametrize(
    ("values", "largest", "half"),
    [
        ([0.37, 0.69, 0.42, 0.32, 0.61, 0.66], 1, 4),  # lost again
        ([0.3, 0.4, 0.7], None, 2),
        ([0.7, 0.4, 0.3], None, 1),
        ([0.3, 0.8, 0.7], 1, 1),
        ([0.0, 0.2, 0.6, 0.9, 1.0], None, 2),
        ([0.3, 0.3, 0.3], None, None),  # nothing, and a peak between like ends
        ([0.18, 0.41, 0.14], 1, None),
    ],
)
def test_the_largest_value_and_half_of_the_change_are_given_where_there_are_any(values, largest, half):
    sentence = course_of(values).findings()[1]
    assert ("and is largest at step 1" in sentence) == ("is largest" in sentence) == (largest is not None)
    assert sentence.endswith(f"; half of the change is there by step {half}.") == (half is not None)
    assert ("half of the change" in sentence) == (half is not None)


def test_one_checkpoint_and_numbers_that_are_not_defined_are_given_as_such():
    assert course_of([0.5]).findings() == ["R² of exponential growth is 0.500 at step 0."]
    assert "to not defined at step 1" in course_of([0.5, np.nan]).findings()[1]


def test_means_are_drawn_over_steps_and_heads_in_the_colour_of_their_layer(per_head):
    figure = per_head.plot("means")
    labels = [annotation.text for annotation in figure.layout.annotations]
    assert labels == ["loss", "r", "r within rows", "position", "content", "interaction", "slash"]
    curve, *_ = (trace for trace in figure.data if trace.yaxis == "y3")
    np.testing.assert_allclose(curve.y, mean_within_rows(per_head))
    assert curve.x == (1, 11)
    lines = per_head.plot("heads").data
    assert len(lines) == 6 * 16
    np.testing.assert_array_equal(lines[16 + 5].y, per_head.trained[WITHIN].sel(layer=1, head=1, tokens="all"))
    assert len({trace.line.color for trace in lines}) == 4


def test_a_long_run_is_tabulated_by_twenty_checkpoints_with_both_ends():
    kept = course_of(np.linspace(0, 1, 154).tolist()).table()["checkpoint"].tolist()
    assert (len(kept), kept[0], kept[-1]) == (20, "step0", "step153")


def test_conditions_are_followed_by_what_they_do_and_empty_panels_left_out():
    rises = [[0.1, 0.2, np.nan], [0.5, 2.0, np.nan]]
    variables = {
        "loss": (("checkpoint", "prompt"), np.array([[3.0], [2.0]])),
        "step": (("checkpoint",), np.arange(2)),
        "cuts_rise": (("checkpoint", "condition"), np.array(rises)),
        "other_x": (("checkpoint",), np.full(2, np.nan)),
    }
    data = dataset_of(variables, checkpoint=["step0", "step1"], condition=["slow", "fast", "unchanged"])
    attrs = {"effect": "rise of the loss in nats", "short": "rise", "words": '{"slow": "slower"}'}
    data["cuts_rise"].attrs.update(measure="cuts", **attrs)
    data["other_x"].attrs["measure"] = "other"
    result = result_of(Emergence(per_head=False), data.assign_attrs(measures=["cuts", "other"]))
    assert result.findings()[1:3] == [
        "Cuts, fast: the rise of the loss in nats goes from +0.200 at step 0 to +2.000 at step 1; half of the change "
        "is there by step 1.",
        "Cuts, slower: the rise of the loss in nats goes from +0.100 at step 0 to +0.500 at step 1; half of the change "
        "is there by step 1.",
    ]
    titles = [annotation.text for annotation in result.plot("means").layout.annotations]
    assert titles == ["loss", "cuts, rise<br>fast", "cuts, rise<br>slower"]
    assert result.measure.at_steps(result.numbers, "cuts_rise", "slow")[1].value == 0.5


@dataclass(frozen=True)
class Weight(Measure):
    """weight = mean W_E^2"""

    variables = {"weight": Variable("weight", dims=()), "name": Variable("its name", dims=())}

    def of_model(self, run):
        weight = float(run.model.W_E.detach().square().mean())
        return xr.Dataset({"weight": ((), weight), "name": ((), "W_E")})


def test_a_measure_of_ones_own_is_followed_by_its_first_numbers(checkpoints, alice):
    found = emergence(checkpoints, alice, measures=Weight(), nulls=0, **OPTIONS)
    assert found.sel()["weight_weight"].dims == ("checkpoint",)
    assert "weight_name" not in found.dataset
    assert found.findings()[1].startswith("Weight weight goes from")
    assert found.kinds == ["means"]


def test_an_interrupted_run_keeps_its_finished_checkpoints(checkpoints, tmp_path, alice):
    measured = []

    @dataclass(frozen=True)
    class InterruptedOnce(Weight):
        """weight = mean W_E^2"""

        def of_model(self, run):
            measured.append(run)
            if len(measured) == 2:
                raise KeyboardInterrupt
            return super().of_model(run)

    asked = {"measures": ["three_axis", InterruptedOnce()], "nulls": 0, "keep": tmp_path, **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        emergence(checkpoints, alice, **asked)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert any("-step0-" in path.name for path in kept)
    found = emergence(checkpoints, alice, **asked)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    whole = emergence(checkpoints, alice, measures="three_axis", nulls=0, **OPTIONS)
    xr.testing.assert_equal(found.sel()["three_axis_r"], whole.sel()["three_axis_r"])


def test_bad_input_is_refused(checkpoints, tmp_path, alice):
    for wrong in ([], [checkpoints[0], checkpoints[0]], [tmp_path / "nowhere"]):
        with pytest.raises(InputError):
            emergence(wrong, alice, **OPTIONS)
    for given, options, message in (
        (checkpoints, CUT, "no tokenizer"),
        (checkpoints, {"measures": [Coupling(k=129)], **OPTIONS}, r"k \[129\]: choose from 1 to 128"),
        (checkpoints, {"measures": ["nonsense"], **OPTIONS}, "no measure 'nonsense'"),
        ([MINI], {"nulls": -1, **CUT}, "nulls=-1"),
    ):
        with pytest.raises(InputError, match=message):
            emergence(given, alice, **options)
