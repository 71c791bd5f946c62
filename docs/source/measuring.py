"""The parts measured, each kept when it is done, and their numbers in docs/numbers.json."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parts import KEPT, MODELS, NUMBERS, PARTS, TEXTS

import tl_posgen
from tl_posgen.summary import jsonable

TABLE_ROWS = 200  # a longer table stays in the kept results


def results_of(name: str, *, again: bool = False) -> Mapping[str, Any]:
    """The results of a part: those that are kept, else measured now and kept."""
    part = PARTS[name]
    report, values = (KEPT / f"{name.replace(' ', '-')}-{part.file}.{kind}" for kind in ("nc", "json"))
    if again or not (report.is_file() or values.is_file()):
        KEPT.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        found = part.make(part)
        if isinstance(next(iter(found.values())), tl_posgen.Result):
            first = next(iter(found.values()))
            tl_posgen.Report(dict(found), getattr(found, "provenance", first.provenance)).save(report)
        else:
            values.write_text(json.dumps(jsonable(found)), encoding="utf-8")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return tl_posgen.load(report) if report.is_file() else json.loads(values.read_text(encoding="utf-8"))


def measure(names: Sequence[str], *, again: bool = False) -> None:
    """Measure these parts where they are not kept, and write their numbers into docs/numbers.json."""
    for name in names:
        if missing := PARTS[name].missing:
            print(f"{name} is left as it is: no {missing}", file=sys.stderr)
            continue
        told = numbers_of(name, again=again)
        numbers = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.is_file() else {}
        numbers[name] = told
        ordered = {key: numbers[key] for key in PARTS if key in numbers}
        NUMBERS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def numbers_of(name: str, *, again: bool = False) -> dict[str, Any]:
    """A part as docs/numbers.json holds it: its settings, and of every result where it comes from and its numbers."""
    part, results = PARTS[name], results_of(name, again=again)
    if not isinstance(results, tl_posgen.Report):
        return {"settings": jsonable(dict(part.settings)), **short(results)}
    text = {"text": TEXTS[MODELS[part.model][1]]} if part.model else {}
    told = {"results": {key: {**text, **told_of(result)} for key, result in results.items()}}
    return told | ({"more": short(jsonable(more))} if (more := part.more(results)) else {})


def told_of(result: Any) -> dict[str, Any]:
    """Model, prompts, seeds and options of a result; its summary, the null's (means over seeds), and its tables."""
    told = {key: result.provenance.get(key) for key in ("model", "length", "prompts", "seed", "null_seeds", "options")}
    null = result.null_summary
    told |= {"summary": result.summary, "null": None if null is None else dict(null)}
    if null is not None and len(null.seeds) > 1:
        told["spread"] = {key: spread for key in null if (spread := null.spread(key)) is not None}
    for key, is_null in (("table", False), ("null_table", True)):
        table = None if is_null and result.null is None else result.table(null=is_null)
        if table is not None and len(table) <= TABLE_ROWS:
            told[key] = table.to_dict("records")
    return short(jsonable(told))


def short(value: Any) -> Any:
    """The same with six significant digits a number, so that a run on another machine changes few lines."""
    if isinstance(value, Mapping):
        return {str(key): short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


def kept() -> Iterator[str]:
    """The parts that need not be measured."""
    for name, part in PARTS.items():
        if any((KEPT / f"{name.replace(' ', '-')}-{part.file}.{kind}").is_file() for kind in ("nc", "json")):
            yield name
