"""docs/measures/*.md: a page a measure, from its class and from what it found on SmolLM2 or a model of `PARTS`."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from tl_posgen.core import registry
from tl_posgen.core.measure import Measure

SHOWN = "measures"  # the part whose numbers these pages show
PARTS = {  # whose numbers the pages show -> their models; of two that measured the same, the later one
    "Qwen2.5-Coder-0.5B-Instruct biases": "Qwen2.5-Coder-0.5B-Instruct",
    "SmolLM2-135M-Instruct gap": "SmolLM2-135M-Instruct",
    SHOWN: "SmolLM2-135M-Instruct",
    "mini length": "mini",  # trained on 512 tokens: three times as many are soon measured
}
MOST_FINDINGS = 2
GROUPS = {  # question -> the measures that answer it, as the navigation and the list of measures have them
    "How much is position, how much content?": (
        "three_axis",
        "variance",
        "mean_key",
        "attention_examples",
        "bias_pairs",
        "bias_ablation",
        "residual",
    ),
    "Which planes of RoPE carry it?": (
        "plane_use",
        "plane_roles",
        "plane_cost",
        "recall",
        "planes",
        "plane_perturbation",
        "slash_planes",
        "cone",
    ),
    "What if distances, order or scores were others?": (
        "dummy_distance",
        "substitution",
        "split_examples",
        "perturbation",
    ),
    "What does it do at other lengths?": ("length_extrapolation", "gap", "loss"),
    "Which heads attend a fixed distance back?": (
        "slash",
        "slash_biases",
        "slash_ablation",
        "slash_transfer",
        "band_ablation",
    ),
    "Do layers act along the same directions?": ("coupling", "token_coupling"),
    "What is a head, and what would replace it?": ("profiles", "sources", "rules"),
}


def measured_of_models() -> list[type[Measure]]:
    """Return the built-in measures that are taken of one model, in the order of `tl-posgen analyze`."""
    measures = [registry.find(name) for name in registry.BUILT_IN]
    return [measure for measure in measures if measure is not None and (measure.is_fed or measure.runs_model)]


def pages_of(numbers: Mapping[str, Any]) -> Iterator[SimpleNamespace]:
    """Yield what the page of each measure has beside its template."""
    settings, measured = numbers[SHOWN]["settings"], dict[str, tuple[str, Mapping[str, Any]]]()
    for part, model in PARTS.items():
        measured |= {name: (model, facts) for name, facts in numbers.get(part, {}).get("more", {}).items()}
    for measure in measured_of_models():
        model, facts = measured.get(measure.name, ("", {}))  # not measured yet
        length = facts.get("length", settings["length"])
        findings = [as_markdown(finding) for finding in facts.get("findings", ())[:MOST_FINDINGS]]
        package = "core" if measure.name == "loss" else measure.__module__.split(".")[1]
        yield SimpleNamespace(
            measure=measure,
            command=measure.name.replace("_", "-"),
            explanation=as_markdown(measure.explanation),
            formula=re.sub(r"\s+", " ", inspect.cleandoc(measure.__doc__ or "").partition("\n\n")[0]).strip(),
            options=options(measure),
            variables=variables(measure),
            source=in_table(measure.source.removesuffix(".")),
            package=package,
            reference=f"tl_posgen.{measure.__module__.split('.')[1]}.{measure.__name__}",
            measured=bool(facts),
            model=model,
            cut=f"{settings['n_prompts']} prompts of {length} tokens",
            picture=facts.get("picture", ""),
            findings=findings,
        )


def as_markdown(text: str) -> str:
    """Return plain text in which < and * are no markup, outside of `code`."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else piece.replace("<", "&lt;").replace("*", r"\*") for piece in pieces
    )


def in_table(text: str) -> str:
    """Return plain text for a cell of a table."""
    return as_markdown(text).replace("|", r"\|")


def options(measure: type[Measure]) -> list[SimpleNamespace]:
    """Return a row for each sentence of the docstring on options: their names, their defaults, and the sentence."""
    match = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", inspect.cleandoc(measure.__doc__ or ""), re.MULTILINE | re.DOTALL)
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", match[1]) if match else ():
        names, _, sentence = entry.strip().partition(": ")
        meanings |= {name.strip(): in_table(re.sub(r"\s+", " ", sentence)) for name in names.split(",")}
    rows: dict[str, SimpleNamespace] = {}  # options that one sentence explains are one row
    for field in fields(measure):
        meaning = meanings.get(field.name, "")
        row = rows.setdefault(meaning or field.name, SimpleNamespace(names=[], defaults=[], meaning=meaning))
        row.names.append(f"`{field.name}`")
        row.defaults += [f"`{in_words(field.default)}`"] if in_words(field.default) else []
    return list(rows.values())


def variables(measure: type[Measure]) -> list[SimpleNamespace]:
    """Return a row for each variable of a measure's dataset: its name, dims, unit and meaning."""
    return [
        SimpleNamespace(
            name=name,
            dims=", ".join(variable.dims),
            unit=variable.unit,
            meaning=in_table(": ".join(filter(None, [variable.label, variable.description]))),
        )
        for name, variable in measure.variables.items()
    ]


def in_words(value: Any) -> str:
    """Return a default as a command line would give it, several names with room to break a line; "" for None."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (", " if value and isinstance(value[0], str) else ",").join(map(in_words, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
