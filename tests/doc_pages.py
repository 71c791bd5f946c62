"""README and the pages of docs/: where they are, and the blocks of code in them."""

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "source"))
import pages  # noqa: E402  # pyright: ignore[reportMissingImports]

FOLDERS = [DOCS, *(DOCS / name for name in ("how_to", "measures", "reference"))]
OF_SITE = [path for place in FOLDERS for path in sorted(place.glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *OF_SITE]
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
