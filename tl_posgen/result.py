"""Result and Report: labelled numbers, their null, where they came from; saved, loaded, drawn and written."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen import registry
from tl_posgen.core.result import Result as NewResult
from tl_posgen.errors import InputError
from tl_posgen.files import as_path, require_free, write_together, write_whole
from tl_posgen.measure import Measure, rows_of
from tl_posgen.models.provenance import SAME_WEIGHTS
from tl_posgen.netcdf import netcdf_bytes, read_attributes, read_netcdf, readable
from tl_posgen.options import require, require_name
from tl_posgen.report.intervals import ENDS
from tl_posgen.report.sentences import caveat
from tl_posgen.report.unknown import unknown_measure
from tl_posgen.summary import NullSummary, Summary, jsonable

FORMAT = 1  # of saved files; raised when this version can no longer read them as they were


@dataclass(frozen=True)
class Result:
    """What one measure found of one model.

    Attributes:
        name: of the measure, see `tl_posgen.registry`.
        dataset: labelled arrays, each variable with its label, unit and description. `dataset.attrs["rows"]` names the
            dimensions of one row of `frame()`, (layer, head) unless it says otherwise.
        nulls: the same dataset for randomly initialised models of the same shape, one a seed; empty for none.
        provenance: model, versions, dtype, seeds, options, prompt hash.
        declared: the measure, where it is not registered (one of your own, in a notebook).
    """

    name: str
    dataset: xr.Dataset
    nulls: tuple[xr.Dataset, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    declared: Measure | None = None

    def __post_init__(self) -> None:
        require_name(self.name, "result")

    @property
    def own(self) -> xr.Dataset:
        """The dataset of the model."""
        return self.dataset

    @property
    def null(self) -> xr.Dataset | None:
        """The dataset of the first random init: the one that figures draw."""
        return self.nulls[0] if self.nulls else None

    @cached_property
    def measure(self) -> Measure:
        """Its declaration; one that only maps heads, where the package that declared it is not installed."""
        try:
            return self.declared or registry.find(self.name) or unknown_measure(self.name)
        except InputError:  # its package is there and cannot be imported
            return unknown_measure(self.name)

    @cached_property
    def summary(self) -> Summary:
        """The numbers that sentences, tables, figure titles and claims show."""
        return self.measure.summary(self.dataset)

    @cached_property
    def null_summary(self) -> NullSummary | None:
        """The same of the random inits."""
        return NullSummary([self.measure.summary(null) for null in self.nulls]) if self.nulls else None

    @property
    def encodings(self) -> list[str]:
        """How the model's layers know positions; empty where that is not known."""
        return [name for name in str(self.provenance.get("encoding", "")).split(", ") if name]

    def findings(self) -> list[str]:
        """What was found, in sentences, and what the model's encoding makes of it."""
        meaningful = not self.encodings or set(self.encodings) - self.measure.without_meaning
        sentences = list(self.measure.findings(self.summary, self.null_summary)) if meaningful else []
        return [*sentences, *([self.caveat] if self.caveat else []), *self.warnings]

    @property
    def warnings(self) -> list[str]:
        """What sets this result apart from that of the plain model beside its null."""
        found = [] if self.edits is None else [self.edits]
        if layers := listed(self.dataset.attrs.get("edited_patterns", [])):
            found.append(
                f"{self.name}: measured from patterns that are not the softmax of the scores, in layer {layers}: hooks "
                "edit them."
            )
        if self.dataset.attrs.get("unproved"):
            found.append(
                f"{self.name}: recomputed from cached q and k, and not compared with the scores that the pass used: "
                "the cache holds neither hook_attn_scores nor hook_pattern."
            )
        if hooks := self.provenance.get("fwd_hooks"):
            found.append(f"{self.name}: measured under hooks, the random inits too: {', '.join(hooks)}.")
        if any(str(null.attrs.get("model", "")).endswith(SAME_WEIGHTS) for null in self.nulls):
            found.append(f"{self.name}: the random init has the model's own weights, so the two cannot differ.")
        return found

    @property
    def edits(self) -> str | None:
        """In which layers the pass used other scores than those of q and k, and how the first differ; None in none."""
        layers = listed(self.dataset.attrs.get("edited_layers", []))
        said = f"{self.name}: measured from scores that are not those of q and k, in layer {layers}."
        return f"{said} {self.dataset.attrs['edited']}" if layers else None

    @cached_property
    def caveat(self) -> str | None:
        """What to keep in mind for the model's encoding; None where the measure means what it says."""
        return caveat(self.name, self.measure.caveats, self.encodings)

    def frame(self, *, null: bool = False, intervals: bool = True) -> pd.DataFrame:
        """One row per head (or per `rows`), one column per scalar measure. `null=True`: of the first random init.
        `intervals=False` leaves the ends of intervals over prompts out."""
        dataset = self._side(null)
        rows = rows_of(dataset)
        labels = [name for name, array in dataset.coords.items() if array.dims == rows and name not in rows]
        scalars = [name for name, array in dataset.data_vars.items() if set(array.dims) == set(rows)]
        if not intervals:
            ends = {f"{name}{end}" for name, one in self.measure.variables.items() if one.interval for end in ENDS[1:]}
            scalars = [name for name in scalars if name not in ends]
        return dataset[scalars].to_dataframe(dim_order=list(rows)).reset_index()[[*rows, *labels, *scalars]]

    def page_frame(self) -> pd.DataFrame:
        """The frame that the page shows."""
        return self.frame(intervals=False)

    def headline_frame(self, *, null: bool = False) -> pd.DataFrame | None:
        """Return the per-head headlines under the names that reports give them; None for rows that are no heads."""
        if rows_of(self.dataset) != ("layer", "head") or (null and self.null is None):
            return None
        frame = self.frame(null=null, intervals=False)
        headlines = {key: one.headline for key, one in self.measure.variables.items() if one.headline}
        columns = headlines or {c: f"{self.name}_{c}" for c in frame.columns if c not in ("layer", "head")}
        columns = {old: new for old, new in columns.items() if old in frame}
        kept = {new: frame[old] for old, new in columns.items()}
        return pd.DataFrame({"layer": frame["layer"], "head": frame["head"], **kept})

    def headline_labels(self) -> dict[str, tuple[str, str]]:
        """Return, for every column of `headline_frame`, its short heading and its label."""
        return {one.headline: (one.short, one.label) for one in self.measure.variables.values() if one.headline}

    def as_summary(self) -> dict[str, Any]:
        """Return its part of summary.json."""
        nulls = self.null_summary.seeds if self.null_summary else []
        return {"summary": jsonable(self.summary), "null": jsonable(nulls)}

    def filled_in(self, text: str) -> str:
        """Return a text with the numbers of the summary that it names."""
        return text.format(**self.summary)

    def token_labels(self) -> list[str]:
        """Return a line for each token-level picture."""
        return [] if self.measure.tokens is None else self.measure.tokens.labels(self.dataset)

    def token_page(self, example: int) -> Any:
        """Return a token-level picture."""
        assert self.measure.tokens is not None
        return self.measure.tokens.show(self.dataset, example)

    def table(self, *, null: bool = False) -> pd.DataFrame | None:
        """The short table of the measure, or None where it has none."""
        return None if self.measure.table is None else self.measure.table(self._side(null))

    def _side(self, null: bool) -> xr.Dataset:
        if not null:
            return self.dataset
        if self.null is None:
            raise InputError(f"{self.name}: no null was measured; run again with null_seeds=(0,)")
        return self.null

    @property
    def kinds(self) -> list[str]:
        """The kinds of figures that `plot` can draw of this result."""
        return self.measure.kinds(self.dataset)

    def plot(self, kind: str | None = None):
        """A plotly Figure of this result beside its null: of this kind, the first of `kinds` if left out."""
        if not self.kinds:
            raise InputError(f"{self.name} has no figure; its numbers are in .dataset and .frame()")
        kind = self.kinds[0] if kind is None else kind
        if kind not in self.kinds:
            raise InputError(f"kind={kind!r}: {self.name} draws {', '.join(map(repr, self.kinds))} of this result")
        return self.measure.figures[kind](self)

    def show(self, example: int = 0):
        """A circuitsvis page of this result, token by token, below a line that says what it draws."""
        from tl_posgen.report.circuits import titled

        view = self.measure.tokens
        if view is None:
            why = self.measure.no_tokens or "its numbers are not of single tokens; use .plot()"
            raise InputError(f"{self.name} has no token-level view: {why}")
        labels = view.labels(self.dataset)
        if not 0 <= example < len(labels):
            raise InputError(f"example={example}: {self.name} has {len(labels)}: {'; '.join(labels)}")
        return titled(view.show(self.dataset, example), labels[example])

    def heads(self, top: int = 5, by: str | None = None) -> pd.DataFrame:
        """The `top` heads by a variable: layer, head and the variable, largest first.

        Args:
            by: a per-head variable; the measure's first headline if left out.
        """
        columns = [str(name) for name, array in self.dataset.data_vars.items() if array.dims == ("layer", "head")]
        headlines = [name for name, one in self.measure.variables.items() if one.headline and name in columns]
        by = by or next(iter(headlines or columns), "")
        if by not in columns:
            raise InputError(f"by={by!r}: {self.name} has, per head, {', '.join(columns) or 'nothing'}")
        series = self.dataset[by].to_series().dropna().astype(float)
        return series.nlargest(top).reset_index()[["layer", "head", by]]

    def save(self, path: str | os.PathLike) -> Path:
        """Write NetCDF4 to `path`, whole or not at all; `tl_posgen.load` reads it back."""
        return save_results({self.name: self}, path, self.provenance)

    def _repr_html_(self) -> str:
        """In a notebook: findings, a table, the first figure."""
        from tl_posgen.report.cell import of_result

        return of_result(self)

    def __repr__(self) -> str:
        return f"Result({self.name}; {self.dataset.attrs.get('model', 'model')})"


class Report(Mapping[str, Result]):
    """What an analysis found: a mapping of measure name to `Result`.

    Attributes:
        results: the results by name, in the order they are reported.
        provenance: model, backend, versions, prompts, seeds: what is needed to run the same analysis again.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Alice was beginning to get very tired of sitting by her sister.")
        >>> list(report)[:3]
        ['three_axis', 'variance', 'mean_key']
        >>> report.heads("three_axis", top=2).columns.tolist()
        ['layer', 'head', 'r']
    """

    def __init__(self, results: Mapping[str, Result], provenance: Mapping[str, Any]):
        self.results = dict(results)
        for name, result in self.results.items():
            if name != result.name:
                raise InputError(f"report: {result.name} is given under the name {name!r}; a result keeps its own")
        self.provenance = dict(provenance)

    def __getitem__(self, name: str) -> Result:
        if name not in self.results:
            raise InputError(f"no result {name!r} in this report; it has {', '.join(self.results)}")
        return self.results[name]

    def __contains__(self, name: object) -> bool:
        return name in self.results

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def _repr_html_(self) -> str:
        """In a notebook: findings, a table, the first figure; `show` has the whole page."""
        from tl_posgen.report.cell import of_report

        return of_report(self)

    def show(self, height: int = 900) -> Any:
        """The page that `write` writes, in a notebook's cell."""
        from tl_posgen.report.cell import Page

        return Page(self.html(), height)

    def __repr__(self) -> str:
        return f"Report({', '.join(self.results)}; {self.provenance.get('model', 'model')})"

    def findings(self) -> list[str]:
        """What was found, in sentences."""
        return [sentence for result in self.results.values() for sentence in result.findings()]

    def frame(self, *, null: bool = False) -> pd.DataFrame:
        """One row per head with the headlines of every per-head result. `null=True`: of the first random init."""
        from tl_posgen.report.tables import head_table

        return head_table(self.results, null=null)

    def heads(self, name: str, top: int = 5, by: str | None = None) -> pd.DataFrame:
        """The `top` heads of a result, see `Result.heads`; interventions and measures take it as `heads=`."""
        return self[name].heads(top, by)

    def summary(self) -> dict[str, Any]:
        """The report in one JSON-ready dictionary: model, prompts, versions, heads, means, and the null's means."""
        from tl_posgen.report.tables import summary_of

        return summary_of(self.results, self.provenance)

    def save(self, path: str | os.PathLike) -> Path:
        """Write all results to one NetCDF4 file, which `tl_posgen.load` reads back."""
        return save_results(self.results, path, self.provenance)

    def html(self) -> str:
        """The report as one page that opens with no network."""
        from tl_posgen.report.page import render_page

        return render_page(self.results, self.provenance)

    def page_files(self) -> dict[str, bytes]:
        """index.html and summary.json, all that `write` puts beside the results."""
        summary = json.dumps(self.summary(), indent=1, allow_nan=False) + "\n"
        return {"index.html": self.html().encode(), "summary.json": summary.encode()}

    def write(self, directory: str | os.PathLike, *, force: bool = False) -> Path:
        """Write index.html, summary.json and results.nc into `directory`, all of them or none; returns index.html.

        Args:
            force: replace what another analysis left there; its own report of before is always replaced.

        Raises:
            OutputError: the directory holds another report, or cannot be written.
        """
        require("force", force, bool)
        require_free(directory, force or self._is_in(as_path(directory)))
        write_together(as_path(directory), self.page_files() | {"results.nc": results_bytes(self, self.provenance)})
        return as_path(directory) / "index.html"

    def _is_in(self, directory: Path) -> bool:
        """Whether a directory holds a report of the same measures of the same model and prompts."""
        try:
            attributes = read_attributes(directory / "results.nc")
            then = [json.loads(attributes[name]) for name in ("order", "provenance")]
        except (OSError, ValueError, KeyError):  # none, a damaged one, or something else
            return False
        return then == json.loads(json.dumps([list(self.results), self.provenance]))


def listed(layers: Any) -> str:
    """ "0, 2" of an attribute, which a file gives back as an array or a single number."""
    return ", ".join(str(int(layer)) for layer in np.atleast_1d(layers))


def save_results(results: Mapping[str, Result], path: str | os.PathLike, provenance: Mapping[str, Any]) -> Path:
    """Write results to one NetCDF4 file, whole or not at all; `load` reads it.

    Raises:
        OutputError: the place cannot be written, or the disk is full.
    """
    return write_whole(path, results_bytes(results, provenance))


def results_bytes(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> bytes:
    """Results as the bytes of one NetCDF4 file, a group each, and null/<seed number>/<name> for its random inits."""
    attributes = {"format": FORMAT, "order": json.dumps(list(results)), "provenance": json.dumps(dict(provenance))}
    groups = {"/": xr.Dataset(attrs=attributes)}
    for name, result in results.items():
        groups[name] = result.dataset.assign_attrs(provenance=json.dumps(dict(result.provenance)))
        if isinstance(result, NewResult):
            groups[name] = groups[name].assign_attrs(labelled=1)
            continue
        groups |= {f"null/{number}/{name}": null for number, null in enumerate(result.nulls)}
    return netcdf_bytes(groups)


def load(path: str | os.PathLike) -> Report:
    """The Report of a file that `Report.save`, `Report.write` or `Result.save` wrote; it writes the same page again.

    Args:
        path: the .nc file, or the directory that `write` made.

    Raises:
        InputError: no such file, one that is damaged or was changed, of another version, or not a results file.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r}: give the path of a .nc file that .save() wrote, or of its directory")
    path = Path(path)
    with readable(path):
        path = path / "results.nc" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"{path}: no such file; give a .nc file that .save() wrote")
        groups = read_netcdf(path)
        whole = groups["/"].attrs
        if (version := whole["format"]) != FORMAT:
            which = f"saved in format {version} by another version of tl_posgen, and this one reads {FORMAT}"
            raise InputError(f"{path}: {which}; install that version, or measure anew")
        results = {}
        for name in json.loads(whole["order"]):
            dataset = groups[f"/{name}"]
            provenance = json.loads(dataset.attrs.pop("provenance"))
            if dataset.attrs.pop("labelled", 0):
                results[name] = NewResult(measure_of(name, provenance.get("options", {})), dataset, provenance)
                continue
            results[name] = Result(name, dataset, tuple(nulls_of(groups, name)), provenance)
        return Report(results, json.loads(whole["provenance"]))


def load_provenance(path: Path) -> dict[str, Any]:
    """Of a file that `load` reads, its report's provenance alone."""
    with readable(path):
        return json.loads(read_attributes(path)["provenance"])


def nulls_of(groups: Mapping[str, xr.Dataset], name: str) -> Sequence[xr.Dataset]:
    """The random inits of one result, in the order of their seeds."""
    numbered = {path.split("/")[2]: group for path, group in groups.items() if re.fullmatch(rf"/null/\d+/{name}", path)}
    return [numbered[number] for number in sorted(numbered, key=int)]


def measure_of(name: str, options: Mapping[str, Any]) -> Any:
    """Return the measure of a saved result with its options; one that maps heads where it is not installed."""
    from tl_posgen.report.unknown import unknown

    try:
        found = registry.find(name)
    except InputError:  # its package is there and cannot be imported
        found = None
    kind = getattr(found, "kind", None)
    if kind is None:
        return unknown(name)
    try:
        return kind.with_options(options)
    except InputError:  # options of another version
        return kind.with_options({})
