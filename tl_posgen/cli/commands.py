"""The commands: each calls one analysis or experiment and shows what it found."""

from typing import Annotated

import typer

from tl_posgen.cli.options import Setup, app, command, parse_indices, parse_names, parse_numbers

Layers = Annotated[str | None, typer.Option(help="Layers, such as 0,2-4; all if left out.")]
Heads = Annotated[str | None, typer.Option(help="Heads of those layers, such as 0,2-4; all if left out.")]
Ratios = Annotated[str, typer.Option(help="Shares of tokens to move, in [0, 1].")]

__all__ = ["app"]


@command(length=512)
def analyze(
    setup: Setup,
    measures: Annotated[
        str | None,
        typer.Option(
            help="three_axis, variance, mean_key (these if left out), planes, residual, across_prompts, slash."
        ),
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
) -> None:
    """Measure how attention uses position on a text: a table here, and a report in --out."""
    where = {"layers": parse_indices(layers, "--layers"), "heads": parse_indices(heads, "--heads")}
    model, words = setup.load()
    from tl_posgen.analysis import analyze as run
    from tl_posgen.report.terminal import print_report

    report = run(model, words, analyzers=parse_names(measures), **where, **setup.cut)
    print_report(report, report.write(setup.out))


@app.command()
def check(
    model: Annotated[str, typer.Option(help="mini (bundled), a Hub name, or a Hugging Face directory.")] = "mini",
    backend: Annotated[str, typer.Option(help="auto, hooked or bridge.")] = "auto",
) -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.load import load_model
    from tl_posgen.models.probe import check as run

    run(load_model(model, backend=backend))  # pyright: ignore[reportArgumentType]


@command()
def substitute(
    setup: Setup,
    search: Annotated[bool, typer.Option(help="Also search the law of distances (minutes).")] = False,
) -> None:
    """Replace the scores by position + meaning and measure the loss: does the model run on the split?"""
    model, words = setup.load()
    from tl_posgen.experiments import substitution

    setup.present(substitution(model, words, search=search, head_costs=search, **setup.cut))


@command()
def distance(setup: Setup) -> None:
    """Put every pair at a distance of your choosing: what stays of the scores, and of the loss?"""
    model, words = setup.load()
    from tl_posgen.experiments import dummy_distance

    setup.present(dummy_distance(model, words, **setup.cut))


@command()
def perturb(
    setup: Setup,
    ratios: Ratios = "0,0.01,0.02,0.05,0.1,0.2,0.5",
) -> None:
    """Move tokens, positions or features, and measure the loss: how much order does the model need?"""
    shares = parse_numbers(ratios, "--ratios")
    model, words = setup.load()
    from tl_posgen.experiments import perturbation

    setup.present(perturbation(model, words, ratios=shares, **setup.cut))


@command(without=("length",))
def length(
    setup: Setup,
    inside: Annotated[int | None, typer.Option(help="The training length; the model's own if left out.")] = None,
    times: Annotated[int, typer.Option(help="How many times the training length to run.", min=1)] = 4,
) -> None:
    """Run beyond the training length: do attention outputs stay in their distribution, and at what loss?"""
    model, words = setup.load("bridge" if setup.backend == "auto" else None)
    from tl_posgen.experiments import length as run

    options = {"inside": inside, "times": times, "n_prompts": setup.prompts, "null_seed": setup.null_seed}
    setup.present(run(model, words, **options))


@command(without=("model",))
def emerge(
    setup: Setup,
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoint directories or Hub revisions, in order.")],
    model: Annotated[str | None, typer.Option(help="Hub name, where the checkpoints are its revisions.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer directory, if checkpoints have none.")] = None,
) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?"""
    words = setup.words()
    from tl_posgen.experiments import emergence

    where = {"model": model, "tokenizer": tokenizer, "backend": setup.backend}
    setup.present(emergence(checkpoints, words, **where, **setup.cut))
