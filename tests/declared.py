"""A result whose every variable is declared, with the dimensions that it really has."""

from tl_posgen.result import Result


def assert_declared(result: Result) -> None:
    """Every variable of the dataset (and of each null) stands in the measure's variables, with its dims."""
    for dataset in (result.dataset, *result.nulls):
        found = {str(name): tuple(map(str, array.dims)) for name, array in dataset.data_vars.items()}
        declared = {name: one.dims for name, one in result.measure.variables.items() if name in found}
        assert found == declared
    assert all(one.label for one in result.measure.variables.values())
