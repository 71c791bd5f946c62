"""Importing the package, or asking the command for help, loads no engine; import-linter holds the rest."""

import subprocess
import sys

import pytest

HEAVY = "torch transformer_lens transformers plotly xarray pandas circuitsvis lm_eval"


@pytest.mark.parametrize(
    "code",
    [
        "import tl_posgen; dir(tl_posgen)",
        "import sys; sys.argv = ['tl-posgen', '--help']; from tl_posgen.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
    ],
    ids=["import tl_posgen", "tl-posgen --help"],
)
def test_neither_the_package_nor_the_help_loads_an_engine(code):
    code = f"{code}\nimport sys; print('loaded:', *[name for name in {HEAVY!r}.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
