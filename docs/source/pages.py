"""README.md and docs/*.md from their templates and docs/numbers.json: one source for every number."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import how_to
import jinja2
import machines
import measure_pages
import numpy as np
import yaml
from numbers_file import Measured, read_numbers

from tl_posgen.core.measure import ENDS
from tl_posgen.core.numbers import Number, mean_of_nulls
from tl_posgen.joining.column_correlations import COLUMNS, LITERATURE_PAIRS, PAIRS
from tl_posgen.joining.profiles import REPEATED
from tl_posgen.rules.head_rules import WORDS
from tl_posgen.stats.beyond_inits import CHANCE, beyond_inits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
FAMILIES = DOCS / "families.json"

SMALL = ("mini", "stories260K", "babyllama105")
REAL = ("SmolLM2-135M-Instruct", "Gemma 3 270M")
PAIRED = [f"{name} {kind}" for name in SMALL for kind in ("joining", "literature")]  # whose pairs of columns are told
MOST_UNTOLD = 4  # pairs that are named although they are told on no model
KINDS = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}


def point(value: Any, digits: int = 2) -> str:
    """Return .78, −.23, 1.54: no zero before the point, a true minus."""
    if unknown(value):
        return "–"
    text = f"{abs(float(value)):.{digits}f}"
    sign = "−" if float(value) < 0 and float(text) else ""
    return sign + (text[1:] if text.startswith("0.") else text)


def percent(value: Any, digits: int = 0) -> str:
    """Return 53 %."""
    return "–" if unknown(value) else f"{decimal(100 * float(value), digits)} %"


def decimal(value: Any, digits: int = 2) -> str:
    """Return 0.78: with the zero before the point, as commands print it."""
    return "–" if unknown(value) else f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(value: Any, digits: int = 2) -> str:
    """Return +.38."""
    text = point(value, digits)
    return text if text.startswith("−") else f"+{text}"


def unknown(value: Any) -> bool:
    """Return whether a number is not defined."""
    return value is None or math.isnan(float(value))


FORMS = {"p": point, "pc": percent, "dec": decimal, "signed": signed}


def with_interval(number: Number, digits: int = 3, form: str = "p") -> str:
    """Return .033 [.027, .040]; the value alone where it has no interval; mean ± standard deviation of random inits."""
    value = FORMS[form](number, digits)
    if number.spread is not None:
        return f"{value} ± {FORMS[form](number.spread, digits)}"
    return value if unknown(number.low) else f"{value} {interval(number.low, number.high, digits, form)}"


def beside(number: Number, digits: int = 2, form: str = "p") -> str:
    """Return .78 (.40 ± .02): a number and its random inits."""
    return f"{FORMS[form](number, digits)} ({with_interval(number.of_inits, digits, form)})"


def nulls(number: Number, digits: int = 2, form: str = "p") -> str:
    """Return .80, .81: the mean of random inits and that of shuffled weights, where there are any."""
    return ", ".join(FORMS[form](one, digits) for one in map(mean_of_nulls, number.by_null.values()) if one)


def beside_with_interval(number: Number, digits: int = 2, form: str = "p") -> str:
    """Return .78 [.77, .79] (.40 ± .02): a number with its interval, and its random inits."""
    return f"{with_interval(number, digits, form)} ({with_interval(number.of_inits, digits, form)})"


def beyond_of(one: Measured, asked: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return which of these correlations of a model go beyond random init, by the rule of `profiles` for all of them
    together: pages set them in bold, and list them. Left out are columns that no head has more of than at random init.
    """
    asked = [labels for labels in asked if not one.unseen & {labels.get("column"), labels.get("column_2")}]
    numbers = [one(**labels) for labels in asked]
    r, low, high = (np.array([getattr(number, end) for number in numbers]) for end in ENDS)
    beyond = beyond_inits(r, low, high, np.array([number.inits for number in numbers]).T)
    return [labels for labels, is_beyond in zip(asked, beyond, strict=True) if is_beyond]


def correlations_in(results: Sequence[Measured], labels: Mapping[str, Any], asked: Sequence[Mapping[str, Any]]) -> str:
    """Return a cell a model, **.78** [.77, .79] (.40 ± .02) |: a correlation, bold where it goes beyond random init."""
    cells = []
    for one in results:
        value, _, rest = beside_with_interval(one(**labels)).partition(" ")
        cells.append(f"**{value}** {rest} |" if labels in beyond_of(one, asked) else f"{value} {rest} |")
    return " ".join(cells)


def pairs_told(results: Sequence[Measured], asked: Sequence[Mapping[str, Any]]) -> str:
    """Return which correlations of columns go beyond random init on how many of these models, with their signs."""
    by_count: dict[int, list[str]] = {}
    for labels in asked:
        told = [one(**labels).value > 0 for one in results if labels in beyond_of(one, asked)]
        signs = " and ".join({True: "+", False: "−"}[sign] for sign in dict.fromkeys(told))
        pair = f"{COLUMNS[labels['column']]} with {COLUMNS[labels['column_2']]}"
        by_count.setdefault(len(told), []).append(f"{pair} ({signs})" if signs else pair)
    words = {len(results): "on every model", 2: "On two", 1: "On one", 0: "On none"}
    few = len(by_count.get(0, ())) <= MOST_UNTOLD
    names = {n: "; ".join(by_count.get(n, ["no pair"])) if n or few else "all others" for n in words}
    parts = [f"{words[n]}: {names[n]}" for n in words]
    return f"*Beyond random init {asked[0]['scope']}*, with the sign, {'. '.join(parts)}."


def interval_of_percent(number: Number) -> str:
    """Return 53 % [50, 56]."""
    return f"{percent(number)} [{decimal(100 * number.low, 0)}, {decimal(100 * number.high, 0)}]"


def interval(low: float, high: float, digits: int = 3, form: str = "p") -> str:
    """Return [.027, .040]."""
    return f"[{FORMS[form](low, digits)}, {FORMS[form](high, digits)}]"


def scientific(value: Any) -> str:
    """Return 6e-15."""
    return f"{float(value):.0e}".replace("e-0", "e-").replace("e+0", "e")


def excerpt(printed: str) -> str:
    """Three findings, the ends of a table with a row a head, and its means, as a command printed them."""
    lines = [line.rstrip() for line in printed.splitlines()]
    top = next(number for number, line in enumerate(lines) if line.split()[:2] == ["L", "H"])
    ends = [line for line in lines if line.split()[:1] in (["mean"], ["random"], ["shuffled"])]
    table = lines[top : lines.index(ends[0])]
    heads = [line for line in table if line.split()[:1] and line.split()[0].isdigit()]
    start = next(number for number, line in enumerate(lines) if line.startswith("•"))
    findings, count = [], 0
    for line in lines[start:]:
        count += line.startswith("•")
        if count > 3 or not line:
            break
        findings.append(line)
    kept = [lines[top], heads[0], "   ...", heads[-1], "", *ends]
    margin = min(len(line) - len(line.lstrip()) for line in kept[:4] if line)
    return "\n".join([*findings, "", *(line[min(margin, 1) :] for line in kept)])


def quoted(text: str) -> str:
    """A text as a Markdown quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def environment(numbers: Mapping[str, Any] | None = None, shown: set[str] | None = None) -> jinja2.Environment:
    """Return what renders templates from what was measured; a number that is not there is an error, with its name.

    Args:
        shown: to which the place of every number is added that a template asks for.
    """
    numbers = read_numbers() if numbers is None else numbers
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {**FORMS, "sci": scientific, "quoted": quoted, "excerpt": excerpt, "nulls": nulls}
    made.filters |= {"beside": beside, "with_interval": with_interval, "beside_with_interval": beside_with_interval}
    made.filters["interval_of_percent"] = interval_of_percent

    def result(part: str, name: str) -> Measured:
        found = Measured(f"{part}/{name}", numbers[part]["results"][name], shown)
        found.unseen = unseen_in(part.partition(" ")[0]) if name == "profiles" and part in PAIRED else frozenset()
        return found

    def unseen_in(model: str) -> frozenset[str]:
        one = Measured(f"{model} literature/profiles", numbers[f"{model} literature"]["results"]["profiles"], shown)
        highest = {name: one("highest", of=name) for name in REPEATED}
        return frozenset(name for name, number in highest.items() if number.value <= max(number.inits))

    def claim_rows(part: str, paper: str) -> list[Mapping[str, Any]]:
        return [row for row in result(part, "claims").rows if row["claim"].startswith(paper)]

    def verdict(part: str, claim: str) -> str:
        return next((row["verdict"] for row in result(part, "claims").rows if row["claim"] == claim), "–")

    made.globals |= {
        "result": result,
        "part": lambda name: numbers[name],
        "real": REAL,
        "pairs": PAIRS,
        "literature_pairs": LITERATURE_PAIRS,
        "column_labels": COLUMNS,
        "rule_words": WORDS,
        "results_of": lambda kind, name: [result(f"{model} {kind}", name) for model in SMALL],
        "verdict": verdict,
        "claim_rows": claim_rows,
        "interval": interval,
        "beyond_of": beyond_of,
        "correlations_in": correlations_in,
        "pairs_told": pairs_told,
        "chance": CHANCE,
        "measured_with": ", ".join(
            dict.fromkeys(one["settings"]["version"] for one in numbers.values() if "results" in one)
        ),
        "training_log": training_log(),
        "penalty": penalty(),
        "commands": list(commands()),
        "citations": citations(),
        "address": address(),
        "version": project()["version"],
        **families(),
        "matrices": matrices(),
        "costs": machines.costs,
        "own_measure": own_measure(),
        "groups": measure_pages.GROUPS,
        "measures": list(measure_pages.pages_of(numbers[measure_pages.PART])),
        "zip": zip,
        "max": max,
        "min": min,
        "abs": abs,
        "round": round,
    }
    return made


def own_measure() -> str:
    """The measure that CONTRIBUTING has, which prints its sentence and draws."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("\n```")[0]


def families() -> dict[str, Any]:
    """docs/families.json by TransformerLens and backend: counts of outcomes, and which architectures are right."""
    sides, every = [], []
    for version, told in json.loads(FAMILIES.read_text(encoding="utf-8")).items():
        every += told["rows"]
        for backend in dict.fromkeys(row["backend"] for row in told["rows"] if row["backend"]):
            rows = [row for row in told["rows"] if row["backend"] == backend and row["outcome"] != "not built"]
            right = sorted({row["family"] for row in rows if row["outcome"] == "right"})
            title = f"{KINDS[backend]}, {version}"
            counts = Counter(row["outcome"] for row in rows)
            sides.append({"title": title, "counts": counts, "right": right, "transformers": told["transformers"]})
    known = {outcome: {row["family"] for row in every if row["outcome"] == outcome} for outcome in ("right", "refused")}
    built = set().union(*known.values())
    return {
        "families": sides,
        "refused": sorted(known["refused"] - known["right"]),
        "not_built": sorted({row["family"] for row in every} - built),
    }


def matrices() -> dict[int, list[str]]:
    """How many [head, query, key] matrices measures of a model hold, and which do."""
    found: dict[int, list[str]] = {}
    for measure in measure_pages.measured_of_models():
        found.setdefault(measure.matrices, []).append(measure.name)
    return dict(sorted(found.items()))


def training_log() -> Sequence[SimpleNamespace]:
    """The log of the bundled model's training: a row each time it was looked at."""
    log = ROOT / "examples" / "mini_model" / "log.jsonl"
    return [SimpleNamespace(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines() if line]


def penalty() -> dict[str, Any]:
    """What examples/interaction_penalty found: settings, and every run over its seeds."""
    return json.loads((ROOT / "examples" / "interaction_penalty" / "summary.json").read_text(encoding="utf-8"))


def rendered(numbers: Mapping[str, Any] | None = None, shown: set[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of every page that has a template; the arguments are those of `environment`."""
    made = environment(numbers, shown)
    for page in made.globals["measures"]:
        yield DOCS / "measures" / f"{page.measure.name}.md", made.get_template("measure.md.j2").render(page=page)
    for template in sorted((HERE / "how_to").glob("*.md.j2")):
        name = template.name.removesuffix(".md.j2")
        text = made.get_template(f"how_to/{template.name}").render()
        yield DOCS / "how_to" / f"{name}.md", how_to.with_output(name, text)
    for template in sorted(HERE.glob("*.md.j2")):
        if template.name == "measure.md.j2":
            continue
        name = template.name.removesuffix(".j2")
        yield (ROOT if name == "README.md" else DOCS) / name, made.get_template(template.name).render()


def shown_in(numbers: Mapping[str, Any]) -> set[str]:
    """Return the places of the numbers that pages show."""
    shown: set[str] = set()
    for _ in rendered(numbers, shown):
        pass
    return shown


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def address() -> str:
    """Where the repository is, as pyproject.toml says; "" while it says nothing, and then no page has a link to it."""
    return project().get("urls", {}).get("Repository", "").removesuffix("/")


def citations() -> list[str]:
    """CITATION.cff as BibTeX: the software, and the papers behind it."""
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    software = {"title": f"{{{told['title']}}}", "author": authors(told), "year": "2026", "version": told["version"]}
    software |= {"url": address()} if address() else {}
    entries = [bibtex("software", "tl_posgen", software)]
    for paper in told["references"]:
        arxiv = paper["url"].rpartition("/")[2]
        fields = {"title": f"{{{paper['title']}}}", "author": authors(paper), "year": paper["year"]}
        fields |= {"eprint": arxiv, "archivePrefix": "arXiv", "url": paper["url"]}
        first = paper["authors"][0]["family-names"].lower()
        entries.append(bibtex("misc", f"{first}{paper['year']}", fields))
    return entries


def authors(told: Mapping[str, Any]) -> str:
    """BibTeX's list of names."""
    names = [", ".join(one[key] for key in ("family-names", "given-names") if key in one) for one in told["authors"]]
    return " and ".join(name or one["name"] for name, one in zip(names, told["authors"], strict=True))


def bibtex(kind: str, key: str, fields: Mapping[str, Any]) -> str:
    return "\n".join([f"@{kind}{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields.items()), "}"])


def commands() -> Iterator[SimpleNamespace]:
    """Yield every command of tl-posgen with its options, as its --help has them; those of single measures left out."""
    from tl_posgen.cli.commands import COMMANDS, WRITTEN, app_for

    for name in (*WRITTEN, *COMMANDS):
        command = app_for([name])[name]
        yield SimpleNamespace(
            name=name, help=command.help, rows=list(map(option, command.assemble_argument_collection()))
        )


def option(one: Any) -> SimpleNamespace:
    """Return the row of an option, or of an argument."""
    from tl_posgen.cli.options import as_words

    default = one.field_info.default
    shown = f"`{as_words(default)}`" if one.parameter.show_default else ""
    text = (one.parameter.help or "").replace("|", "\\|")
    return SimpleNamespace(name=f"`{' '.join(one.names)}`", help=text, default="required" if one.required else shown)


def write_pages() -> None:
    for path, text in rendered():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
