"""The command `tl-posgen`: parses words, calls the library, prints. No arithmetic here."""

import sys
from collections.abc import Mapping
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
    loaded, words = prepare(model, text, backend, out)
    from tl_posgen.analysis import analyze as run

    report = run(
        loaded,
        words,
        layers=chosen_layers,
        heads=chosen_heads,
        length=length,
        n_prompts=prompts,
        null_seed=None if no_null else seed,
    )
    from tl_posgen.report.terminal import print_report

    print_report(report, report.write(out))


@app.command()
def check(model: Model = "mini", backend: Backend = "auto") -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.load import load_model
    from tl_posgen.models.probe import check as run

    run(load_model(model, backend=backend))


@app.command()
def substitute(
    model: Model = "mini",
    text: Text = None,
    length: Length = 256,
    prompts: Prompts = 4,
    backend: Backend = "auto",
    seed: Seed = 0,
    no_null: NoNull = False,
    search: Annotated[bool, typer.Option(help="Also search the law of distances (minutes).")] = False,
    out: Out = Path("report"),
) -> None:
    """Replace the scores by position + meaning and measure the loss: does the model run on the split?"""
    loaded, words = prepare(model, text, backend, out)
    from tl_posgen.experiments.substitution import substitution

    null_seed = None if no_null else seed
    options: dict[str, Any] = {"search": search, "head_costs": search, "null_seed": null_seed}
    present({"substitution": substitution(loaded, words, length=length, n_prompts=prompts, **options)}, out)


@app.command()
def perturb(
    model: Model = "mini",
    text: Text = None,
    length: Length = 256,
    prompts: Prompts = 4,
    backend: Backend = "auto",
    seed: Seed = 0,
    no_null: NoNull = False,
    out: Out = Path("report"),
) -> None:
    """Move tokens, positions or features, and measure the loss: how much order does the model need?"""
    loaded, words = prepare(model, text, backend, out)
    from tl_posgen.experiments.perturbation import perturbation

    null_seed = None if no_null else seed
    present({"perturbation": perturbation(loaded, words, length=length, n_prompts=prompts, null_seed=null_seed)}, out)


@app.command()
def emerge(
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoint directories or Hub revisions, in order.")],
    model: Annotated[str | None, typer.Option(help="Hub name, where the checkpoints are its revisions.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer directory, if checkpoints have none.")] = None,
    text: Text = None,
    length: Length = 256,
    prompts: Prompts = 4,
    seed: Seed = 0,
    no_null: NoNull = False,
    out: Out = Path("report"),
) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?"""
    words = read_words(text, out)
    from tl_posgen.experiments.emergence import emergence

    null_seed = None if no_null else seed
    options: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "null_seed": null_seed}
    present({"emergence": emergence(checkpoints, words, length=length, n_prompts=prompts, **options)}, out)


@app.command()
def coupling(
    model: Model = "mini",
    text: Text = None,
    length: Length = 64,
    prompts: Prompts = 4,
    k: Annotated[int, typer.Option(help="Number of top singular vectors.", min=1)] = 10,
    backend: Backend = "auto",
    seed: Seed = 0,
    no_null: NoNull = False,
    out: Out = Path("report"),
) -> None:
    """Coupling of residual Jacobians across layers, linearity and growth of the residual stream."""
    loaded, words = prepare(model, text, backend, out)
    from torch import stack

    from tl_posgen.experiments.coupling import coupling as run
    from tl_posgen.models.random_like import random_like
    from tl_posgen.models.tokens import to_prompts

    tokens = stack(to_prompts(loaded, words, length=length, n_prompts=prompts))
    null_model = None if no_null else random_like(loaded, seed)
    present({"coupling": run(loaded, tokens, null_model=null_model, k=[k], seed=seed)}, out)


def read_words(text: Path | None, out: Path) -> str:
    """The text, once it is known that the output can be written."""
    from tl_posgen.models.tokens import bundled_text, read_text
    from tl_posgen.report import prepare_directory

    words = read_text(text) if text else bundled_text()
    prepare_directory(out)
    return words


def prepare(model: str, text: Path | None, backend: str, out: Path) -> tuple[Any, str]:
    words = read_words(text, out)
    from tl_posgen.models.load import load_model

    return load_model(model, backend=backend), words  # pyright: ignore[reportArgumentType]


def present(results: Mapping[str, Any], out: Path) -> None:
    """Experiments: their tables here, with the null's below, and their page in `out`."""
    from tl_posgen.report import Report
    from tl_posgen.report.terminal import print_experiments

    report = Report(results, next(iter(results.values())).provenance)
    print_experiments(report, report.write(out))


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


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except PosgenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
