"""README.md and docs/*.md from their templates and docs/numbers.json: one source for every number."""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import how_to
import jinja2
import measure_pages
import pandas as pd
import yaml
from making import LARGE, QWEN, REAL
from numbers_file import Measured, read_numbers

from tl_posgen.claims import PAPERS
from tl_posgen.core.formatting import format_number
from tl_posgen.core.number import Number, mean_of_nulls
from tl_posgen.models.loading.null_kinds import NULL_KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
FAMILIES = DOCS / "families.json"

SMALL = ("mini", "stories260K")
OF_FREQUENCIES = ("inits", "quarters", "recall", "frequencies")  # parts that judge such claims; the first that has one
OF_ROOT = ("README.md", "mkdocs.yml", "CITATION.cff")
SYNONYMS = {  # page -> words by which the site's search finds it, too
    "cite.md": "BibTeX, citation, reference, bibliography, DOI",
    "reports.md": "DataFrame, pandas, csv, xarray, netCDF, JSON, export, save, load",
    "python.md": "DataFrame, pandas, csv, xarray, export, API, logit diff, metric",
    "explain.md": "direct logit attribution, logit diff, causal, circuit, induction, why",
    "models.md": "Hugging Face, HF, Hub, transformers, checkpoint, GPU, memory",
    "coupling.md": "Jacobian, singular vectors, residual stream",
    "slash.md": "previous-token head, diagonal, sub-diagonal, positional head, induction",
    "frequencies.md": "rotary, RoPE base, theta, context length, long context, extrapolation, YaRN",
    "position.md": "variance decomposition, ANOVA, additive, disentangle",
    "measures/substitution.md": "activation patching, causal, intervention, replace attention scores",
    "how_to/paper.md": "SVG, PDF, LaTeX, BibTeX, figure export, camera button, publication, kaleido",
    "how_to/position_part.md": "activation patching, causal, ablate, ablation, edit scores, logit diff, position-free",
    "how_to/slash_heads.md": "ablate, ablation, knock out, mean ablation, zero ablation, causal, control",
    "how_to/one_prompt.md": "logit diff, single prompt, attention pattern, IOI",
    "how_to/transformers.md": "Hugging Face, HF, AutoModel, fine-tuned, nnsight, nnterp, pyvene",
    "how_to/many_models.md": "DataFrame, csv, SLURM, Ray, cluster, sweep",
    "how_to/compare.md": "fine-tuning, instruct, RLHF, checkpoints, difference, csv",
}
KINDS = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}


def percent(value: Any, digits: int = 0) -> str:
    """Return 53 %."""
    return "–" if unknown(value) else f"{decimal(100 * float(value), digits)} %"


def decimal(value: Any, digits: int = 2, sign: str = "") -> str:
    """Return 0.78 as commands print it, −0.23 with a true minus."""
    return "–" if unknown(value) else format_number(float(value), f"{sign}.{digits}f").replace("-", "−")


def signed(value: Any, digits: int = 2) -> str:
    """Return +0.38."""
    return decimal(value, digits, "+")


def unknown(value: Any) -> bool:
    """Return whether a number is not defined."""
    return value is None or math.isnan(float(value))


FORMS = {"pc": percent, "dec": decimal, "signed": signed}


def with_interval(number: Number, digits: int = 3, form: str = "dec") -> str:
    """Return 0.033 [0.027, 0.040]; the value alone without an interval; mean ± standard deviation of random inits."""
    value = FORMS[form](number, digits)
    if number.spread is not None:
        return f"{value} ± {FORMS[form](number.spread, digits)}"
    return value if unknown(number.low) else f"{value} {interval(number.low, number.high, digits, form)}"


def beside(number: Number, digits: int = 2, form: str = "dec") -> str:
    """Return 0.78 (0.40 ± 0.02): a number and its random inits."""
    return f"{FORMS[form](number, digits)} ({with_interval(number.of_inits, digits, form)})"


def nulls(number: Number, digits: int = 2, form: str = "dec") -> str:
    """Return 0.80, 0.81: the mean of random inits and that of shuffled weights, where there are any."""
    return ", ".join(FORMS[form](mean, digits) for mean in map(mean_of_nulls, number.by_null.values()) if mean)


def beside_with_interval(number: Number, digits: int = 2, form: str = "dec") -> str:
    """Return 0.78 [0.77, 0.79] (0.40 ± 0.02): a number with its interval, and its random inits."""
    return f"{with_interval(number, digits, form)} ({with_interval(number.of_inits, digits, form)})"


def interval_of_percent(number: Number) -> str:
    """Return 53 % [50, 56]."""
    return f"{percent(number)} [{decimal(100 * number.low, 0)}, {decimal(100 * number.high, 0)}]"


def interval(low: float, high: float, digits: int = 3, form: str = "dec") -> str:
    """Return [0.027, 0.040]."""
    return f"[{FORMS[form](low, digits)}, {FORMS[form](high, digits)}]"


def excerpt(printed: str) -> str:
    """Three findings and the table of heads, as a command printed them."""
    lines = [line.rstrip() for line in printed.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("•"))
    end = next(number for number, line in enumerate(lines) if re.match(r" *shuffled +\d[\d.]+ +\d", line))
    return "\n".join(lines[start : end + 1])


def by_kind(null: str) -> list[tuple[str, str]]:
    """Return what a verdict says of null models by their kind.

    Example:
        >>> by_kind("random init: r 0.35, r1 0.2; shuffled: r 0.1")
        [('random init', 'r 0.35, r1 0.2'), ('shuffled', 'r 0.1')]
    """
    names = "|".join([*NULL_KINDS, "random bases", "chance"])
    pieces = re.split(rf"(?:^|; )({names}): ", null)[1:]
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def quantities(text: str) -> Iterator[tuple[str, str]]:
    """Yield each quantity that a verdict names with its value; where several share one value, each has it.

    Example:
        >>> list(quantities("thirds, not held: without low 0.6 [0.5, 0.7], low alone 0.12; r 0.93 (9 dominant heads)"))
        [('thirds: without low', '0.6 [0.5, 0.7]'), ('thirds: low alone', '0.12'), ('r', '0.93 (9 dominant heads)')]
        >>> list(quantities("r at D = 0 0.33 ± 0.14, slope 2"))
        [('r at D = 0', '0.33 ± 0.14'), ('slope', '2')]
    """
    waiting, group = [], ""
    for piece in re.split(r"(?<!thirds)(?<!wavelength)[;,] (?=[^\d\s+-])", text):
        if named := re.match(r"(thirds|wavelength)(?:, [a-z ]+)?: ", piece):
            group, piece = f"{named[1]}: ", piece[named.end() :]
        elif not re.search(r"without|alone", piece):
            group = ""
        match = re.fullmatch(
            r"(.*?) ([-+]?[\d.]+%?(?: ± [\d.]+)?(?: \[.*\])?(?: \(\d+ dominant heads?\))?|not defined)", piece
        )
        waiting.append(f"{group}{match[1] if match else piece}")
        if match:
            value = "–" if match[2] == "not defined" else match[2].replace("-", "−")
            yield from ((quantity, value) for quantity in waiting)
            waiting = []


def in_cell(numbers: Mapping[tuple[str, str], str], quantity: str, kinds: Sequence[str]) -> str:
    """Return a quantity of a claim, and behind it that of each kind of null model in brackets.

    Example:
        >>> in_cell({("", "r"): "0.9", ("random init", "r"): "0.4"}, "r", ["random init", "shuffled"])
        '0.9 (0.4, –)'
    """
    value, *of_nulls = (numbers.get((kind, quantity), "–") for kind in ("", *kinds))
    return f"{value} ({', '.join(of_nulls)})" if {*of_nulls} - {"–"} else value


def quoted(text: str) -> str:
    """A text as a Markdown quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def environment(numbers: Mapping[str, Any] | None = None, shown: set[str] | None = None) -> jinja2.Environment:
    """Return what renders templates from what was measured; a number that is not there is an error, with its name.

    Args:
        shown: to which the place of every number is added that a template asks for.
    """
    numbers = read_numbers() if numbers is None else numbers
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {**FORMS, "quoted": quoted, "excerpt": excerpt, "nulls": nulls}
    templates.filters |= {
        "beside": beside,
        "with_interval": with_interval,
        "beside_with_interval": beside_with_interval,
    }
    templates.filters |= {"cell": measure_pages.in_table, "unbroken": lambda text: text.replace(" ", "\u00a0")}
    templates.filters["interval_of_percent"] = interval_of_percent

    def result(part: str, name: str) -> Measured:
        return Measured(f"{part}/{name}", numbers[part]["results"][name], shown)

    def of_claims(part: str) -> list[Measured]:
        """Return the judgements of parts that judge one claim of a model, and those of the part that judges most."""
        return [
            result(name, "claims") for name in [*(name for name in numbers if name.startswith(f"{part} of ")), part]
        ]

    def verdict(part: str, claim: str) -> str:
        return next((judged.verdicts[claim] for judged in of_claims(part) if claim in judged.verdicts), "–")

    def claim_rows(part: str, paper: str) -> list[Mapping[str, Any]]:
        return [row for judged in of_claims(part) for row in judged.rows if row["claim"].startswith(paper)]

    def frequency_claim(model: str, claim: str, *, whole: bool = False) -> Mapping[str, Any]:
        """Return the row of a claim on frequencies, of the part that judged it; with its numbers if `whole`."""
        for part in (f"{model} {kind}" for kind in OF_FREQUENCIES if f"{model} {kind}" in numbers):
            judged = result(part, "claims")
            if claim in judged.verdicts:
                rows = judged.rows if whole else [{"claim": name, "verdict": v} for name, v in judged.verdicts.items()]
                return next(row for row in rows if row["claim"] == claim)
        return {"claim": claim, "verdict": "–"}

    def claim_table(claim: str, models: Sequence[str]) -> SimpleNamespace:
        """Return what decided a claim: by model its verdict, and its numbers by null kind and quantity; without models
        whose numbers are not known."""
        judged_models = []
        for model in models:
            row = next((row for row in claim_rows(f"{model} claims", claim) if row["claim"] == claim), {})
            if "measured" not in row:
                continue
            numbers = {("", quantity): value for quantity, value in quantities(row["measured"])}
            for kind, text in by_kind(row["null"]):
                numbers |= {(kind, quantity): value for quantity, value in quantities(text)}
            judged_models.append((model, row["verdict"], numbers))
        places = dict.fromkeys(place for _, _, numbers in judged_models for place in numbers)
        kinds = [kind for kind in dict.fromkeys(kind for kind, _ in places) if kind]
        return SimpleNamespace(
            models=judged_models, nulls=kinds, quantities=list(dict.fromkeys(quantity for _, quantity in places))
        )

    templates.globals |= {
        "result": result,
        "part": lambda name: numbers[name],
        "real": REAL,
        "qwen": QWEN,
        "large": LARGE,
        "claimed": [name for name in ("mini", *REAL, QWEN, LARGE) if f"{name} claims" in numbers],
        "short": {"mini": "mini", REAL[0]: "SmolLM2", REAL[1]: "Gemma 3", QWEN: "Qwen2.5", LARGE: "Qwen2.5 1.5B"},
        "commands": {
            name: [{**row, "command": row["line"].split()[0]} for row in numbers[f"{name} commands"]["rows"]]
            for name in (*REAL, QWEN, LARGE)
            if f"{name} commands" in numbers
        },
        "timed": [name for name in ("mini", *REAL, QWEN) if f"{name} frequencies" in numbers],
        "results_of": lambda kind, name: [result(f"{model} {kind}", name) for model in SMALL],
        "verdict": verdict,
        "claim_rows": claim_rows,
        "frequency_claim": frequency_claim,
        "claim_table": claim_table,
        "in_cell": in_cell,
        "interval": interval,
        "measured_with": ", ".join(
            sorted(
                {
                    version
                    for part in numbers.values()
                    if "results" in part
                    for version in part["settings"]["version"].split(", ")
                }
            )
        ),
        "training_log": training_log(),
        "address": address(),
        "site": project().get("urls", {}).get("Documentation", "").removesuffix("/"),
        "version": project()["version"],
        "families": families(),
        "architectures": architectures(),
        "notebooks": notebooks(),
        "own_measure": own_measure(),
        "rows_of": rows_of,
        "of_study": of_study,
        "moved_of_nulls": moved_of_nulls,
        "groups": measure_pages.GROUPS,
        "questions": how_to.QUESTIONS,
        "papers": PAPERS,
        "shown_model": measure_pages.PARTS[measure_pages.SHOWN],
        "measures": list(measure_pages.pages_of(numbers)),
        "max": max,
    }
    templates.globals["citations"] = citations(templates.get_template("CITATION.cff.j2").render())
    return templates


def notebooks() -> list[dict[str, str]]:
    """The notebooks of examples/, by the title that each begins with."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("[0-9]*.py"))}
    return [{"name": name, "title": text.partition("\n# # ")[2].partition("\n")[0]} for name, text in texts.items()]


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a table that a script of examples/ wrote: a CSV file, or a JSON object a line."""
    path = ROOT / "examples" / name
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return pd.read_csv(path).to_dict("records")


def of_study(model: str, quantity: str, digits: int = 2) -> str:
    """Return a number of the study of real models with its interval: 0.55 [0.14, 0.96]."""
    row = next(row for row in rows_of("studies/real.csv") if (row["model"], row["quantity"]) == (model, quantity))
    value, low, high = (decimal(row[end], digits) for end in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def moved_of_nulls(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return by how much losses of null models differ between gaps, at most, and the range of those of shuffled
    weights."""
    losses = pd.DataFrame(rows).groupby("model")
    least, most = losses.min(numeric_only=True), losses.max(numeric_only=True)
    moved = (most - least).max()
    ends = {"least_shuffled": least["unchanged_shuffled"].min(), "most_shuffled": most["unchanged_shuffled"].max()}
    return {"random_init": moved["unchanged_random_init"], "shuffled": moved["unchanged_shuffled"], **ends}


def own_measure() -> str:
    """The measure that CONTRIBUTING has, which prints its sentence and draws."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("\n```")[0]


def families() -> list[dict[str, Any]]:
    """docs/families.json by TransformerLens and backend: counts of outcomes, and which architectures are right."""
    sides = []
    for version, of_version in json.loads(FAMILIES.read_text(encoding="utf-8")).items():
        for backend in dict.fromkeys(row["backend"] for row in of_version["rows"] if row["backend"]):
            rows = [row for row in of_version["rows"] if row["backend"] == backend and row["outcome"] != "not built"]
            right = sorted({row["family"] for row in rows if row["outcome"] == "right"})
            side = {"title": f"{KINDS[backend]}, {version}", "transformers": of_version["transformers"], "right": right}
            sides.append(side | {"counts": Counter(row["outcome"] for row in rows)})
    return sides


def architectures() -> list[dict[str, str]]:
    """docs/families.json by architecture: the outcome of each side, and in short why the last one refuses it."""
    rows: dict[str, dict[str, str]] = {}
    for version, of_version in json.loads(FAMILIES.read_text(encoding="utf-8")).items():
        for row in of_version["rows"]:
            architecture = rows.setdefault(row["family"], {"name": row["family"], "why": ""})
            side = f"{KINDS.get(row['backend'], '')}, {version}"
            outcomes = {architecture.get(side, "–"), row["outcome"].replace("not built", "–")}
            architecture[side] = next((outcome for outcome in ("right", "refused") if outcome in outcomes), "–")
            if row["outcome"] == "refused":
                architecture["why"] = briefly(row["reason"])
    return [rows[name] | {"why": rows[name]["why"] or "cannot be built this small"} for name in sorted(rows)]


def briefly(reason: str) -> str:
    """Return the first clause of a refusal, for a cell of a table."""
    if "has no bridge" in reason:
        return "TransformerLens has no bridge"
    text = re.sub(r"^(\w+Error: |layer \d+: )+", "", reason)
    return measure_pages.in_table(re.split(r" \(|; |, whose|: /", text)[0][:80])


def training_log() -> Sequence[SimpleNamespace]:
    """The log of the bundled model's training: a row each time it was looked at."""
    log = ROOT / "examples" / "mini_model" / "log.jsonl"
    return [SimpleNamespace(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines() if line]


def rendered(numbers: Mapping[str, Any] | None = None, shown: set[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of every page that has a template; the arguments are those of `environment`."""
    templates = environment(numbers, shown)
    for page in templates.globals["measures"]:
        yield DOCS / "measures" / f"{page.measure.name}.md", templates.get_template("measure.md.j2").render(page=page)
    for name in ("families", "claims"):
        yield DOCS / "reference" / f"{name}.md", templates.get_template(f"reference/{name}.md.j2").render()
    for template in sorted((HERE / "how_to").glob("*.md.j2")):
        name = template.name.removesuffix(".md.j2")
        text = templates.get_template(f"how_to/{template.name}").render()
        yield DOCS / "how_to" / f"{name}.md", how_to.with_output(name, text)
    for template in sorted(HERE.glob("*.*.j2")):
        if template.name == "measure.md.j2":
            continue
        name = template.name.removesuffix(".j2")
        text = templates.get_template(template.name).render()
        if name == "README.md" and address():
            text = absolute(text)
        yield (ROOT if name in OF_ROOT else DOCS) / name, text


def absolute(text: str) -> str:
    """Return a page whose links and pictures lead to the repository, as an index of packages shows it alone."""
    text = re.sub(r"!\[([^\]]*)\]\((?!\w+:)", rf"![\1]({address()}/raw/main/", text)
    return re.sub(r"\]\((?!\w+:|#)", f"]({address()}/blob/main/", text)


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


def citations(cff: str) -> list[str]:
    """CITATION.cff as BibTeX: the software, and the papers behind it."""
    work = yaml.safe_load(cff)
    software = {"title": f"{{{work['title']}}}", "author": authors(work), "year": str(work["date-released"])[:4]}
    software |= {"version": work["version"]} | ({"url": address()} if address() else {})
    entries = [bibtex("software", "tl_posgen", software)]
    for paper in work["references"]:
        arxiv = paper["url"].rpartition("/")[2]
        fields = {"title": f"{{{paper['title']}}}", "author": authors(paper), "year": paper["year"]}
        fields |= {"booktitle": paper["conference"]["name"]} if "conference" in paper else {}
        fields |= {"eprint": arxiv, "archivePrefix": "arXiv", "url": paper["url"]}
        kind = "inproceedings" if "conference" in paper else "misc"
        entries.append(bibtex(kind, f"{paper['authors'][0]['family-names'].lower()}{paper['year']}", fields))
    return entries


def authors(work: Mapping[str, Any]) -> str:
    """BibTeX's list of names."""
    names = [
        ", ".join(author[key] for key in ("family-names", "given-names") if key in author) for author in work["authors"]
    ]
    return " and ".join(name or f"{{{author['name']}}}" for name, author in zip(names, work["authors"], strict=True))


def bibtex(kind: str, key: str, fields: Mapping[str, Any]) -> str:
    return "\n".join([f"@{kind}{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields.items()), "}"])


def write_pages() -> None:
    for path, text in rendered():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
