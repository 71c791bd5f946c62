"""docs/numbers.json: what was measured, a line a number; read and written, and a result of it as templates see it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_posgen.core.number import Number
from tl_posgen.models.loading.null_kinds import NULL_KINDS

NUMBERS = Path(__file__).parents[1] / "numbers.json"
OF_NUMBER = ("name", "value", "low", "high", "spread", *(kind.field for kind in NULL_KINDS.values()))  # no labels


@dataclass(frozen=True)
class NumberOfInits(Number):
    """A number of whose random inits only the mean and the standard deviation are known."""

    spread_of_inits: float | None = None

    @property
    def of_inits(self) -> Number:
        return Number(self.inits[0] if self.inits else math.nan, spread=self.spread_of_inits)


class Measured:
    """A result in docs/numbers.json: `fit("r", tokens="without first")` is a Number.

    Labels that are not given are the measure's usual ones. What is asked for is entered in `shown`, by its place in the
    file.

    Attributes:
        model, text, options, length, prompts: of the run.
        cut: such as "4 prompts of 256 tokens".
        rows: its table, where it has no numbers.
        verdicts: of a table of claims, by claim.
    """

    def __init__(self, place: str, entry: Mapping[str, Any], shown: set[str] | None = None):
        self.place, self.entry, self.shown = place, entry, set() if shown is None else shown
        self.shown.add(place)
        self.model, self.text, self.options = entry.get("model"), entry.get("text"), entry.get("options")
        self.length, self.prompts = entry.get("length"), entry.get("prompts")
        self.cut = f"{self.prompts} prompts of {self.length} tokens"

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        self.shown.add(f"{self.place}/rows")
        return self.entry["rows"]

    @property
    def verdicts(self) -> dict[str, str]:
        self.shown.add(f"{self.place}/verdicts")
        return {row["claim"]: row["verdict"] for row in self.entry["rows"]}

    def __call__(self, name: str, **labels: Any) -> Number:
        return number_from(self.entry_of(name, **labels))

    def __contains__(self, name: str) -> bool:
        return any(entry["name"] == name for entry in self.entry["numbers"])

    def entry_of(self, name: str, **labels: Any) -> Mapping[str, Any]:
        """Return the entry of one number, with all its labels.

        Raises:
            AttributeError: no such number, or several.
        """
        named = [entry for entry in self.entry["numbers"] if entry["name"] == name]
        wanted = {**self.entry.get("usual", {}), **labels}
        fitting = [entry for entry in named if all(entry[dim] == x for dim, x in wanted.items() if dim in entry)]
        fitting = [entry for entry in fitting if set(labels) <= set(entry)]
        fitting = [entry for entry in fitting if len(labels_of(entry)) == fewest(fitting)]
        if len(fitting) != 1:
            names = ", ".join(dict.fromkeys(entry["name"] for entry in self.entry["numbers"]))
            has = f"it has {', '.join(map(str, map(labels_of, named)))}" if named else f"there are {names}"
            raise AttributeError(f"{self.place}: {len(fitting)} numbers {name!r} at {labels}; {has}")
        self.shown.add(place_of(self.place, fitting[0]))
        return fitting[0]

    def each(self, name: str, dim: str, **labels: Any) -> dict[Any, Number]:
        """Return the numbers along a dim, by its labels."""
        dim_labels = dict.fromkeys(
            entry[dim] for entry in self.entry["numbers"] if entry["name"] == name and dim in entry
        )
        return {label: self(name, **labels, **{dim: label}) for label in dim_labels}

    def highest(self, name: str, dim: str, leave_out: Sequence[Any] = (), **labels: Any) -> Any:
        """Return the label along a dim where a number is highest."""
        numbers = {
            label: number
            for label, number in self.each(name, dim, **labels).items()
            if number and label not in leave_out
        }
        return max(numbers, key=lambda label: numbers[label].value)


def fewest(entries: Sequence[Mapping[str, Any]]) -> int:
    """Return how many labels a number has at least: one of fewer labels is the mean over a dim."""
    return min(map(len, map(labels_of, entries)))


def labels_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a number."""
    return {dim: label for dim, label in entry.items() if dim not in OF_NUMBER}


def place_of(result: str, entry: Mapping[str, Any]) -> str:
    """Return the place of a number in the file, as a text."""
    return f"{result}/{entry['name']} {sorted(labels_of(entry).items())}"


def number_from(entry: Mapping[str, Any]) -> Number:
    """Return the number of an entry; NaN where it is not defined."""
    ends = (known(entry.get(key)) for key in ("value", "low", "high"))
    by_null = {kind.name: tuple(map(known, entry[kind.field])) for kind in NULL_KINDS.values() if entry.get(kind.field)}
    if "spread" in entry:
        return NumberOfInits(*ends, by_null, spread_of_inits=entry["spread"])
    return Number(*ends, by_null)


def known(value: float | None) -> float:
    """Return a value of the file; NaN where it is not defined."""
    return math.nan if value is None else float(value)


def read_numbers() -> dict[str, Any]:
    """Return docs/numbers.json: what was measured, by part."""
    return json.loads(NUMBERS.read_text(encoding="utf-8"))


def write_numbers(numbers: Mapping[str, Any]) -> None:
    """Write docs/numbers.json, a line a number."""
    NUMBERS.write_text(as_text(numbers) + "\n", encoding="utf-8")


def only_shown(numbers: Mapping[str, Any], shown: set[str]) -> dict[str, Any]:
    """Return the numbers without those that no page shows."""
    parts = {}
    for part, entry in numbers.items():
        places = {name: f"{part}/{name}" for name in entry.get("results", {})}
        results = {name: trimmed(at, entry["results"][name], shown) for name, at in places.items() if at in shown}
        parts[part] = {key: value for key, value in entry.items() if key != "results"}
        parts[part] |= {"results": results} if results else {}
    return parts


def trimmed(place: str, result: Mapping[str, Any], shown: set[str]) -> dict[str, Any]:
    """Return a result with the numbers that are shown; of claims, with their verdicts alone where no more is shown."""
    entry = {key: value for key, value in result.items() if key not in ("rows", "numbers")}
    if f"{place}/rows" in shown:
        entry["rows"] = result["rows"]
    elif f"{place}/verdicts" in shown:
        entry["rows"] = [{key: row[key] for key in ("claim", "verdict")} for row in result["rows"]]
    return entry | {"numbers": [number for number in result["numbers"] if place_of(place, number) in shown]}


def short(value: Any) -> Any:
    """Return a value with six significant digits a number, so that a run on another machine changes few lines."""
    if isinstance(value, Mapping):
        return {str(key): short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


def as_text(value: Any, margin: str = "") -> str:
    """Return JSON that breaks lines around lists and objects of objects only.

    Example:
        >>> print(as_text({"a": {"b": [1, 2]}, "c": [{"d": 1}]}))
        {
         "a": {"b": [1, 2]},
         "c": [
          {"d": 1}
         ]
        }
    """
    inside = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    flat = not any(isinstance(item, Mapping) or (isinstance(item, list) and holds_objects(item)) for item in inside)
    if flat:
        return json.dumps(value, ensure_ascii=False)
    names = [f"{json.dumps(str(key), ensure_ascii=False)}: " for key in value] if isinstance(value, Mapping) else None
    lines = [margin + " " + (names[n] if names else "") + as_text(item, margin + " ") for n, item in enumerate(inside)]
    start, end = "{}" if names else "[]"
    return start + "\n" + ",\n".join(lines) + f"\n{margin}{end}"


def holds_objects(values: list[Any]) -> bool:
    """Return whether a list has objects in it."""
    return any(isinstance(value, Mapping) for value in values)
