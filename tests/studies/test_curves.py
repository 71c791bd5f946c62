"""What is followed over training."""

from dataclasses import dataclass

import numpy as np
import pytest
import xarray as xr
from made_up import dataset_of, result_of

from tl_posgen.core import registry
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.interventions import Interventions
from tl_posgen.position import ThreeAxis
from tl_posgen.studies.curves import FOLLOWED, effects_in, followed, numbers_of
from tl_posgen.studies.emergence import Emergence


def over_training(dims=("checkpoint",), **values):
    """Numbers of one model, "trained", over checkpoints."""
    arrays = {name: (("init", *dims), [array], {"measure": name.split("_")[0]}) for name, array in values.items()}
    data = xr.Dataset(arrays, {"init": ["trained"]}, {"measures": sorted({name.split("_")[0] for name in values})})
    return Numbers(Emergence(), data)


def test_numbers_over_steps_are_means_over_heads_and_have_the_interval_of_their_prompts():
    values = {
        "a_r": (("layer", "head"), np.arange(12.0).reshape(2, 2, 3)),
        "a_x": (("prompt",), [[1.0, 2, 3, 4], [5] * 4]),
    }
    arrays = {
        name: (("init", "checkpoint", *dims), [array], {"measure": "a"}) for name, (dims, array) in values.items()
    }
    arrays["step"] = (("checkpoint",), [0, 10])
    own = Numbers(Emergence(), xr.Dataset(arrays, {"init": ["trained"]}, {"measures": ["a"]}))
    first, last = (own.measure.at_steps(own, "a_r")[step] for step in (0, 10))
    assert (first.value, last.value, np.isnan(first.low)) == (2.5, 8.5, True)
    number = own.measure.at_steps(own, "a_x")[0]
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert (number.low, number.high) == pytest.approx((2.5 - half, 2.5 + half))


def test_a_measure_without_curves_is_followed_by_its_first_numbers():
    own = over_training(other_a=[1.0], other_b=[1.0], other_c=[1.0], other_d=[1.0])
    curves = followed(own.dataset)
    assert [curve.name for curve in curves] == ["other_a", "other_b", "other_c"]
    assert (curves[0].label, curves[0].sentence) == ("other a", "Other a")


@pytest.mark.parametrize("measure", FOLLOWED)
def test_every_curve_is_a_variable_of_a_registered_measure(measure):
    kind = registry.find(measure)
    for curve in FOLLOWED[measure]:
        variable = kind.variables[curve.name.removeprefix(f"{measure}_")]
        assert set(curve.at) <= set(variable.dims)


@pytest.mark.longer
def test_a_study_keeps_numbers_of_every_head_and_means_of_others(mini, alice):
    """Curves that every head has are left out; numbers by prompt and by group stay as they are."""
    result = ThreeAxis()(mini, alice, length=24, n_prompts=4, progress=False)
    kept = numbers_of([result])
    assert kept["three_axis_r"].dims == ("init", "group", "tokens", "layer", "head")
    np.testing.assert_array_equal(kept["three_axis_r"], result.dataset["r"].transpose(*kept["three_axis_r"].dims))
    words = ThreeAxis.variables["r"].attributes
    assert kept["three_axis_r"].attrs == {**words, "measure": "three_axis", "range": [-1.0, 1.0]}
    assert not [name for name in ("a", "b", "c") if f"three_axis_{name}" in kept]
    assert kept["prompt_share"].dims == ("group",)


@dataclass(frozen=True)
class Cuts(Interventions):
    """rise = L - L(unchanged)"""

    words = {"cut": "cut out"}


@dataclass(frozen=True)
class CutsBesideControl(Cuts):
    """recovered = (L_all - L) / (L_all - L_unchanged)"""

    control = "all"


@dataclass(frozen=True)
class Moves(Measure):
    """change = L(moved) - L"""

    variables = {
        "loss": Variable("loss", "nats", dims=("prompt",)),
        "change": Variable("rise of the loss", "nats", dims=("condition", "target", "ratio", "prompt")),
        "moved": Variable("share moved", dims=("condition",)),
    }

    def usual(self):
        return {"target": "near"}


def numbers_under(measure, losses):
    """What a study keeps of a measure with these losses by condition, of eight prompts alike."""
    table = np.array([*losses.values()])[:, None] + 0.001 * np.arange(8)
    data = dataset_of({"loss": (("condition", "prompt"), table)}, condition=[*losses])
    return numbers_of([result_of(measure, data)]).assign_attrs(measures=[measure.name])


def test_of_conditions_the_rise_is_followed_or_the_share_recovered_and_never_the_unchanged_loss():
    losses = {"unchanged": 3.0, "cut": 3.5, "all": 5.0}
    rises, shares = (numbers_under(measure, losses) for measure in (Cuts(), CutsBesideControl()))
    for data, name, expected in (
        (rises, "cuts_rise", {"all": 2.0, "cut": 0.5}),
        (shares, "cuts_beside_control_recovered", {"cut": 0.75}),
    ):
        curves = followed(data)
        assert {curve.name for curve in curves} == {name}
        numbers = Numbers(Emergence(), data)
        values = {curve.at["condition"]: numbers.number(curve.array(numbers)) for curve in curves}
        assert {key: number.value for key, number in values.items()} == pytest.approx(expected)
        assert all(number.low <= number.value <= number.high for number in values.values())
    assert followed(shares)[0].sentence == "Cuts beside control, cut out: the share of the loss recovered"
    assert followed(rises)[0].label == "cuts, rise of the loss: all"
    assert set(rises["cuts_loss"].dims) == {"init", "condition", "prompt"}


def test_however_many_conditions_a_study_keeps_them_and_a_few_are_followed():
    losses = {"unchanged": 3.0, "all": 5.0, **{f"c{n}": 3.0 + n / 16 for n in range(30)}}
    data = numbers_under(Cuts(), losses)
    assert data["cuts_rise"].dropna("condition").sizes["condition"] == 31
    assert [curve.at["condition"] for curve in followed(data)] == ["all", "c29", "c28", "c27", "c26", "c25"]
    assert len(effects_in(data)["cuts_rise"]) == 31
    of_shares = followed(numbers_under(CutsBesideControl(), losses))  # the highest are of hardly any change
    assert [curve.at["condition"] for curve in of_shares] == ["c0", "c5", "c10", "c15", "c20", "c25"]


def test_the_unchanged_model_alone_is_followed_by_nothing():
    assert followed(numbers_under(Cuts(), {"unchanged": 3.0})) == []


def test_conditions_of_another_measure_are_taken_at_its_usual_labels_and_not_by_the_loss_in_order():
    change = np.array([[[0.0, 0.2], [8.0, 8.0]], [[0.0, 0.6], [9.0, 9.0]]])[..., None] * np.ones(4)
    variables = {
        "loss": (("prompt",), np.full(4, 3.0)),
        "change": (("condition", "target", "ratio", "prompt"), change),
        "moved": (("condition",), np.array([0.1, 0.2])),
    }
    data = dataset_of(variables, condition=["tokens", "words"], target=["near", "far"], ratio=[0.0, 0.5])
    kept = numbers_of([result_of(Moves(), data)]).assign_attrs(measures=["moves"])
    curves, numbers = followed(kept), Numbers(Emergence(), kept)
    values = [numbers.number(curve.array(numbers)).value for curve in curves]
    assert values == pytest.approx([0.3, 0.1])
    assert [curve.at["condition"] for curve in curves] == ["words", "tokens"]
    assert curves[0].effect == "rise of the loss in nats (target near, mean over ratio)"


def test_numbers_without_conditions_are_followed_at_usual_labels():
    data = dataset_of({"gap": (("task",), np.array([1.0, 5.0]))}, task=["text", "copy"])

    @dataclass(frozen=True)
    class Tasks(Measure):
        """gap = L"""

        variables = {"gap": Variable("gap", dims=("task",))}

        def usual(self):
            return {"task": "copy"}

    kept = numbers_of([result_of(Tasks(), data)]).assign_attrs(measures=["tasks"])
    (curve,), numbers = followed(kept), Numbers(Emergence(), kept)
    assert numbers.number(curve.array(numbers)).value == 5


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_no_followed_curve_of_conditions_is_named_by_hand(name):
    kind = registry.find(name)
    assert name not in FOLLOWED or not any("condition" in variable.dims for variable in kind.variables.values())


@dataclass(frozen=True)
class Gaps(Cuts):
    """rise = L - L(unchanged), across gaps"""

    variables = {"loss": Variable("loss", "nats", dims=("condition", "gap", "prompt"), headline="loss")}

    def usual(self):
        return {"condition": "unchanged", "gap": 0}


def test_what_conditions_do_is_the_mean_over_values_at_whose_usual_label_they_may_do_nothing():
    loss = np.array([[3.0, 6.0], [3.0, 4.0]])[..., None] * np.ones(4)
    data = dataset_of({"loss": (("condition", "gap", "prompt"), loss)}, condition=["unchanged", "cut"], gap=[0, 99])
    kept = numbers_of([result_of(Gaps(), data)]).assign_attrs(measures=["gaps"])
    (curve,), numbers = followed(kept), Numbers(Emergence(), kept)
    assert numbers.number(curve.array(numbers)).value == -1
    assert curve.effect == "rise of the loss in nats (mean over gap)"
    assert numbers.number(numbers.array("gaps_loss", condition="unchanged")).value == 3
