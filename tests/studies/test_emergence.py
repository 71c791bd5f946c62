"""Measures over checkpoints: two real ones, random weights and the bundled model's."""

import json

import numpy as np
import pytest
import torch
import xarray as xr

from tl_posgen.core.json_values import jsonable
from tl_posgen.core.measure import Measure
from tl_posgen.core.report import load
from tl_posgen.core.result import Result
from tl_posgen.coupling import Coupling, coupling
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.source import MINI
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.studies.emergence import emergence, findings, summarise, table

pytestmark = pytest.mark.slow

CUT = {"length": 32, "n_prompts": 2, "progress": False}
OPTIONS = {"tokenizer": "mini", **CUT}
WITHIN = "three_axis_r_within_rows"


def course_of(values, losses=None):
    """A result of one followed number over steps 0, 1, ..., as `emergence` makes it."""
    n = len(values)
    data = {
        "loss": ("checkpoint", losses or np.arange(n, 0, -1.0)),
        "step": ("checkpoint", np.arange(n)),
        "coupling_growth_r2": ("checkpoint", np.array(values), {"measure": "coupling"}),
    }
    attrs = {"rows": "checkpoint", "model": "made up", "measures": ["coupling"]}
    return Result("emergence", xr.Dataset(data, {"checkpoint": [f"step{i}" for i in range(n)]}, attrs))


def test_the_last_checkpoint_measures_as_the_model_itself(per_head, mini, alice):
    tokens = torch.stack(to_prompts(mini, alice, length=32, n_prompts=2))
    loss = float(token_losses(mini, tokens).mean())
    assert float(per_head.dataset.loss[-1]) == pytest.approx(loss, abs=1e-3)


def test_coupling_of_the_last_checkpoint_is_that_of_the_model_itself(of_coupling, mini, alice):
    expected = coupling(mini, alice, k=4, null_seeds=(), **CUT).summary
    numbers = {key: value for key, value in expected.items() if isinstance(value, int | float)}
    found = {key: float(of_coupling.dataset[f"coupling_{key}"][-1]) for key in numbers}
    assert len(numbers) > 27
    assert found == pytest.approx(numbers, rel=1e-3, abs=1e-3)


def test_it_is_named_after_the_model_and_carries_steps_and_loss(of_coupling):
    assert of_coupling.dataset.attrs["model"] == "some_model"
    assert of_coupling.dataset.step.values.tolist() == [0, 10]
    assert float(of_coupling.dataset.loss[1]) < float(of_coupling.dataset.loss[0]) - 0.5
    assert of_coupling.provenance["measures"]["coupling"]["k"] == 4
    assert of_coupling.provenance["checkpoints"] == ["step0", "step10"]


def test_training_lowers_the_loss_and_raises_r(per_head):
    assert float(per_head.dataset.loss[1]) < float(per_head.dataset.loss[0]) - 0.5
    r = per_head.dataset[WITHIN].mean(("layer", "head"))
    assert float(r[1]) > float(r[0])


def test_steps_come_from_the_names(per_head):
    assert per_head.dataset.step.values.tolist() == [0, 10]
    assert steps_of(["a", "b"]).tolist() == [0, 1]


def test_nulls_are_random_models_with_their_seeds_in_the_name(of_coupling):
    names = [null.checkpoint.values.tolist() for null in of_coupling.nulls]
    assert names == [["random init (seed 0)"], ["random init (seed 1)"]]
    assert all(np.isfinite(null.coupling_coupling).all() for null in of_coupling.nulls)


def test_every_number_says_of_which_measure_it_is_and_what_it_is(per_head, of_coupling):
    for result in (per_head, of_coupling):
        for name, array in result.dataset.data_vars.items():
            assert array.attrs["long_name"]
            assert array.dims in (("checkpoint",), ("checkpoint", "layer", "head"))
            assert name in ("loss", "step") or name.startswith(f"{array.attrs['measure']}_")
    assert per_head.dataset["three_axis_r"].dims == ("checkpoint", "layer", "head")


def test_it_can_be_saved_drawn_again_and_tabulated(per_head, of_coupling, tmp_path):
    for result, kinds in ((per_head, ["means", "heads"]), (of_coupling, ["means", "controls"])):
        loaded = load(result.save(tmp_path / "r.nc"))["emergence"]
        assert loaded.dataset.equals(result.dataset)
        assert loaded.kinds == result.kinds == kinds
        assert [loaded.plot(kind).to_json() for kind in kinds] == [result.plot(kind).to_json() for kind in kinds]
        assert loaded.findings() == result.findings()
    assert len(per_head.frame()) == 2 * 16
    assert np.isfinite(per_head.frame(null=True)["three_axis_r"]).all()
    assert of_coupling.frame()["checkpoint"].tolist() == ["step0", "step10"]


def test_the_words_name_both_ends_and_the_null(per_head):
    said = " ".join(per_head.findings())
    r = per_head.dataset[WITHIN].mean(("layer", "head"))
    assert f"from {float(r[0]):.3f} at step 0 to {float(r[1]):.3f} at step 10" in said
    assert f"random init {float(per_head.null[WITHIN].mean()):.3f}" in said


def test_coupling_is_told_with_its_intervals_the_spread_of_its_nulls_and_random_bases(of_coupling):
    own, data = of_coupling.summary, of_coupling.dataset
    nulls = [float(null.coupling_coupling[0]) for null in of_coupling.nulls]
    null = f"(random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f})"
    first = f"{own['coupling_coupling_first']:.3f} [{float(data.coupling_coupling_low[0]):.3f}, "
    said = of_coupling.findings()
    assert said[1].startswith(f"Coupling goes from {first}")
    assert null in said[1]
    chance = data.coupling_chance.values
    assert said[2] == f"Random bases with the same spectra reach {chance.min():.3f} to {chance.max():.3f}."


def test_a_change_that_was_lost_again_is_told_with_its_steps_and_the_largest_value():
    found = course_of([0.37, 0.69, 0.42, 0.32, 0.61, 0.66])
    said = findings(found.summary, None)[1]
    assert said == (
        "R² of exponential growth goes from 0.370 at step 0 to 0.660 at step 5 (no null measured), and is largest at "
        "step 1 (0.690); half of the change is there at step 1, is lost again, and is there for good by step 4, at "
        "loss 2.000."
    )


@pytest.mark.parametrize(
    ("values", "told"), [([0.3, 0.4, 0.7], False), ([0.7, 0.4, 0.3], False), ([0.3, 0.8, 0.7], True)]
)
def test_the_largest_value_is_told_where_it_is_neither_the_first_nor_the_last(values, told):
    assert ("and is largest at step 1" in findings(course_of(values).summary, None)[1]) == told
    assert ("is largest" in findings(course_of(values).summary, None)[1]) == told


def test_a_change_that_stayed_is_not_called_lost():
    said = findings(course_of([0.3, 0.4, 0.7]).summary, None)[1]
    assert said.endswith("half of the change is there by step 2, at loss 1.000.")


def test_one_checkpoint_and_numbers_that_could_not_be_had_are_told_as_such():
    assert findings(course_of([0.5]).summary, None) == [
        "R² of exponential growth is 0.500 at step 0 (no null measured)."
    ]
    assert "to not defined at step 1" in findings(course_of([0.5, np.nan]).summary, None)[1]


def test_the_summary_is_json_and_holds_what_the_dataset_does(per_head, of_coupling):
    for result in (per_head, of_coupling):
        assert json.dumps(jsonable(result.summary), allow_nan=False)
        assert json.dumps(jsonable(result.null_summary.seeds), allow_nan=False)
    over_steps = per_head.dataset[WITHIN].mean(("layer", "head"))
    assert per_head.summary[f"{WITHIN}_over_steps"] == pytest.approx(over_steps.values.tolist())
    assert per_head.summary[WITHIN] == per_head.summary[f"{WITHIN}_over_steps"][-1]


def test_means_are_drawn_beside_the_null(per_head):
    figure, data = per_head.plot("means"), per_head.dataset
    labels = [annotation.text for annotation in figure.layout.annotations]
    assert labels == ["loss", "r", "r within rows", "position", "content", "interaction", "slash"]
    curve, null = figure.data[4:6]
    np.testing.assert_allclose(curve.y, data[WITHIN].mean(("layer", "head")))
    assert curve.x.tolist() == [1, 11]
    np.testing.assert_allclose(null.y, float(per_head.null[WITHIN].mean()))
    assert null.name == "random init (seed 0)"


def test_every_head_is_drawn_in_the_colour_of_its_layer(per_head):
    lines = [trace for trace in per_head.plot("heads").data if (trace.name or "").startswith("layer")]
    assert len(lines) == 6 * 16
    np.testing.assert_array_equal(lines[16 + 5].y, per_head.dataset[WITHIN].sel(layer=1, head=1))
    assert len({trace.line.color for trace in lines}) == 4


def test_coupling_is_drawn_with_its_interval_random_bases_and_null(of_coupling):
    traces, data = of_coupling.plot("means").data, of_coupling.dataset
    names = [trace.name for trace in traces]
    assert "random init (seed 0)" in names
    np.testing.assert_array_equal(traces[names.index("random bases")].y, data.coupling_chance)
    band = next(trace for trace in traces if trace.fill == "toself")
    np.testing.assert_array_equal(band.y[:2], data.coupling_coupling_high)
    controls = of_coupling.plot("controls")
    assert len(controls.layout.annotations) == 4
    np.testing.assert_array_equal(controls.data[1].y, data.coupling_swapped)


def test_the_table_has_a_row_a_checkpoint(per_head, of_coupling):
    for result in (per_head, of_coupling):
        found = result.table()
        assert found["checkpoint"].tolist() == ["step0", "step10"]
        assert found["loss"].tolist() == result.dataset.loss.values.tolist()
    own = of_coupling.summary
    interval = f"[{own['coupling_coupling_low']:.3f}, {own['coupling_coupling_high']:.3f}]"
    assert of_coupling.table()["coupling"][1] == f"{own['coupling_coupling']:.3f} {interval}"
    assert of_coupling.table()["random bases"].tolist() == of_coupling.dataset.coupling_chance.values.tolist()
    assert per_head.table()["slash"].tolist() == pytest.approx(per_head.summary["slash_best_score_over_steps"])


def test_a_long_run_is_tabulated_by_twenty_checkpoints_with_both_ends():
    kept = table(course_of(np.linspace(0, 1, 154).tolist()).dataset)["checkpoint"].tolist()
    assert (len(kept), kept[0], kept[-1]) == (20, "step0", "step153")


def test_a_measure_of_ones_own_is_followed_by_its_summary(checkpoints, alice):
    def run(model, prompts, request, job):
        tokens = to_prompts(model, prompts)
        weight = float(model.W_E.detach().square().mean())
        return job.result(request, model, tokens, lambda model, label, after: xr.Dataset({"weight": weight}))

    own = Measure(
        name="weight", question="How large?", explanation="", source="ours", variables={}, procedure=run,
        summarise=lambda data: {"weight": float(data["weight"]), "head": "0.1"},
    )  # fmt: skip
    found = emergence(checkpoints, alice, measures=own, null_seeds=(), **OPTIONS)
    assert found.dataset["weight_weight"].dims == ("checkpoint",)
    assert "weight_head" not in found.dataset
    assert found.findings()[1].startswith("Weight weight goes from")
    assert found.kinds == ["means"]
    assert summarise(found.dataset)["weight_weight"] == found.dataset["weight_weight"].values[-1]


def test_bad_input_is_refused(checkpoints, tmp_path, alice):
    for wrong in ([], [checkpoints[0], checkpoints[0]], [tmp_path / "nowhere"]):
        with pytest.raises(InputError):
            emergence(wrong, alice, **OPTIONS)
    with pytest.raises(InputError, match="no tokenizer"):
        emergence(checkpoints, alice, **CUT)
    with pytest.raises(InputError, match=r"k \[129\]: choose from 1 to 128"):
        emergence(checkpoints, alice, measures=[Coupling(k=129)], **OPTIONS)
    with pytest.raises(InputError, match="no measure 'nonsense'"):
        emergence(checkpoints, alice, measures=["nonsense"], **OPTIONS)
    with pytest.raises(InputError, match="null_seeds"):
        emergence([MINI], alice, null_seeds=(0, 0), **CUT)
