"""README and docs say what is there: numbers from docs/numbers.json, imports, code that runs, links and pictures."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from doc_pages import BLOCK, DOCS, FOLDERS, OF_SITE, PAGES, ROOT, blocks, of_page, pages, python_blocks, rendered

from tl_posgen.core import registry

import how_to  # isort: skip  # pyright: ignore[reportMissingImports]
import numbers_file  # isort: skip  # pyright: ignore[reportMissingImports]

PICTURES = [path for kind in ("*.png", "*.svg") for place in FOLDERS for path in place.glob(kind)]


# Numbers


def test_pages_are_what_their_templates_and_the_numbers_give():
    stale = [of_page(path) for path, text in rendered().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run make pages"


def test_every_measure_of_a_model_has_its_page_and_answers_one_question_of_the_navigation():
    named = sorted(one.name for one in pages.measure_pages.measured_of_models())
    assert named == [path.stem for path in sorted((DOCS / "measures").glob("*.md"))]
    grouped = [name for names in pages.measure_pages.GROUPS.values() for name in names]
    assert sorted(grouped) == named
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for question, names in pages.measure_pages.GROUPS.items():
        pages_of = "".join(f"          - {name}: measures/{name}.md\n" for name in names)
        assert f'      - "{question}":\n{pages_of}' in navigation


def test_every_how_to_has_a_picture_what_was_printed_and_what_to_read_next():
    for path in sorted((DOCS / "how_to").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert len(python_blocks(path)) == len(json.loads(how_to.PRINTED.read_text(encoding="utf-8"))[path.stem])
        assert f"]({path.stem}.png)" in text
        assert "```text\n" in text
        assert "\nNext: [" in text


def test_every_option_of_a_measure_has_a_sentence_of_its_own():
    every = {name: pages.measure_pages.options(registry.find(name)) for name in registry.BUILT_IN}
    assert {name: row.names for name, rows in every.items() for row in rows if len(row.names) > 1} == {}


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
        ("dec", 0.777, 2, "0.78"),
        ("dec", -0.234, 2, "−0.23"),
        ("dec", -0.0001, 2, "0.00"),
        ("dec", 1.54, 2, "1.54"),
        ("dec", None, 2, "–"),
        ("pc", 0.5314, 0, "53 %"),
        ("signed", 0.38, 2, "+0.38"),
        ("signed", -0.01, 2, "−0.01"),
    ],
)
def test_numbers_are_written_in_one_way(form, value, digits, expected):
    assert pages.environment().filters[form](value, digits) == expected


def test_readme_shows_lines_that_the_command_prints_in_its_order():
    (block,) = (one for one in blocks(ROOT / "README.md", "text") if one.startswith("•"))
    shown = [line for line in block.splitlines() if line.strip() not in ("", "...")]
    printed = iter(numbers_file.read_numbers()["demo"]["printed"].splitlines())
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("template", ["README.md.j2", "index.md.j2"])
def test_the_torch_to_install_is_the_one_of_the_constraints(template):
    said = re.findall(r"pip install (torch==\S+)", (DOCS / "source" / template).read_text(encoding="utf-8"))
    assert said
    assert set(said) <= set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_badges_and_install_lines_follow_the_address(monkeypatch):
    where = "https://github.com/someone/something"
    for address, there in (("", False), (where, True)):
        monkeypatch.setattr(pages, "address", lambda told=address: told)
        readme = dict(pages.rendered())[ROOT / "README.md"]
        assert (f'pip install "tl-posgen @ git+{where}"' in readme) == there
        assert ("badge.svg" in readme) == there


def test_what_is_cited_is_this_version():
    assert f"\nversion: {pages.project()['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# Code


@pytest.fixture
def small(tmp_path, monkeypatch, mini, alice):
    """An empty directory: run(block) runs it, after the page's earlier blocks, with small lengths."""
    monkeypatch.chdir(tmp_path)
    names = {"loaded": mini, "some_text": alice[:20000]}

    def run(block: str) -> None:
        block = how_to.on_mini(block).replace("budget=32", "budget=16")
        block = re.sub(r'(length"?[=:] ?)\d+', r"\g<1>32", block)
        fewest = 2 if "Rules(" in block else 1  # one calibrates, the other is measured
        block = re.sub(r'(n_prompts"?[=:] ?)\d+', rf"\g<1>{fewest}", block).replace("nulls=3", "nulls=2")
        block = block.replace('tl_posgen.load_model("mini")', "loaded")
        block = block.replace("tl_posgen.bundled_text()", "some_text").replace("bundled_text()", "some_text")
        if "said the King" in block:  # who says nothing so early
            names["some_text"] = alice
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # Trainer, where there is no GPU
@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=of_page)
def test_the_python_blocks_run(path, small):
    for block in python_blocks(path):
        small(block)


@pytest.mark.longer
def test_the_measure_of_contributing_is_short_and_has_all_parts():
    """An option, a null, an interval, a sentence and a figure, in thirty lines of code."""
    block, _ = python_blocks(ROOT / "CONTRIBUTING.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block.replace("length=256", "length=32"), names)
    result = names["result"]
    assert result.measure.options() == {"skip": 1}
    share, rest = result.numbers("share"), result.numbers("share", tokens="without first")
    assert 0 < share.low < share.value < share.high < 1
    assert len(share.inits) == 1
    (sentence,) = result.findings()
    assert f"{share:.0%}" in sentence
    assert f"{rest:.0%}" in sentence
    assert result.plot().data


@pytest.mark.longer
def test_the_intervention_of_contributing_takes_ten_lines_and_tells_rises_beside_their_null():
    _, block = python_blocks(ROOT / "CONTRIBUTING.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(block, {})
    assert re.search(r"distance 64 \+\d\.\d{3} \[\+.*\] \(random init [+-]\d\.\d{3}\)", told.getvalue())


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
    known = list(registry.BUILT_IN)
    assert [name for name in known if f"`{name}`" not in text] == []


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
        assert target.is_file(), f"{of_page(path)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{of_page(path)}: {link}"


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")]
    names = [*(str(path.relative_to(DOCS)) for path in OF_SITE), *notebooks]
    assert [name for name in names if name not in navigation] == []


def test_the_pages_that_the_search_finds_by_other_words_exist():
    assert [name for name in pages.SYNONYMS if not (DOCS / name).is_file()] == []


def test_numbers_in_the_words_of_a_verdict_become_cells():
    told = "thirds, not held: without low 0.61 [0.54, 0.68], low alone -0.12; r at D = 1 0.93"
    cells = {"thirds: without low": "0.61 [0.54, 0.68]", "thirds: low alone": "−0.12", "r at D = 1": "0.93"}
    assert dict(pages.quantities(told)) == cells
    assert dict(pages.quantities("axis alone, the rest not defined")) == {"axis alone": "–", "the rest": "–"}
    assert pages.by_kind("random init: r 0.3; shuffled: r 0.1") == [("random init", "r 0.3"), ("shuffled", "r 0.1")]


def test_every_picture_is_shown():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = {Path(link).name for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    assert [path.name for path in PICTURES if path.name not in shown] == []
