"""A Report: the results of one analysis by name, and the three files it is written to."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tl_posgen.errors import InputError, OutputError
from tl_posgen.report.summary import head_table, summary_of
from tl_posgen.results import Result, save_results


class Report(Mapping[str, Result]):
    """What an analysis found: a mapping of measure name to `Result`.

    Attributes:
        results: the results by name, in the order they are reported.
        provenance: model, backend, versions, prompts, seed: what is needed to run the same analysis again.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Alice was beginning to get very tired of sitting by her sister.")
        >>> list(report)[:3]
        ['three_axis', 'variance', 'mean_key']
        >>> sorted({"r", "r_no_first", "r_visible"} & set(report["three_axis"].frame().columns))
        ['r', 'r_no_first', 'r_visible']
    """

    def __init__(self, results: Mapping[str, Result], provenance: Mapping[str, Any]):
        self.results = dict(results)
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

    def __repr__(self) -> str:
        return f"Report({', '.join(self.results)}; {self.provenance.get('model', 'model')})"

    def frame(self, *, null: bool = False) -> pd.DataFrame:
        """One row per head with the headline measures of every per-head result."""
        return head_table(self.results, null=null)

    def summary(self) -> dict[str, Any]:
        """The report in one JSON-ready dictionary: model, prompts, versions, heads, means, and the null's means."""
        return summary_of(self.results, self.provenance)

    def save(self, path: str | os.PathLike) -> Path:
        """Write all results to one NetCDF4 file, which `tl_posgen.load` reads back."""
        return save_results(self.results, path)

    def html(self) -> str:
        """The report as one page that opens with no network."""
        from tl_posgen.report.page import render_page

        return render_page(self.results, self.provenance)

    def write(self, directory: str | os.PathLike) -> Path:
        """Write index.html, summary.json and results.nc into `directory`, all of them or none; returns index.html."""
        directory = prepare_directory(directory)
        partial = Path(tempfile.mkdtemp(dir=directory, prefix=".partial-"))
        try:
            (partial / "index.html").write_text(self.html(), encoding="utf-8")
            summary = json.dumps(self.summary(), indent=1, allow_nan=False)
            (partial / "summary.json").write_text(summary + "\n", encoding="utf-8")
            self.save(partial / "results.nc")
            for finished in partial.iterdir():
                finished.replace(directory / finished.name)
        except OSError as error:
            raise OutputError(f"{directory}: cannot write the report there ({error.strerror})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return directory / "index.html"


def prepare_directory(directory: str | os.PathLike) -> Path:
    """The directory, made if need be and proved writable; called before long work, so that its result is not lost."""
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{directory}: cannot write there ({reason}); choose another --out") from error
    return directory
