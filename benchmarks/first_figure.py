"""From nothing to the first figure: pip install into a new virtual environment, then the README's ten lines.

    python benchmarks/first_figure.py [--constraints constraints-bridge.txt]

The peer is TransformerLens alone, installed first: what pip then adds is ours. Nothing is taken from pip's cache. The
ten lines are the first Python block of the README in a new process, imports, null and page included; the first figure
is drawn by then.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seconds(*command: str | Path, cwd: Path) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    began = time.perf_counter()
    subprocess.run([str(word) for word in command], cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints-bridge.txt")
    constraints = parser.parse_args().constraints.resolve()
    pins = re.findall(r"^(?:torch|transformer-lens)==\S+", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        python = place / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", constraints)
        venv = seconds(sys.executable, "-m", "venv", "--upgrade-deps", place / "venv", cwd=place)
        peer = venv + sum(seconds(*pip, pin, cwd=place) for pin in pins)
        ours = seconds(*pip, ROOT, cwd=place)
        lines = seconds(python, "-W", "ignore", "-c", block, cwd=place)
        again = seconds(python, "-W", "ignore", "-c", "import transformer_lens", cwd=place)
        assert (place / "report" / "index.html").is_file()
    print(f"pip install {' '.join(pins)}, into a new environment {peer:7.0f} s")
    print(f"pip install of this checkout, beside it {ours:7.0f} s  {ours / peer:.2f} of it")
    print(f"the README's ten lines, in a new process {lines:6.0f} s, {again:.0f} s of them import transformer_lens")
    print(f"from nothing to the first figure {peer + ours + lines:14.0f} s")


if __name__ == "__main__":
    main()
