"""Every link, picture and script of a built site leads to a file in it, and every #anchor to an id: else exit 1.

So does a script, style or picture that another host would have to send.

    python .ci/check_site.py site

`zensical build --strict` checks links of Markdown files; this also checks pictures, HTML and what is generated.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, with their lines, and the ids that links may lead to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[tuple[int, str]] = []
        self.ids: set[str] = set()
        self.sent: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                if (name == "src" or ("rel", "stylesheet") in attrs) and urlsplit(value).netloc:
                    self.sent.append(value)
                self.links.append((self.getpos()[0], value))
            elif name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value or "")


def broken_links(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        found += [f"{path.relative_to(site.resolve())}: {url}: sent by another host" for url in page.sent]
        for line, link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path.parent / unquote(url.path) if url.path else path
            target = (target / "index.html" if target.is_dir() else target).resolve()
            where = f"{path.relative_to(site.resolve())}:{line}: {link}"
            if not target.is_file():
                found.append(f"{where}: no such file")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                found.append(f"{where}: no such anchor")
    return found


if __name__ == "__main__":
    problems = broken_links(Path(sys.argv[1]))
    print(*problems, f"{len(problems)} broken links", sep="\n")
    sys.exit(bool(problems))
