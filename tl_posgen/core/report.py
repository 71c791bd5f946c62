"""Report: the results of an analysis; shown, written as a page, saved."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, SupportsIndex

import pandas as pd

from tl_posgen.core.files import (
    as_path,
    jsonable,
    read_attributes,
    require_free,
    results_bytes,
    write_files,
    write_whole,
)
from tl_posgen.core.formatting import known_by
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.result import Result, shown_as
from tl_posgen.core.views import view
from tl_posgen.errors import InputError
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.models.provenance import OF_FUNCTIONS
from tl_posgen.models.selection import Heads

MOST_SENTENCES = 3  # that a reader sees first; the others are folded
# of the provenance, in summary.json
_IN_SUMMARY = ("model", "backend", "text", "length", "prompts", "first_token", "versions")


class Report(Mapping[str, Result]):
    """The results of an analysis: a mapping of measure name to `Result`.

    Attributes:
        results: the results by name, in the order they are reported.
        provenance: model, backend, versions, prompts, seeds: what is needed to run the same analysis again.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Alice was beginning to get very tired of sitting by her sister.")
        >>> list(report)[:3]
        ['variance', 'three_axis', 'mean_key']
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
        return view("report in a cell")(self).html()

    def _ipython_display_(self) -> None:
        view("report in a cell")(self).display(repr(self))

    def show(self, height: int = 900) -> Any:
        """Show the page that `write` writes in a notebook's cell."""
        return view("page in a cell")(self.html(), height)

    def __repr__(self) -> str:
        name = f"Report({', '.join(self.results)}; {self.provenance.get('model', 'model')}"
        return shown_as(name, self.results.values(), self.headlines())

    def findings(self) -> list[str]:
        """Return what was found, in sentences; each warning once, behind the measures that share it."""
        lines = [[*result.sentences, *([result.caveat] if result.caveat else [])] for result in self.results.values()]
        return [*chain.from_iterable(lines), *self._warned()]

    def headlines(self) -> list[str]:
        """Return the sentences that a reader sees first: of each result its first one (or `n_headlines`), then the
        others in turn; of those that stand behind a measure that reads them, none."""
        first, later, names_read = [], [], set[str]()
        for name, result in self.results.items():
            n = result.measure.n_headlines
            first += [] if name in names_read else result.sentences[:n]
            later += [] if name in names_read else [result.sentences[n:]]
            names_read |= {kind.name for kind in result.measure.after}
        return [*first, *(line for row in zip_longest(*later) for line in row if line is not None)][:MOST_SENTENCES]

    def notes(self) -> list[str]:
        """Return what the model's encoding and hooks make of the results, each once behind the measures that share it;
        of restrictions that several measures have, where they come from."""
        restricted = defaultdict[tuple[str, ...], list[Result]](list)
        for result in self.results.values():
            if result.caveat:
                restricted[tuple(result.encodings)].append(result)
        notes = []
        for encodings, (first, *others) in restricted.items():
            restricting = [
                name for name in encodings if any(name in result.measure.caveats for result in (first, *others))
            ]
            where = "; ".join(known_by(name, encodings) for name in restricting)
            names = [result.name for result in (first, *others)]
            restriction = f"restricts what {', '.join(names)} say: --full, the page and report.findings() tell how."
            notes.append(f"{where}, which {restriction}" if others else str(first.caveat))
        return [*notes, *self._warned(), *self.without_null()]

    def _warned(self) -> list[str]:
        """Return every warning once, behind the measures that share it."""
        warned = defaultdict[str, list[str]](list)
        for name, result in self.results.items():
            for warning in result.warnings:
                warned[warning].append(name)
        return [f"{', '.join(names)}: {warning}" for warning, names in warned.items()]

    def without_null(self) -> list[str]:
        """Return that no null model was measured, where measures have one."""
        missing = any(result.measure.has_null for result in self.results.values())
        missing = missing and not any(result.nulls for result in self.results.values())
        return ["No null model was measured."] if missing else []

    def frame(self, of: str = TRAINED) -> pd.DataFrame:
        """Return a row a head with the headlines of every per-head result, numbers that several share in the model
        once: of the model, or the mean over its random inits ("random init") or shuffled weights ("shuffled"). Without
        rows where no result has a number a head: `report[name].frame()` has its own rows, as those of `compare`."""

        def merged(side: str) -> pd.DataFrame:
            table = pd.DataFrame(columns=list(HEAD))
            for result in self.results.values():
                frame = result.headline_frame(side)
                if frame is not None:
                    table = frame if table.empty else table.merge(frame, on=list(HEAD), how="outer")
            return table

        table = merged(TRAINED)
        # the same numbers under two names; whole ones may agree by chance, and those that are the same for all
        floats = table.drop(columns=list(HEAD)).select_dtypes("float")
        floats = floats.loc[:, (floats % 1 > 0).any() & (floats.nunique() > 1)]
        again = floats.columns[floats.T.duplicated()]
        return (table if of == TRAINED else merged(of)).drop(columns=again, errors="ignore")

    def heads(
        self, name: str | None = None, top: int | None = 5, by: str | None = None, **options: Any
    ) -> pd.DataFrame:
        """Return the `top` heads of a result, or as many others as a control, see `Result.heads`; interventions and
        measures take it as `heads=`. The name may be left out where the report has one result."""
        if name is None and len(self) > 1:
            raise InputError(f"heads: name a result: {', '.join(self.results)}")
        return self[next(iter(self)) if name is None else name].heads(top, by, **options)

    def head(self, head: Heads | SupportsIndex, *more: Any) -> Any:
        """Return one head: every number of it with its interval and null models, its curves and maps between tokens.

        It shows itself in a notebook and in a terminal; `.frame()` is its numbers, `.plot()` its figure.

        Args:
            head: "L3H1", "3.1" or (3, 1).

        Raises:
            InputError: more than one head, or one that no result has.

        Example:
            >>> import tl_posgen
            >>> report = tl_posgen.analyze("mini", "Down, down, down.", measures="mean_key", nulls=0)
            >>> report.head("L3H1").frame().columns.tolist()
            ['measure', 'quantity', 'value', 'low', 'high']
        """
        return view("one head")(self.results, head, *more)

    def summary(self) -> dict[str, Any]:
        """Return the report in one JSON-ready dictionary: model, prompts, versions, heads, means, all numbers."""

        def means(table: pd.DataFrame) -> Any:
            return jsonable({str(name): float(table[name].mean()) for name in table.columns if name not in HEAD})

        table = self.frame()
        heads = [{key: jsonable(float(value)) for key, value in row.items()} for row in table.to_dict("records")]
        heads = [row | {name: int(row[name] or 0) for name in HEAD} for row in heads]
        summary = {name: self.provenance.get(name) for name in _IN_SUMMARY}
        summary |= {"heads": heads, "mean": means(table)}
        for kind in NULL_KINDS:
            null, seeds = self.frame(kind), self.provenance.get("nulls", {}).get(kind)
            summary[kind] = {"seeds": seeds, "mean": means(null)} if len(null) else None
        return summary | {"measures": {name: result.as_summary() for name, result in self.results.items()}}

    def save(self, path: str | os.PathLike) -> Path:
        """Write all results to one NetCDF4 file, which `tl_posgen.load` reads back.

        Raises:
            OutputError: the place cannot be written, or the disk is full.
        """
        return write_whole(path, self.as_bytes())

    def as_bytes(self) -> bytes:
        """Return all results as the bytes of one NetCDF4 file, a group each; large arrays in float32."""
        return results_bytes(
            {name: (result.dataset, result.provenance) for name, result in self.items()}, self.provenance
        )

    def leading_table(self) -> pd.DataFrame | None:
        """Return the table that stands first, such as slash-dominant heads: that of the first measure; None where it
        has none, or no row."""
        first = next(iter(self.results.values()), None)
        table = None if first is None else first.measure.leading_table(self)
        return None if table is None or table.empty else table

    def html(self) -> str:
        """Return the report as one page that opens with no network."""
        return view("page")(self)

    def page_files(self) -> dict[str, bytes]:
        """Return summary.json and index.html, which `write` puts beside the results, the page last: where it stands,
        the others do."""
        summary = json.dumps(self.summary(), indent=1, allow_nan=False) + "\n"
        return {"summary.json": summary.encode(), "index.html": self.html().encode()}

    def write(self, directory: str | os.PathLike, *, force: bool = False) -> Path:
        """Write index.html, summary.json and results.nc into `directory`, each whole; returns index.html.

        Args:
            force: replace what another analysis left there; its own report of before is always replaced, unless it is
                under hooks or a metric, of which only names are known.

        Raises:
            OutputError: the directory holds another report, or cannot be written.
        """
        require("force", force, bool)
        require_free(directory, force or self.is_in(as_path(directory)))
        write_files(as_path(directory), {"results.nc": self.as_bytes()} | self.page_files())
        return as_path(directory) / "index.html"

    def is_in(self, directory: str | os.PathLike) -> bool:
        """Return whether a directory holds a report of the same measures, model and prompts; never under hooks or a
        metric, of which only names are known."""
        if set(OF_FUNCTIONS) & set(self.provenance):
            return False
        try:
            attributes = read_attributes(Path(directory, "results.nc"))
            then = [json.loads(attributes[name]) for name in ("order", "provenance")]
        except (OSError, ValueError, KeyError):  # none, a damaged one, or something else
            return False
        now = json.loads(json.dumps([list(self.results), self.provenance]))
        for _, provenance in (then, now):
            for name in ("text", "drawn"):  # one text may have two names; its tokens are compared
                provenance.pop(name, None)
        return then == now
