"""Measuring the parts, each kept when it is done, and their numbers in docs/numbers.json."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expressions import expressions_of
from making import KEPT, MODELS, TEXTS
from numbers_file import NUMBERS, only_shown, read_numbers, short, write_numbers
from parts import PARTS

import tl_posgen
from tl_posgen.core import registry
from tl_posgen.core.files import jsonable

SETTINGS = ("model", "length", "prompts", "seed", "nulls", "options")  # of a result's provenance


def results_of(name: str, *, again: bool = False) -> Mapping[str, Any]:
    """Return the results of a part: those that are kept, else measured now and kept."""
    part, (report, values) = PARTS[name], files_of(name)
    if again or not (report.is_file() or values.is_file()):
        KEPT.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        results = part.make(part)
        if isinstance(next(iter(results.values())), tl_posgen.Result):
            first = next(iter(results.values()))
            tl_posgen.Report(dict(results), getattr(results, "provenance", first.provenance)).save(report)
        else:
            values.write_text(json.dumps(jsonable(results)), encoding="utf-8")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return tl_posgen.load(report) if report.is_file() else json.loads(values.read_text(encoding="utf-8"))


def files_of(name: str) -> tuple[Path, Path]:
    """Return where the results of a part are kept: a report, or JSON values."""
    stem = f"{name.replace(' ', '-')}-{PARTS[name].file}"
    return KEPT / f"{stem}.nc", KEPT / f"{stem}.json"


def measure(names: Sequence[str], *, again: bool = False) -> None:
    """Measure these parts where they are not kept, and write those of their numbers that pages show."""
    from pages import shown_in

    for name in names:
        if missing := PARTS[name].missing:
            print(f"{name} is left as it is: no {missing}", file=sys.stderr)
            continue
        entry = numbers_of(name, again=again)
        numbers = (read_numbers() if NUMBERS.is_file() else {}) | {name: entry}
        write_numbers({part: numbers[part] for part in PARTS if part in numbers})
    numbers = read_numbers()
    if set(PARTS) <= set(numbers):
        write_numbers(only_shown(numbers, shown_in(numbers)))


def numbers_of(name: str, *, again: bool = False) -> dict[str, Any]:
    """Return a part as docs/numbers.json holds it: its settings, where each result comes from, and its numbers."""
    part, results = PARTS[name], results_of(name, again=again)
    text = {"text": TEXTS[MODELS[part.model][1]]} if part.model else {}
    settings = {"settings": jsonable({**part.settings, **text, "version": tl_posgen.__version__})}
    if not isinstance(results, tl_posgen.Report):
        return {**settings, **short(results)}
    entries = {"results": {key: {**text, **entry_of(result)} for key, result in results.items()}}
    return settings | entries | ({"more": short(jsonable(more))} if (more := part.more(results)) else {})


def entry_of(result: Any) -> dict[str, Any]:
    """Return model, prompts, seeds, options of a result, and its numbers: those of its variables, and expressions."""
    entry = {key: result.provenance.get(key) for key in SETTINGS}
    followed = [
        measure_name
        for measure_name in registry.names()
        if any(str(name).startswith(f"{measure_name}_") for name in result.trained)
    ]
    of_followed = {
        key: label for measure_name in followed for key, label in registry.measure_from(measure_name).usual().items()
    }
    entry["usual"] = {"tokens": "all", **of_followed, **result.measure.usual()}
    numbers = [*result.as_summary(), *expressions_of(result)]
    entry["numbers"] = [{key: number[key] for key in number if number[key] not in (None, [])} for number in numbers]
    if not numbers:  # such as claims, which are words
        entry["rows"] = result.table().to_dict("records")
    return short(jsonable(entry))


def kept() -> Iterator[str]:
    """Yield the parts that need not be measured."""
    yield from (name for name in PARTS if any(file.is_file() for file in files_of(name)))
