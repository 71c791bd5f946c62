"""What results declare: every variable with its dimensions; and a result whose summary is given."""

import xarray as xr

from tl_posgen.core.measure import Measure
from tl_posgen.core.result import Result


def assert_declared(result: Result) -> None:
    """Every variable of the dataset (and of each null) stands in the measure's variables, with its dims; beside them
    only what belongs to the intervals of those that have one."""
    intervals = {"prompt_share"}
    for name in (name for name, one in result.measure.variables.items() if one.interval):
        intervals |= {f"{name}_left_out", *(f"{of}{name}_{end}" for of in ("", "mean_") for end in ("low", "high"))}
    for dataset in (result.dataset, *result.nulls):
        found = {
            str(name): tuple(map(str, array.dims)) for name, array in dataset.data_vars.items() if name not in intervals
        }
        declared = {name: one.dims for name, one in result.measure.variables.items() if name in found}
        assert found == declared
    assert all(one.label for one in result.measure.variables.values())


def result_of(own, *nulls):
    """A result whose summary is given."""
    sides = [xr.Dataset(attrs={"summary": summary}) for summary in (own, *nulls)]
    declared = Measure(
        name="made_up",
        question="",
        explanation="",
        source="",
        variables={},
        summarise=lambda data: data.attrs["summary"],
    )
    return Result("made_up", sides[0], tuple(sides[1:]), declared=declared)
