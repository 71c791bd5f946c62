"""docs/how_to/*.md: questions, answered by code that was run here, with what it printed and drew."""

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

HERE = Path(__file__).parent / "how_to"
PRINTED = HERE / "printed.json"
DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
QUESTIONS = {  # heading -> page -> question, as the navigation and the list of pages have them
    "Heads": {
        "slash_heads": "Which heads look back a fixed distance (previous-token heads), and do they matter?",
        "one_prompt": "How do I analyse one prompt instead of a book?",
        "arrays": "How do I get q, k and attention scores of every head as arrays?",
        "position_part": "How do I get the position part of a head's scores, or remove it?",
        "far_tokens": "Which heads' position parts matter for tokens far into a prompt?",
        "logit_difference": "How do I remove position from a head and read the logit difference?",
        "sae": "How do I use my sparse autoencoder (SAELens)?",
    },
    "Models": {
        "gguf": "How do I measure a GGUF file?",
        "large_models": "How do I measure a 7 B model on one GPU, a 70 B model over several?",
        "transformers": "How do I bring a model of transformers, nnsight or nnterp?",
        "compare": "How do I compare a base model with its instruct version?",
        "training": "How do I watch measures during training?",
        "many_models": "How do I measure many models on a cluster?",
    },
    "Uses": {
        "harness": "How do I run a benchmark (lm-evaluation-harness) under an intervention?",
        "kv_cache": "Which rule should I use for a KV cache?",
        "long_context": "How do I make a model read beyond its training length, and know how far it reads?",
        "paper": "How do I put figures, tables and numbers into a paper?",
        "own_measure": "How do I write my own measure?",
    },
}
ON_MINI = {  # what a page asks the Hub, or the top of a clone, for -> what CI, and this script, run in its place
    'tl_posgen.load_model("HuggingFaceTB/SmolLM2-135M")': 'tl_posgen.load_model("mini")',
    '"examples/mini_model/': f'"{DOCS.parent}/examples/mini_model/',
}


def on_mini(block: str) -> str:
    """Return the block for the bundled model, from any directory."""
    for original, replacement in ON_MINI.items():
        block = block.replace(original, replacement)
    return block


def with_output(name: str, text: str) -> str:
    """Return the page with what each block printed below it."""
    by_page = json.loads(PRINTED.read_text(encoding="utf-8")) if PRINTED.is_file() else {}
    outputs = iter(by_page.get(name, ()))

    def below(match: re.Match[str]) -> str:
        printed = next(outputs, "")
        return match[0] + (f"\n```text\n{printed}\n```\n" if printed else "")

    return BLOCK.sub(below, text)


def run(text: str) -> tuple[list[str], go.Figure | None]:
    """Run the blocks of a page one after the other: what each printed, and the last figure that ended one."""
    names: dict[str, Any] = {}
    printed, figure, before = [], None, Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for block in BLOCK.findall(text):
                *lines, last = on_mini(block).rstrip().split("\n")
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    if ".plot(" in last or last.startswith("px."):
                        exec("\n".join(lines), names)
                        figure = eval(last, names)
                    else:
                        exec("\n".join([*lines, last]), names)
                printed.append("\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()))
        finally:
            os.chdir(before)
    return printed, figure


def write_how_to(chosen: list[str]) -> None:
    """Run these pages, or all: their output into printed.json, their last figure into docs/how_to."""
    from pages import environment
    from pictures import browser_of, photograph

    templates = environment()
    by_page = json.loads(PRINTED.read_text(encoding="utf-8")) if PRINTED.is_file() else {}
    names = chosen or [path.name.removesuffix(".md.j2") for path in sorted(HERE.glob("*.md.j2"))]
    with browser_of() as browser:
        for name in names:
            by_page[name], figure = run(templates.get_template(f"how_to/{name}.md.j2").render())
            if figure is not None:
                (DOCS / "how_to" / f"{name}.png").write_bytes(photograph(browser, figure, 1000))
            text = json.dumps(dict(sorted(by_page.items())), indent=1, ensure_ascii=False) + "\n"
            PRINTED.write_text(text, encoding="utf-8")
            print(f"ran {name}", flush=True)
