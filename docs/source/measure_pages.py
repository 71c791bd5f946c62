"""docs/measures/*.md: a page a measure, from its declaration and from what it found on the bundled model."""

import inspect
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tl_posgen import registry
from tl_posgen.measure import Measure
from tl_posgen.report.intervals import ENDS

PART = "measures"  # whose numbers these pages show
MOST_FINDINGS = 4


def measured_of_models() -> list[Measure]:
    """The built-in measures that are taken of one model, in the order of `tl-posgen analyze`."""
    known = map(registry.find, registry.BUILT_IN)
    return [one for one in known if one is not None and (one.collector or one.procedure)]


def pages_of(numbers: Mapping[str, Any]) -> Iterator[SimpleNamespace]:
    """What the page of each measure says beside its template."""
    for measure in measured_of_models():
        formula, text = definition(measure)
        rows, found = columns(measure), numbers["more"][measure.name]
        settings = numbers["results"][measure.name]
        yield SimpleNamespace(
            measure=measure,
            explanation=as_markdown(measure.explanation),
            formula=formula,
            text=text,
            columns=rows,
            with_ends=any(row.ends for row in rows),
            needs=", ".join(["q", "k", *sorted(measure.needs)]),
            reference=reference(measure),
            caveats=[(encoding, as_markdown(told)) for encoding, told in measure.caveats.items()],
            cut=f"{settings['prompts']} prompts of {settings['length']} tokens of {settings['text']}",
            **found | {"findings": [as_markdown(one) for one in found["findings"][:MOST_FINDINGS]]},
        )


def definition(measure: Measure) -> tuple[str, str]:
    """The formula and the text that the docstring of its options begins with."""
    told = inspect.cleandoc(vars(measure.options or measure.collector or measure.procedure).get("__doc__") or "")
    begins = re.split(r"^(?:Args|Attributes|Raises|Source|Example):$", told, flags=re.MULTILINE)[0]
    formula, _, text = begins.partition("\n\n")
    return formula.strip(), as_markdown(text.strip())


def as_markdown(text: str) -> str:
    """Plain text in which < and * are no markup, outside of `code`."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else one.replace("<", "&lt;").replace("*", r"\*") for one in pieces)


def columns(measure: Measure) -> list[SimpleNamespace]:
    """Its variables; the two ends of an interval stand with their number."""
    rows = []
    for name, one in measure.variables.items():
        if any(name.endswith(end) and name.removesuffix(end) in measure.variables for end in ENDS if end):
            continue
        told = as_markdown(one.description or one.label).replace("|", r"\|")
        ends = one.interval or f"{name}_low" in measure.variables
        rows.append(SimpleNamespace(name=name, unit=one.unit, told=told, dims=", ".join(one.dims), ends=ends))
    return rows


def reference(measure: Measure) -> str:
    """The name of its options as the reference lists it; "" where it has none."""
    if measure.options is None:
        return ""
    package = measure.options.__module__.split(".")[1]
    return f"tl_posgen.{package}.{measure.options.__name__}"
