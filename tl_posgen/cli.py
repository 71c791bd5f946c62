"""The command `tl-posgen`: parses words, calls the library, prints. No arithmetic here."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_posgen.errors import InputError, PosgenError

app = typer.Typer(
    help="How does a language model's attention use position?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="mini (bundled), a Hub name, or a Hugging Face directory.")]
Text = Annotated[Path | None, typer.Option(help="A text file; the bundled book if left out.")]
Length = Annotated[int, typer.Option(help="Tokens per prompt.", min=2)]
Prompts = Annotated[int, typer.Option(help="Number of consecutive prompts cut from the text.", min=1)]
Layers = Annotated[str | None, typer.Option(help="Layers, such as 0,2-4; all if left out.")]
Heads = Annotated[str | None, typer.Option(help="Heads of those layers, such as 0,2-4; all if left out.")]
Backend = Annotated[str, typer.Option(help="auto, hooked (HookedTransformer) or bridge (TransformerBridge).")]
Seed = Annotated[int, typer.Option(help="Seed of the randomly initialised null model.")]
NoNull = Annotated[bool, typer.Option("--no-null", help="Skip the randomly initialised model.")]
Out = Annotated[Path, typer.Option(help="Directory for index.html, summary.json and results.nc.")]


@app.callback()
def _commands() -> None:
    """Keeps `analyze` a named command while it is the only one."""


@app.command()
def analyze(
    model: Model = "mini",
    text: Text = None,
    length: Length = 512,
    prompts: Prompts = 4,
    layers: Layers = None,
    heads: Heads = None,
    backend: Backend = "auto",
    seed: Seed = 0,
    no_null: NoNull = False,
    out: Out = Path("report"),
) -> None:
    """Measure how attention uses position on a text: a table here, and a report in --out."""
    chosen_layers, chosen_heads = parse_indices(layers, "--layers"), parse_indices(heads, "--heads")
    from tl_posgen.models.tokens import bundled_text, read_text
    from tl_posgen.report import prepare_directory

    words = read_text(text) if text else bundled_text()
    prepare_directory(out)

    from tl_posgen.analysis import analyze as run
    from tl_posgen.models.load import load_model

    report = run(
        load_model(model, backend=backend),
        words,
        layers=chosen_layers,
        heads=chosen_heads,
        length=length,
        n_prompts=prompts,
        null_seed=None if no_null else seed,
    )
    page = report.write(out)
    print_report(report, page)


@app.command()
def check(model: Model = "mini", backend: Backend = "auto") -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.load import load_model
    from tl_posgen.models.probe import check as run

    run(load_model(model, backend=backend))


def parse_indices(words: str | None, option: str) -> list[int] | None:
    """'0,2-4' -> [0, 2, 3, 4]."""
    if words is None:
        return None
    try:
        spans = [[int(end) for end in part.split("-")] for part in words.split(",")]
        indices = sorted({index for span in spans for index in range(span[0], span[-1] + 1)})
        if not indices or any(len(span) > 2 for span in spans):
            raise ValueError
    except ValueError:
        raise InputError(f"{option} {words!r}: write indices and ranges such as 0,2-4") from None
    return indices


# the table's headings: short, so that thirteen columns fit a terminal of eighty
HEADINGS = {
    "layer": "L",
    "head": "H",
    "three_axis_r": "r",
    "three_axis_r_no_first": "r-1st",
    "three_axis_r_visible": "r-row",
    "mean_key_r": "r-mk",
}
CAPTION = (
    "r: correlation of the scores with position + query + key; r-1st: first token left out; r-row: within rows, what "
    "softmax sees; q ... qkd: variance shares; r-mk: mean-key split"
)


def print_report(report: Any, page: Path) -> None:
    """The per-head table (per-layer for models of more than 64 heads), what was found, and where the page is."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tl_posgen.report.findings import findings
    from tl_posgen.report.summary import means

    console = Console()
    frame = report.frame()
    rows = frame if len(frame) <= 64 else frame.groupby("layer", as_index=False).mean().assign(head="all")
    title = f"{report.provenance['model']}: {len(frame)} heads"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=CAPTION)
    for name in rows.columns:
        table.add_column(HEADINGS.get(str(name), str(name).removeprefix("share_")), justify="right", no_wrap=True)

    def cells(values: dict[str, Any]) -> list[str]:
        return [f"{v:.3f}".replace("0.", ".") if isinstance(v, float) else f"{v}" for v in values.values()]

    for row in rows.to_dict("records"):
        table.add_row(*cells(row | {"layer": int(row["layer"])}))
    table.add_section()
    table.add_row(*cells({"layer": "mean", "head": ""} | means(frame)), style="bold")
    if report.provenance.get("null_seed") is not None:
        table.add_row(*cells({"layer": "null", "head": ""} | means(report.frame(null=True))), style="dim")
    console.print(table)
    for sentence in findings(report.results):
        console.print(f"• {sentence}", highlight=False)
    console.print(f"\nReport: {page}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except PosgenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
