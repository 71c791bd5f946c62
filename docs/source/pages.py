"""README.md and docs/*.md from their templates and docs/numbers.json: one source for every number."""

import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import measure_pages
import yaml

from tl_posgen.joining.column_correlations import PAIRS
from tl_posgen.report.intervals import ENDS
from tl_posgen.report.sentences import entry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
NUMBERS = DOCS / "numbers.json"
FAMILIES = DOCS / "families.json"

SMALL = ("mini", "stories260K", "babyllama105")
KINDS = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}


class Told(Mapping[str, Any]):
    """A result as templates read it: `told.r` of its summary, `told.null.r` of the null's, and where it comes from.

    Attributes:
        null: the same of the random init (means over seeds), whose `is_null` is True.
        spread: standard deviations over the random inits, where there are several.
        cut: such as "4 prompts of 256 tokens".
        rows, null_rows: its short tables.
    """

    def __init__(self, told: Mapping[str, Any], *, null: bool = False):
        self._told, self._summary, self.is_null = told, told["null"] if null else told["summary"], null
        self.model, self.text, self.options = told["model"], told.get("text"), told["options"]
        self.length, self.prompts = told["length"], told["prompts"]
        self.cut = f"{told['prompts']} prompts of {told['length']} tokens"
        self.spread = told.get("spread", {})
        self.rows, self.null_rows = told.get("table", []), told.get("null_table", [])

    def __getattr__(self, name: str) -> Any:
        if name == "null":
            return Told(self._told, null=True)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in (self._summary or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._summary or {})

    def __len__(self) -> int:
        return len(self._summary or {})

    def __getitem__(self, name: str) -> Any:
        if name not in (self._summary or {}):
            raise AttributeError(f"{self._told['model']}: no number {name!r}; there are {', '.join(self._summary)}")
        return self._summary[name]

    def row(self, null: bool = False, **where: Any) -> Mapping[str, Any]:
        """The one row of its table that has these values."""
        rows = [one for one in (self.null_rows if null else self.rows) if all(one[k] == v for k, v in where.items())]
        if len(rows) != 1:
            raise AttributeError(f"{self.model}: {len(rows)} rows with {where}; the first is {self.rows[:1]}")
        return rows[0]


def point(value: float, digits: int = 2) -> str:
    """.78, −.23, 1.54: no zero before the point, a true minus."""
    if value is None:
        return "–"
    told = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(told) else ""
    return sign + (told[1:] if told.startswith("0.") else told)


def percent(value: float, digits: int = 0) -> str:
    """53 %."""
    return "–" if value is None else f"{decimal(100 * value, digits)} %"


def decimal(value: float, digits: int = 2) -> str:
    """0.78: with the zero before the point, as commands print it."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    """+.38."""
    told = point(value, digits)
    return told if told.startswith("−") else f"+{told}"


def beside(told: Told, name: str, digits: int = 2, form: Any = point) -> str:
    """.78 (.40 ± .02): a number, and the random init's; mean and standard deviation of several."""
    return f"{form(told[name], digits)} ({of_null(told, name, digits, form)})"


def of_null(told: Told, name: str, digits: int = 2, form: Any = point) -> str:
    spread = f" ± {form(told.spread[name], digits)}" if name in told.spread else ""
    return f"{form(told.null[name], digits)}{spread}"


def beside_percent(told: Told, name: str) -> str:
    return beside(told, name, 0, percent)


def among_seeds(told: Told, name: str, digits: int = 2, form: Any = point) -> str:
    """.78 [.77, .79] (.40 ± .02): the same with its interval over prompts."""
    return f"{with_interval(told, name, digits, form)} ({of_null(told, name, digits, form)})"


def interval(low: float, high: float, digits: int = 3, form: Any = point) -> str:
    return f"[{form(low, digits)}, {form(high, digits)}]"


def ends_of(told: Any, name: str) -> list[float]:
    """The ends of a number's interval; none where it has none."""
    ends = [told[f"{name}{end}"] for end in ENDS[1:] if f"{name}{end}" in told]
    return [] if None in ends else ends


def with_interval(told: Any, name: str, digits: int = 3, form: Any = point) -> str:
    """.033 [.027, .040]; the number alone where it has no interval; mean and spread of several random inits."""
    if getattr(told, "is_null", False) and name in told.spread:
        return f"{form(told[name], digits)} ± {form(told.spread[name], digits)}"
    ends = ends_of(told, name)
    return form(told[name], digits) + (f" {interval(*ends, digits, form)}" if ends else "")


def scientific(value: float) -> str:
    """6e-15."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def excerpt(printed: str) -> str:
    """The beginning and the end of a table with a row a head, its means and two findings, as a command printed them."""
    lines = [line.rstrip() for line in printed.splitlines()]
    top = next(number for number, line in enumerate(lines) if line.split()[:2] == ["L", "H"])
    ends = [line for line in lines if line.split()[:1] in (["mean"], ["null"])]
    table = lines[top : lines.index(ends[0])]
    heads = [line for line in table if line.split()[:1] and line.split()[0].isdigit()]
    start = next(number for number, line in enumerate(lines) if line.startswith("•"))
    findings, count = [], 0
    for line in lines[start:]:
        count += line.startswith("•")
        if count > 3 or not line:
            break
        findings.append(line)
    kept = [lines[top], heads[0], "   ...", heads[-1], "", *ends, "", *findings]
    margin = min(len(line) - len(line.lstrip()) for line in kept[:4] if line)
    return "\n".join([line[min(margin, 1) :] for line in kept[:7]] + kept[7:])


def quoted(text: str) -> str:
    """A text as a Markdown quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def measured() -> dict[str, Any]:
    """docs/numbers.json: what was measured, by part."""
    return json.loads(NUMBERS.read_text(encoding="utf-8"))


def environment() -> jinja2.Environment:
    """Templates see what was measured and how to write it; a number that is not there is an error, with its name."""
    numbers = measured()
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"p": point, "pc": percent, "dec": decimal, "signed": signed, "sci": scientific, "quoted": quoted}
    made.filters |= {"excerpt": excerpt, "among_seeds": among_seeds}

    def result(part: str, name: str) -> Told:
        return Told(numbers[part]["results"][name])

    def verdict(part: str, claim: str) -> str:
        return result(part, "claims").row(claim=claim)["verdict"]

    made.globals |= {
        "result": result,
        "part": lambda name: numbers[name],
        "pairs": ["_".join(pair) for pair in PAIRS],
        "results_of": lambda kind, name: [result(f"{model} {kind}", name) for model in SMALL],
        "verdict": verdict,
        "claim_rows": lambda part, paper: [
            row for row in result(part, "claims").rows if row["claim"].startswith(paper)
        ],
        "beside": beside,
        "beside_pc": beside_percent,
        "interval": interval,
        "with_interval": with_interval,
        "entry": entry,
        "percent": percent,
        "training_log": training_log(),
        "commands": commands(),
        "citations": citations(),
        "address": address(),
        "version": project()["version"],
        **families(),
        "matrices": matrices(),
        "measures": list(measure_pages.pages_of(numbers[measure_pages.PART])),
        "zip": zip,
        "max": max,
        "min": min,
        "abs": abs,
        "round": round,
    }
    return made


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


def rendered() -> Iterator[tuple[Path, str]]:
    """(file, text) of every page that has a template."""
    made = environment()
    for page in made.globals["measures"]:
        yield DOCS / "measures" / f"{page.measure.name}.md", made.get_template("measure.md.j2").render(page=page)
    for template in sorted(HERE.glob("*.md.j2")):
        if template.name == "measure.md.j2":
            continue
        name = template.name.removesuffix(".j2")
        yield (ROOT if name == "README.md" else DOCS) / name, made.get_template(template.name).render()


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


def commands() -> list[SimpleNamespace]:
    """Every command of tl-posgen with its options, as its --help has them."""
    from typer.main import get_command

    from tl_posgen.cli.commands import app

    found = []
    for name, command in get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        rows = []
        for one in command.params:
            argument = not one.opts[0].startswith("-")
            taken = f"`{one.name.upper()}`" if argument else f"`{' '.join([*one.opts, *one.secondary_opts])}`"
            default = (
                ""
                if one.default is None or isinstance(one.default, bool) or callable(one.default)
                else f"`{one.default}`"
            )
            told = (one.help or "").replace("|", "\\|")
            rows.append(SimpleNamespace(name=taken, help=told, default="required" if one.required else default))
        found.append(SimpleNamespace(name=name, help=inspect.cleandoc(command.help or ""), rows=rows))
    return found


def write_pages() -> None:
    for path, text in rendered():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
