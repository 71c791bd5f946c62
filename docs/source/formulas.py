"""docs/katex: what draws the formulas of the site, of the version and hash in package-lock.json."""

import shutil
import subprocess
from pathlib import Path

from pages import DOCS, HERE, ROOT

BUILD, TARGET = ROOT / "build" / "katex", DOCS / "katex"


def fetch() -> None:
    """Fetch KaTeX with npm, and put its script, style and fonts where the site finds them."""
    if shutil.which("npm") is None:
        raise SystemExit("the site's formulas need npm; install it (Debian: apt-get install npm)")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, BUILD)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--silent"], cwd=BUILD, check=True)
    dist = BUILD / "node_modules" / "katex" / "dist"
    shutil.rmtree(TARGET, ignore_errors=True)
    (TARGET / "fonts").mkdir(parents=True)
    for name in ("katex.min.js", "katex.min.css", *(f"fonts/{path.name}" for path in (dist / "fonts").glob("*.woff2"))):
        shutil.copy(dist / Path(name), TARGET / name)
