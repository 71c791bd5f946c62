"""Commands that are no measures: analyses of several, reports side by side, studies, claims."""

from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tl_posgen.cli.measure_commands import Commands
from tl_posgen.cli.options import Setup, app, command, parse_heads, parse_indices, parse_names

Layers = Annotated[str | None, typer.Option(help="Layers, such as 0,2-3; all if left out.")]
Heads = Annotated[
    str | None, typer.Option(help="Heads, such as L3H1,L0H2, or 0,2-3 of each of those layers; all if left out.")
]

LOADING = ("backend", "dtype", "device", "revision", "tokenizer")
NULLS = ("null_seeds", "shuffled_seeds", "no_null")
PAGE = ("out", "force", "full")
TEXT = ("text", "prompt", "dataset", "length", "prompts", "consecutive")
READING = tuple(field.name for field in fields(Setup) if field.name not in PAGE)

app.info.cls = Commands


def print_version(wanted: bool) -> bool:
    if wanted:
        print(f"tl-posgen {version('tl-posgen')}")
        raise typer.Exit
    return wanted


@app.callback()
def general(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How does a language model's attention use position?"""


__all__ = ["app"]


@command(length=512)
def analyze(
    setup: Setup,
    measures: Annotated[
        str | None, typer.Option(help="Such as three_axis,planes; `tl-posgen measures` lists them.")
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    streaming: Annotated[
        bool | None,
        typer.Option(help="Form no score matrix; if left out, for prompts over 1,024 tokens.", show_default=False),
    ] = None,
) -> None:
    """Measure how attention uses position on a text: a table here, and a report in --out."""
    where = {"layers": parse_indices(layers, "--layers"), "heads": parse_heads(heads)}
    names, cut = parse_names(measures), setup.cut
    words, model = setup.words(), setup.pretrained()
    from tl_posgen.core.engine import analyze as run
    from tl_posgen.report.terminal import print_report

    with setup.parts() as parts:
        found = run(model, words, measures=names, streaming=streaming, keep=parts, **where, **cut)
    setup.present(found, print_report, parts=parts)


@app.command()
def measures(full: Annotated[bool, typer.Option("--full", help="Also the source of each.")] = False) -> None:
    """List every measure that analyze can be asked for, those of other packages too."""
    from tl_posgen.report.terminal import print_known_measures

    print_known_measures(full=full)


@command(without=(*TEXT, "seed", *NULLS, *PAGE))
def check(setup: Setup) -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.layer_table import check as run

    run(setup.pretrained().load())


@command(without=("model", *TEXT, *LOADING, *NULLS))
def toy(
    setup: Setup,
    distance: Annotated[int, typer.Option(help="How many positions later the label is shown.", min=1)] = 3,
    planes: Annotated[str, typer.Option(help="all, high_medium, high, medium or low.")] = "all",
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 1500,
) -> None:
    """Train the shallow RoPE transformer that grows a slash-dominant head."""
    setup.prepare()
    from tl_posgen.slash import slash_toy

    setup.present(slash_toy(distance, planes, seeds=range(setup.seed, setup.seed + seeds), steps=steps))


@command(without=("model", "revision", "prompt", "shuffled_seeds"), length=64)
def coupling_scores(
    setup: Setup,
    scores: Annotated[Path, typer.Argument(help="CSV with columns model, score [, d_model, n_layers, parameters].")],
    score: Annotated[str, typer.Option(help="The column of scores.")] = "score",
    k: Annotated[int, typer.Option(help="Number of top singular vectors.", min=1)] = 10,
) -> None:
    """Does coupling go with a score over many models, more than their sizes do, and is anything left given these?"""
    cut, words = setup.cut, setup.words()
    from tl_posgen.coupling import coupling_scores as run

    with setup.parts() as parts:
        found = run(scores, words, score=score, tokenizer=setup.tokenizer, k=k, keep=parts, **setup.place, **cut)
    setup.present(found, parts=parts)


@command(without=("model", "revision", "prompt", "shuffled_seeds"))
def emerge(
    setup: Setup,
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoint directories or Hub revisions, in order.")],
    model: Annotated[str | None, typer.Option(help="Hub name, where the checkpoints are its revisions.")] = None,
    coupling: Annotated[bool, typer.Option("--coupling", help="Also the coupling of residual Jacobians.")] = False,
) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?"""
    cut, words = setup.cut, setup.words()
    from tl_posgen.studies.emergence import MEASURES, emergence

    measures = (*MEASURES, "coupling") if coupling else MEASURES
    where = {"model": model, "tokenizer": setup.tokenizer, **setup.place}
    with setup.parts() as parts:
        found = emergence(checkpoints, words, measures=measures, keep=parts, **where, **cut)
    setup.present(found, parts=parts)


@command(without=("length", "prompts", "consecutive", "seed", *NULLS))
def explain(
    setup: Setup,
    prompt: Annotated[str, typer.Option(help="The prompt that is explained; --text is the reference beside it.")],
    head: Annotated[str, typer.Option(help="One head, such as L3H1 or 3.1.")],
    query: Annotated[int, typer.Option(help="The token that attends; -1 is the last.")] = -1,
    against: Annotated[
        int | None, typer.Option(help="The key whose score is taken away; the row's mean if left out.")
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="Another prompt of as many tokens: what makes the difference to it?")
    ] = None,
) -> None:
    """Why does a head attend from one token of a prompt to others? Terms, planes and sources of its scores."""
    words, model = setup.words(), setup.pretrained()
    from tl_posgen.prompt import explain as run
    from tl_posgen.prompt.terminal import print_explanation

    reference = None if setup.text is None and setup.dataset is None else words
    found = run(model, prompt, head=head, query=query, against=against, other=other, reference=reference)
    print_explanation(found, full=setup.full)
    print(f"\nPage: {found.write(setup.out, force=setup.force)}")


@command(without=READING)
def compare(
    setup: Setup,
    first: Annotated[Path, typer.Argument(help="A report's directory, or its results.nc.")],
    second: Annotated[Path, typer.Argument(help="Another: of another model or text, or under an intervention.")],
) -> None:
    """Show what changes per head from one report to another; intervals are paired where the prompts are the same."""
    from tl_posgen.core.comparison import compare as run

    setup.prepare()
    setup.present(run(first, second))


@app.command()
def sweep(
    study: Annotated[Path, typer.Argument(help="TOML: models, revisions, texts, measures.")],
    out: Annotated[Path, typer.Option(help="Directory of the results, a file a job.")] = Path("runs"),
    workers: Annotated[int, typer.Option(help="How many processes.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; auto: the one running here; local: a new one.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all, not three sentences and one table.")] = False,
    plan: Annotated[bool, typer.Option("--list", help="List the jobs and what became of them; run nothing.")] = False,
) -> None:
    """Measure models x revisions x texts: a job a file; finished jobs are passed over, so a second run goes on.

    Exit code 1 where jobs failed; a second run tries them again.
    """
    from tl_posgen.report.terminal import print_measures
    from tl_posgen.studies.overview import report_study
    from tl_posgen.studies.sweep import states
    from tl_posgen.studies.sweep import sweep as run

    if plan:
        print(*(f"{state:10} {job}" for job, state in states(study, out).items()), sep="\n")
        return
    swept = run(study, out=out, workers=workers, ray=ray)
    if swept.finished:
        report = report_study(out)
        page = report.write(out / "report", force=True)
        print_measures(report, full=full)
        print(f"\nReport: {page}")
    print(f"{swept} in {out}")
    raise typer.Exit(int(bool(swept.failed)))


@command(without=("prompt",))
def claims(
    setup: Setup,
    papers: Annotated[str, typer.Option(help="Any of position, slash, coupling.")] = "position,slash,coupling",
    checkpoints: Annotated[
        list[str] | None, typer.Option(help="A checkpoint of the model in training; repeat, in order.")
    ] = None,
    stability: Annotated[bool, typer.Option(help="Judge again at half and at twice the prompts.")] = False,
) -> None:
    """Run every measure that a claim of the papers needs, and table each claim: held, partly, or not, by how much.

    Takes minutes to hours. Finished parts are kept in --out, and a second run goes on from them.
    """
    cut, words, model = setup.cut, setup.words(), setup.pretrained()
    from tl_posgen.claims import judge_claims
    from tl_posgen.report.terminal import print_claims

    names = parse_names(papers) or []
    how = {"papers": names, "checkpoints": checkpoints or [], "stability": stability}
    found = judge_claims(model, words, keep=setup.out, **how, **cut)
    setup.present(found, print_claims)
