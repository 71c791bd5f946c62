"""One frozen Result: labelled numbers, where they came from, and the same numbers for the null."""

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from tl_posgen.errors import InputError, OutputError


@dataclass(frozen=True)
class Result:
    """What one analyzer or experiment found.

    Attributes:
        name: name of the measure; also names its view, `tl_posgen.views.<name>`.
        dataset: labelled arrays. `dataset.attrs["rows"]` names the dimensions of one row of `frame()`,
            (layer, head) unless it says otherwise.
        null: the same dataset for a randomly initialised model of the same shape, or None when it was not asked for.
        provenance: model, versions, dtype, seed, prompt hash, mask rule and gauge.
    """

    name: str
    dataset: xr.Dataset
    null: xr.Dataset | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def frame(self, *, null: bool = False) -> pd.DataFrame:
        """One row per head (or per `rows`), one column per scalar measure. `null=True`: of the null model."""
        if null and self.null is None:
            raise InputError(f"{self.name}: no null was measured; run again with a null_seed")
        dataset = self.null if null else self.dataset
        assert dataset is not None
        rows = rows_of(dataset)
        labels = [name for name, array in dataset.coords.items() if array.dims == rows and name not in rows]
        scalars = [name for name, array in dataset.data_vars.items() if set(array.dims) == set(rows)]
        return dataset[scalars].to_dataframe(dim_order=list(rows)).reset_index()[[*rows, *labels, *scalars]]

    def plot(self, **options: Any):
        """A plotly Figure of this result beside its null. Draws; computes nothing."""
        return _view(self.name).plot(self.dataset, self.null, **options)

    def show(self, **options: Any):
        """A circuitsvis page of this result, token by token."""
        view = _view(self.name)
        if not hasattr(view, "show"):
            raise InputError(f"{self.name} has no token-level view; use .plot()")
        return view.show(self.dataset, **options)

    def save(self, path: str | os.PathLike) -> Path:
        """Write NetCDF4 to `path`, whole or not at all."""
        return save_results({self.name: self}, path)


def rows_of(dataset: xr.Dataset) -> tuple[str, ...]:
    rows = dataset.attrs.get("rows", ("layer", "head"))
    return (rows,) if isinstance(rows, str) else tuple(str(row) for row in rows)


def _view(name: str):
    """The module that draws results of this name; a head map for the results of someone else's analyzer."""
    module = f"tl_posgen.views.{name}"
    return importlib.import_module(module if importlib.util.find_spec(module) else "tl_posgen.views.head_map")


def save_results(results: Mapping[str, Result], path: str | os.PathLike) -> Path:
    """Write results to one NetCDF4 file, a group each (and null/<name> beside it), whole or not at all."""
    path = Path(path)
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise OutputError(f"{path}: cannot write there ({error.strerror}); choose another path") from error
    try:
        groups: dict[str, xr.Dataset] = {}
        for name, result in results.items():
            groups[name] = result.dataset.assign_attrs(provenance=json.dumps(dict(result.provenance)))
            if result.null is not None:
                groups[f"null/{name}"] = result.null
        for index, (group, dataset) in enumerate(groups.items()):
            dataset.to_netcdf(partial, mode="a" if index else "w", group=group, engine="h5netcdf")
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike) -> dict[str, Result]:
    """The results of a file that `Result.save` or `Report.save` wrote, by name."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give a .nc file that .save() wrote")
    try:
        tree = xr.open_datatree(path, engine="h5netcdf").load()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a results file ({error}); give a .nc file that .save() wrote") from error
    nulls = tree["null"].children if "null" in tree.children else {}
    results = {}
    for name, node in tree.children.items():
        if name == "null":
            continue
        dataset = node.to_dataset()
        provenance = json.loads(dataset.attrs.pop("provenance", "{}"))
        null = nulls[name].to_dataset() if name in nulls else None
        results[name] = Result(name, dataset, null, provenance)
    tree.close()
    return results
