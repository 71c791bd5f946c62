"""The commands: each calls one analysis or experiment and shows what it found."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tl_posgen.cli.options import Setup, app, command, parse_indices, parse_names, parse_numbers
from tl_posgen.errors import UnsupportedModelError

Layers = Annotated[str | None, typer.Option(help="Layers, such as 0,2-4; all if left out.")]
Heads = Annotated[str | None, typer.Option(help="Heads of those layers, such as 0,2-4; all if left out.")]
Ratios = Annotated[str, typer.Option(help="Shares of tokens to move, in [0, 1].")]
Tokenizer = Annotated[str | None, typer.Option(help="mini or a tokenizer directory, if checkpoints have none.")]

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


@command(prompts=16)
def substitute(
    setup: Setup,
    search: Annotated[bool, typer.Option(help="Also search a split on other prompts of the text (minutes).")] = False,
    search_prompts: Annotated[int, typer.Option(help="How many other prompts.", min=1)] = 64,
    search_steps: Annotated[int, typer.Option(help="Steps of gradient descent.", min=1)] = 60,
    gamma: Annotated[float, typer.Option(help="Replace only scores below this quantile of their head.")] = 1.0,
    from_layer: Annotated[int, typer.Option(help="Replace from this layer on.", min=0)] = 0,
) -> None:
    """Replace the scores by position + meaning and measure the loss: does the model run on the split?"""
    model, words = setup.load()
    from tl_posgen.experiments import substitution

    options = {"search": search, "search_prompts": search_prompts, "search_steps": search_steps, "head_costs": search}
    setup.present(
        substitution(model, words, gamma=gamma, from_layer=from_layer, seed=setup.seed, **options, **setup.cut)
    )


@command()
def distance(
    setup: Setup,
    distances: Annotated[str, typer.Option(help="Every pair at each of these; the first is the reference.")] = (
        "0,64,256,1000,2048"
    ),
    limits: Annotated[
        str, typer.Option(help="Distances above each of these seen as the limit.")
    ] = "1,2,4,8,16,32,64,128",
) -> None:
    """Put every pair at a distance of your choosing: what stays of the scores, and of the loss?"""
    where = {
        "distances": parse_numbers(distances, "--distances"),
        "limits": parse_numbers(limits, "--limits"),
    }
    model, words = setup.load()
    from tl_posgen.experiments import dummy_distance

    setup.present(dummy_distance(model, words, **where, **setup.cut))


@command()
def perturb(
    setup: Setup,
    ratios: Ratios = "0,0.01,0.02,0.05,0.1,0.2,0.5",
) -> None:
    """Move tokens, positions or features, and measure the loss: how much order does the model need?"""
    shares = parse_numbers(ratios, "--ratios")
    model, words = setup.load()
    from tl_posgen.experiments import perturbation

    setup.present(perturbation(model, words, ratios=shares, seeds=(setup.seed, setup.seed + 1), **setup.cut))


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
    tokenizer: Tokenizer = None,
    coupling: Annotated[bool, typer.Option("--coupling", help="Also the coupling of residual Jacobians.")] = False,
) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?"""
    words = setup.words()
    from tl_posgen.experiments import coupling_emergence, emergence

    where = {"model": model, "tokenizer": tokenizer, "backend": setup.backend}
    results = [emergence(checkpoints, words, **where, **setup.cut)]
    if coupling:
        results.append(coupling_emergence(checkpoints, words, seed=setup.seed, **where, **setup.cut))
    setup.present(*results)


@command()
def planes(setup: Setup) -> None:
    """Magnitude and phase of queries and keys in RoPE's planes: could the model entangle, and did training?"""
    model, words = setup.load()
    from tl_posgen.analysis import analyze as run
    from tl_posgen.experiments import any_distance, plane_sufficiency

    patterns = run(model, words, analyzers=["planes"], examples=0, **setup.cut)["planes"]
    sufficiency = plane_sufficiency(model, words, length=setup.length, n_prompts=setup.prompts, seed=setup.seed)
    setup.present(patterns, sufficiency, any_distance(model, words, seed=setup.seed, **setup.cut))


@command()
def downstream(
    setup: Setup,
    items: Annotated[
        Path | None, typer.Option(help="JSONL of multiple-choice or cloze items; a cloze of the text if left out.")
    ] = None,
    n_items: Annotated[int, typer.Option(help="How many items.", min=1)] = 40,
    ratios: Ratios = "0,0.05,0.1,0.5",
) -> None:
    """Multiple-choice and cloze items with the order disturbed: does the model still choose the right one?"""
    shares = parse_numbers(ratios, "--ratios")
    model, words = setup.load()
    from tl_posgen.experiments import downstream as run
    from tl_posgen.experiments.items import cloze_items

    chosen = items if items is not None else cloze_items(words, n_items)
    options = {"n_items": n_items, "ratios": shares, "seed": setup.seed, "null_seed": setup.null_seed}
    setup.present(run(model, chosen, **options))


@command(length=512)
def slash(
    setup: Setup,
    kappa: Annotated[float, typer.Option(help="Slash score that makes a head slash-dominant.")] = 0.1,
    distances: Annotated[str, typer.Option(help="Distances to look at: 0 itself, 1 the previous token.")] = "0-4",
) -> None:
    """Heads that attend a fixed distance back: which, on random tokens too, and why."""
    where = {"kappa": kappa, "distances": parse_indices(distances, "--distances")}
    model, words = setup.load()
    from tl_posgen.analysis import analyze as run
    from tl_posgen.analyzers.slash import Slash
    from tl_posgen.experiments import band_ablation, cone, slash_transfer

    measured = run(model, words, analyzers=[Slash(**where), "slash_planes"], examples=0, **setup.cut)
    options = setup.cut | where
    results = [*measured.results.values(), slash_transfer(model, words, seed=setup.seed, **options)]
    for experiment in (cone, band_ablation):
        try:
            results.append(experiment(model, words, **options))
        except UnsupportedModelError as reason:
            print(f"left out: {reason}", file=sys.stderr)
    setup.present(*results)


@command(without=("model", "text", "length", "prompts", "backend", "no_null"))
def toy(
    setup: Setup,
    distance: Annotated[int, typer.Option(help="How many positions later the label is shown.", min=1)] = 3,
    planes: Annotated[str, typer.Option(help="all, high_medium, high, medium or low.")] = "all",
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 1500,
) -> None:
    """Train the shallow RoPE transformer that grows a slash-dominant head."""
    setup.prepare()
    from tl_posgen.experiments import slash_toy

    setup.present(slash_toy(distance, planes, seeds=range(setup.seed, setup.seed + seeds), steps=steps))


@command(length=64)
def coupling(
    setup: Setup,
    k: Annotated[str, typer.Option(help="Numbers of top singular vectors, such as 10,30.")] = "10",
    tokens: Annotated[str, typer.Option(help="last, or positions such as 20,40,60.")] = "last",
    token_wise: Annotated[bool, typer.Option("--token-wise", help="Also between tokens of a layer.")] = False,
) -> None:
    """Coupling of residual Jacobians across layers, linearity and growth of the residual stream."""
    chosen = "last" if tokens == "last" else parse_indices(tokens, "--tokens")
    ks = parse_indices(k, "--k")
    model, words = setup.load()
    from tl_posgen.experiments import coupling as run

    options = {"k": ks, "tokens": chosen, "token_wise": token_wise, "seed": setup.seed}
    setup.present(run(model, words, **options, **setup.cut))


@command(without=("model",), length=64)
def coupling_scores(
    setup: Setup,
    scores: Annotated[Path, typer.Argument(help="CSV with columns model, score [, d_model, parameters].")],
    score: Annotated[str, typer.Option(help="The column of scores.")] = "score",
    tokenizer: Tokenizer = None,
    k: Annotated[int, typer.Option(help="Number of top singular vectors.", min=1)] = 10,
) -> None:
    """Does coupling go with a score over many models, and is anything left given their size?"""
    words = setup.words()
    from tl_posgen.experiments import coupling_scores as run

    options = {"score": score, "tokenizer": tokenizer, "k": k, "backend": setup.backend, "seed": setup.seed}
    setup.present(run(scores, words, **options, **setup.cut))


@command()
def claims(
    setup: Setup,
    papers: Annotated[str, typer.Option(help="Any of position, slash, coupling.")] = "position,slash,coupling",
    checkpoints: Annotated[
        list[str] | None, typer.Option(help="A checkpoint of the model in training; repeat, in order.")
    ] = None,
) -> None:
    """Everything above on one model, and a table: each claim of the papers held, partly, or not, by how much.

    Takes minutes to hours. Finished parts are kept in --out, and a second run goes on from them.
    """
    model, words = setup.load()
    from tl_posgen.claims import judge_claims
    from tl_posgen.report.terminal import print_claims

    report = judge_claims(
        model,
        words,
        papers=parse_names(papers) or [],
        checkpoints=checkpoints or [],
        length=setup.length,
        n_prompts=setup.prompts,
        null_seed=setup.seed,
        keep=setup.out,
    )
    print_claims(report, report.write(setup.out))
