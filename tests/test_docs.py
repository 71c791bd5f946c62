"""README and docs say what is there: numbers from docs/numbers.json, commands, options, imports, links and pictures."""

import contextlib
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tl_posgen.cli.commands import app
from tl_posgen.core import registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "source"))
import how_to  # noqa: E402  # pyright: ignore[reportMissingImports]
import numbers_file  # noqa: E402  # pyright: ignore[reportMissingImports]
import pages  # noqa: E402  # pyright: ignore[reportMissingImports]

FOLDERS = [DOCS, *(DOCS / name for name in ("how_to", "measures", "reference"))]
OF_SITE = [path for place in FOLDERS for path in sorted(place.glob("*.md")) if path.name != "changelog.md"]  # a copy
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *OF_SITE]
PICTURES = [path for kind in ("*.png", "*.svg") for place in FOLDERS for path in place.glob(kind)]
STEPS = sorted((ROOT / "examples" / "mini_model" / "checkpoints").iterdir())
HERE: dict[str, list[Any]] = {  # words of the pages -> words that have files here
    **{word: ["mini"] for word in ("MODEL", "NAME|DIRECTORY", "stories260K")},
    **{word: ["text.txt"] for word in ("FILE", "tinystories.txt")},
    "examples/mini_model/checkpoints/*": STEPS[:1],
    "models.csv": ["models.csv", "--tokenizer", "mini"],
    "examples/studies/small.toml": ["small.toml"],
}
SIZES = {"--length": 16, "--prompts": 2, "--steps": 20, "--seeds": 1, "--budgets": 6, "--n-draws": 1, "--ratios": 0.5}
SIZES |= {"--tokens": "4,8", "--times": 2}
STUDY = """
name = "small"
length = 16
n_prompts = 1
null_seeds = []
measures = ["loss"]
texts = ["bundled"]

[[models]]
name = "mini"
"""
TOO_LONG = re.compile(r"claims|executor ray|--search")  # minutes, or another process
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@cache
def rendered() -> dict[Path, str]:
    """Every page as its template and the numbers give it now."""
    return dict(pages.rendered())


def of_page(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [text for of, text in BLOCK.findall(path.read_text(encoding="utf-8")) if of == language]


def python_blocks(path: Path) -> list[str]:
    """Those of the page as its template gives it now, where it has one."""
    text = rendered().get(path, path.read_text(encoding="utf-8"))
    return [block for language, block in BLOCK.findall(text) if language == "python"]


def lines_of(command: str) -> list[tuple[str, str]]:
    """(page, line) of every command line in a code block that begins with this word; comments left out."""
    found = []
    for path in PAGES:
        for text in blocks(path, ""):
            lines = [line.split(" #")[0].strip() for line in text.splitlines()]
            found += [(of_page(path), line) for line in lines if line.split()[:1] == [command]]
    return found


# Numbers


def test_pages_are_what_their_templates_and_the_numbers_give():
    stale = [of_page(path) for path, text in rendered().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run make pages"


def test_every_measure_of_a_model_has_its_page():
    named = [one.name for one in pages.measure_pages.measured_of_models()]
    assert sorted(named) == [path.stem for path in sorted((DOCS / "measures").glob("*.md"))]


@pytest.mark.parametrize("scope", ["over heads", "within layers"])
def test_what_is_said_to_be_told_is_what_is_bold(scope):
    page = (ROOT / "docs" / "joining.md").read_text(encoding="utf-8")
    table = page.partition(f"| {scope} | mini | stories260K |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:5] for line in table.splitlines()[2:]]
    bold = {name.strip(): sum("**" in cell for cell in cells) for name, *cells in rows}
    told = page.partition(f"*Told from random init {scope}*, with the sign, on every model: ")[2].partition("\n")[0]
    lists = re.split(r"\. On (?:two|one|none): ", told.removesuffix("."))
    for n, pairs in zip((3, 2, 1, 0), lists, strict=True):
        names = {re.sub(r" \(.*\)$", "", pair) for pair in pairs.split("; ")}
        expected = {name for name, count in bold.items() if count == n}
        assert names - {"no pair"} == expected or (n == 0 and names == {"all others"} and len(expected) > 4)


def test_every_measure_answers_one_question_of_the_navigation():
    grouped = [name for names in pages.measure_pages.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(one.name for one in pages.measure_pages.measured_of_models())
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for question, names in pages.measure_pages.GROUPS.items():
        pages_of = "".join(f"          - {name}: measures/{name}.md\n" for name in names)
        assert f'      - "{question}":\n{pages_of}' in navigation


COMMAND_LINES = dict.fromkeys(
    line for page, line in lines_of("tl-posgen") if "/measures/" not in page and not TOO_LONG.search(line)
)


def test_every_how_to_has_a_picture_what_was_printed_and_what_to_read_next():
    for path in sorted((DOCS / "how_to").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert len(python_blocks(path)) == len(json.loads(how_to.PRINTED.read_text(encoding="utf-8"))[path.stem])
        assert f"]({path.stem}.png)" in text
        assert "```text\n" in text
        assert "\nNext: [" in text


def test_a_number_that_is_not_there_is_an_error_with_its_name():
    asked = '{{ result("demo results", "three_axis")("gone", tokens="all") }}'
    with pytest.raises(AttributeError, match=r"demo results/three_axis: 0 numbers 'gone' at .*; there are"):
        pages.environment().from_string(asked).render()


def test_the_file_holds_the_numbers_that_pages_show_and_no_others():
    numbers = numbers_file.read_numbers()
    assert numbers_file.only_shown(numbers, pages.shown_in(numbers)) == numbers


def test_a_file_written_again_is_the_same(tmp_path, monkeypatch):
    text, numbers = numbers_file.NUMBERS.read_text(encoding="utf-8"), numbers_file.read_numbers()
    monkeypatch.setattr(numbers_file, "NUMBERS", tmp_path / "numbers.json")
    numbers_file.write_numbers(numbers)
    assert numbers_file.NUMBERS.read_text(encoding="utf-8") == text


def test_every_part_that_is_measured_has_its_numbers():
    from parts import PARTS  # pyright: ignore[reportMissingImports]

    assert list(numbers_file.read_numbers()) == list(PARTS)


@pytest.mark.parametrize(
    ("form", "value", "digits", "expected"),
    [
        ("p", 0.777, 2, ".78"),
        ("p", -0.234, 2, "−.23"),
        ("p", -0.0001, 2, ".00"),
        ("p", 1.54, 2, "1.54"),
        ("p", None, 2, "–"),
        ("pc", 0.5314, 0, "53 %"),
        ("dec", 0.777, 2, "0.78"),
        ("signed", 0.38, 2, "+.38"),
        ("signed", -0.01, 2, "−.01"),
    ],
)
def test_numbers_are_written_in_one_way(form, value, digits, expected):
    assert pages.environment().filters[form](value, digits) == expected


# Commands and options


@pytest.mark.parametrize("template", ["README.md.j2", "index.md.j2"])
def test_the_torch_to_install_is_the_one_of_the_constraints(template):
    said = re.findall(r"pip install (torch==\S+)", (DOCS / "source" / template).read_text(encoding="utf-8"))
    assert said
    assert set(said) <= set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())


def test_badges_and_install_lines_follow_the_address(monkeypatch):
    where = "https://github.com/someone/something"
    for address, there in (("", False), (where, True)):
        monkeypatch.setattr(pages, "address", lambda told=address: told)
        readme = dict(pages.rendered())[ROOT / "README.md"]
        assert (f'pip install "tl-posgen @ git+{where}"' in readme) == there
        assert ("badge.svg" in readme) == there


def test_what_is_cited_is_this_version():
    assert f"\nversion: {pages.project()['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def command_named(name: str):
    """The command of this name; one of a measure is made now."""
    group: Any = typer.main.get_command(app)
    return group.resolve_command(group.context_class(group), [name])[1]


@pytest.mark.parametrize(("page", "line"), lines_of("tl-posgen"))
def test_the_command_and_its_options_exist(page, line):
    name, *arguments = shlex.split(line.replace("|", "_").replace("...", ""))[1:]
    command = command_named(name)
    context = command.context_class(command, info_name=name, resilient_parsing=True)
    command.make_parser(context).parse_args(arguments)


def small_words(line: str) -> list[str]:
    """The words of a command line on files that are here, with as few and short prompts as it takes."""
    words = [str(word) for name in shlex.split(line)[1:] for word in HERE.get(name, [name])]
    known = {option for one in command_named(words[0]).params for option in one.opts}
    sizes = SIZES | ({"--prompts": 8} if "--absolute" in words else {})
    words = [word for place, word in enumerate(words) if not {word, words[place - 1]} & {*sizes, "--null-seeds"}]
    is_one = "--prompt" in words
    return words + [
        str(part)
        for option, value in {**sizes, "--no-null": None}.items()
        if option in known and not (is_one and option in ("--length", "--prompts"))
        for part in (option, value)
        if part is not None
    ]


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_command_runs(line, command, tmp_path, monkeypatch, alice):
    """Each of the pages but those of measures, whose commands differ in the name alone."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(alice[:20000], encoding="utf-8")
    models = "".join(f"{path},{place}\n" for place, path in enumerate(STEPS[-3:]))
    Path("models.csv").write_text(f"model,score\n{models}", encoding="utf-8")
    Path("small.toml").write_text(STUDY, encoding="utf-8")
    code, printed, error = command(*small_words(line))
    assert code == 0, error
    assert printed


def test_every_option_in_the_text_exists():
    names = [one.name for one in pages.commands()] + [one.command for one in pages.environment().globals["measures"]]
    parameters = [one for name in names for one in command_named(name).params]
    known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
    known |= {
        "--measure",
        "--model",
        "--pages",
        "--pictures",
        "--notebooks",
        "--site",
        "--books",
        "--how-to",
    }  # of scripts
    known |= {"--help", "--no-deps"}  # of every command, and of pip
    for path in PAGES:
        prose = BLOCK.sub("", path.read_text(encoding="utf-8"))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose):
            assert option in known, f"{of_page(path)}: no command has {option}"


def test_every_command_is_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for one in pages.commands():
        assert f"tl-posgen {one.name}" in readme or f"`{one.name}`" in readme, one.name


@pytest.mark.parametrize(("page", "line"), lines_of("make"))
def test_the_make_target_exists(page, line):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert line.split()[1] in targets


def test_the_regenerating_script_has_the_options_that_stand_in_the_docs():
    script = [sys.executable, str(DOCS / "regenerate.py"), "--help"]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    said = " ".join(
        line for path in PAGES for line in re.findall(r"regenerate\.py [^`\n]*", path.read_text(encoding="utf-8"))
    )
    options = set(re.findall(r"--[\w-]+", said))
    assert options
    assert options <= set(re.findall(r"--[\w-]+", told))


# Code


@pytest.fixture
def small(tmp_path, monkeypatch, mini, alice):
    """An empty directory: run(block) runs it, after the page's earlier blocks, with small lengths."""
    monkeypatch.chdir(tmp_path)
    names = {"loaded": mini, "some_text": alice[:20000]}

    def run(block: str) -> None:
        block = how_to.on_mini(block).replace("budgets=[32]", "budgets=[16]")
        block = re.sub(r'(length"?[=:] ?)\d+', r"\g<1>32", block)
        fewest = 2 if "Rules(" in block else 1  # one calibrates, the other is measured
        block = re.sub(r'(n_prompts"?[=:] ?)\d+', rf"\g<1>{fewest}", block).replace(
            "null_seeds=(0, 1, 2)", "null_seeds=(0, 1)"
        )
        block = block.replace('tl_posgen.load_model("mini")', "loaded").replace("bundled_text()", "some_text")
        block = re.sub(r"^lm_eval\.simple_evaluate.*$", "", block, flags=re.MULTILINE)  # its task needs the network
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # Trainer, where there is no GPU
@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=of_page)
def test_the_python_blocks_run(path, small):
    for block in python_blocks(path):
        if "lm_eval" in block:
            pytest.importorskip("lm_eval")
        small(block)


def test_the_measure_of_contributing_is_short_and_has_all_parts():
    """An option, a null, an interval, a sentence and a figure, in thirty lines of code."""
    (block,) = python_blocks(ROOT / "CONTRIBUTING.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block.replace("length=256", "length=32"), names)
    result = names["result"]
    assert result.measure.options() == {"first": 1}
    share = result.numbers("share")
    assert 0 < share.low < share.value < share.high < 1
    assert len(share.inits) == 1
    (sentence,) = result.findings()
    assert f"{share:.0%}" in sentence
    assert result.plot().data


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=of_page)
def test_every_name_of_ours_exists(path):
    text = path.read_text(encoding="utf-8")
    names = {name for name in re.findall(r"\btl_posgen(?:\.[A-Za-z_]\w*)+", text) if not name.endswith(".measures")}
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_every_file_that_is_named_exists():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text)) | set(re.findall(r"^  (\w+(?:\.py|/)) ", text, re.MULTILINE))
    places = [ROOT, ROOT / "tl_posgen"]
    assert named
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_every_measure_stands_in_the_docs():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert [name for name in registry.BUILT_IN if f"`{name}`" not in text] == []


# Links and words


def anchors(text: str) -> set[str]:
    """The ids of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=of_page)
def test_every_link_and_picture_exists(path):
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if target.parent == DOCS / "notebooks":  # made from these when the site is built
            target = ROOT / "examples" / f"{target.stem}.ipynb"
        assert target.is_file(), f"{of_page(path)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{of_page(path)}: {link}"


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")]
    names = [*(str(path.relative_to(DOCS)) for path in OF_SITE), *notebooks]
    assert [name for name in names if name not in navigation] == []


def test_every_picture_is_shown():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = {Path(link).name for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    assert [path.name for path in PICTURES if path.name not in shown] == []
