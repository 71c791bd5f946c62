"""The commands: each takes its measures of a model and shows what was found."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_posgen.cli.options import Setup, app, command, parse_indices, parse_names, parse_numbers

Layers = Annotated[str | None, typer.Option(help="Layers, such as 0,2-3; all if left out.")]
Heads = Annotated[str | None, typer.Option(help="Heads of those layers, such as 0,2-3; all if left out.")]
Tokenizer = Annotated[str | None, typer.Option(help="mini or a tokenizer directory, if checkpoints have none.")]

LOADING = ("backend", "dtype", "device", "revision")
PAGE = ("out", "force", "full")
READING = tuple(field.name for field in fields(Setup) if field.name not in PAGE)

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
    where = {"layers": parse_indices(layers, "--layers"), "heads": parse_indices(heads, "--heads")}
    names, cut = parse_names(measures), setup.cut
    words, model = setup.words(), setup.pretrained()
    from tl_posgen.analysis import analyze as run
    from tl_posgen.report.terminal import print_report

    with setup.parts() as parts:
        found = run(model, words, measures=names, streaming=streaming, keep=parts, **where, **cut)
    setup.present(found, print_report, parts=parts)


@app.command()
def measures() -> None:
    """List every measure that analyze can be asked for, those of other packages too."""
    from tl_posgen.report.terminal import print_known_measures

    print_known_measures()


@command(without=("text", "dataset", "length", "prompts", "seed", "null_seeds", "no_null", *PAGE))
def check(setup: Setup) -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.layer_table import check as run

    run(setup.pretrained().load())


@command(prompts=16)
def substitute(
    setup: Setup,
    search: Annotated[bool, typer.Option(help="Also search a split on other prompts of the text (minutes).")] = False,
    search_prompts: Annotated[int, typer.Option(help="How many other prompts.", min=1)] = 64,
    search_steps: Annotated[int, typer.Option(help="Steps of gradient descent.", min=1)] = 60,
    gamma: Annotated[float, typer.Option(help="Replace only scores below this quantile.")] = 1.0,
    threshold: Annotated[str, typer.Option(help="The quantile of each head, or of head 0's last row: layer.")] = "head",
    from_layer: Annotated[int, typer.Option(help="Replace from this layer on.", min=0)] = 0,
) -> None:
    """Replace the scores by position + content and measure the loss: does the model run on the split?"""
    from tl_posgen.position import Substitution

    searched = {"search": search, "search_prompts": search_prompts, "search_steps": search_steps, "head_costs": search}
    replaced: dict[str, Any] = {"gamma": gamma, "threshold": threshold, "from_layer": from_layer}
    setup.measure(Substitution(**searched, **replaced))


@command()
def distance(
    setup: Setup,
    distances: Annotated[
        str | None,
        typer.Option(help="Every pair at each of these. Default: 0 and powers of two below the training length."),
    ] = None,
    limits: Annotated[
        str, typer.Option(help="Distances above each of these seen as the limit.")
    ] = "1,2,4,8,16,32,64,128",
) -> None:
    """Put every pair at a distance of your choosing: what stays of the scores, and of the loss?"""
    from tl_posgen.position import DummyDistance

    given = None if distances is None else parse_numbers(distances, "--distances")
    setup.measure(DummyDistance(distances=given, limits=parse_numbers(limits, "--limits")))


@command()
def perturb(
    setup: Setup,
    ratios: Annotated[str, typer.Option(help="Shares of tokens to move, in [0, 1].")] = "0,0.01,0.02,0.05,0.1,0.2,0.5",
    n_cloze: Annotated[int, typer.Option(help="Cloze items made from the text; 0 for none.", min=0)] = 40,
) -> None:
    """Move tokens, positions or features: loss and cloze accuracy. How much order does the model need?"""
    from tl_posgen.position import Perturbation

    setup.measure(Perturbation(ratios=parse_numbers(ratios, "--ratios"), n_cloze=n_cloze))


@command(without=("length",))
def length(
    setup: Setup,
    inside: Annotated[int | None, typer.Option(help="The training length; the model's own if left out.")] = None,
    times: Annotated[int, typer.Option(help="How many times the training length to run.", min=1)] = 4,
) -> None:
    """Run beyond the training length: do attention outputs stay in their distribution, and at what loss?"""
    from tl_posgen.position import LengthExtrapolation

    backend = "bridge" if setup.backend == "auto" else None
    setup.measure(LengthExtrapolation(inside=inside, times=times), backend=backend, length=None)


@command()
def planes(setup: Setup) -> None:
    """Magnitude and phase of queries and keys in RoPE's planes: could the model entangle, and did training?"""
    setup.measure("planes", "plane_sufficiency", "plane_interaction", "any_distance")


@command()
def perturb_planes(
    setup: Setup,
    strengths: Annotated[str, typer.Option(help="Strengths of the edits, in (0, 1].")] = "0.1,0.3,1",
    map_by: Annotated[str, typer.Option(help="The map by planes or bands; auto: planes up to 96 of them.")] = "auto",
    no_map: Annotated[bool, typer.Option("--no-map", help="No map of single planes.")] = False,
) -> None:
    """Shuffle magnitudes, phases or positions in RoPE's planes: what does it cost, all at once and plane by plane?"""
    from tl_posgen.position import PlanePerturbation

    chosen: dict[str, Any] = {"map_by": map_by} | ({"map_edits": ()} if no_map else {})
    setup.measure(PlanePerturbation(strengths=parse_numbers(strengths, "--strengths"), **chosen))


@command(prompts=8)
def profiles(
    setup: Setup,
    costs: Annotated[
        bool | None,
        typer.Option(
            help="What each head alone costs, three runs a head; if left out, of up to 96 heads.", show_default=False
        ),
    ] = None,
    cost_prompts: Annotated[int, typer.Option(help="On how many of the prompts.", min=1)] = 2,
) -> None:
    """One row a head over all subjects: rank, interaction, slash, induction, costs. What goes together?"""
    from tl_posgen.joining import Profiles

    setup.measure(Profiles(costs=costs, cost_prompts=cost_prompts))


@command(prompts=8)
def cut_keys(
    setup: Setup,
    shares: Annotated[str, typer.Option(help="Shares of the rest that are kept, in [0, 1].")] = "0,0.25,0.5,0.75,1",
    controls: Annotated[int, typer.Option(help="Random directions beside the mean one.", min=1)] = 3,
) -> None:
    """Cut keys towards rank one in the running model: what becomes of interaction, slash and loss?"""
    from tl_posgen.joining import KeyCut

    setup.measure(KeyCut(shares=parse_numbers(shares, "--shares"), controls=controls))


@command(length=512)
def slash(
    setup: Setup,
    kappa: Annotated[float, typer.Option(help="Slash score that makes a head slash-dominant.")] = 0.1,
    distances: Annotated[str, typer.Option(help="Distances to look at: 0 itself, 1 the previous token.")] = "0-4",
) -> None:
    """Heads that attend a fixed distance back: which, on random tokens too, and why."""
    chosen = {"kappa": kappa, "distances": tuple(parse_indices(distances, "--distances") or ())}
    from tl_posgen import slash as of

    options = (of.Slash, of.SlashPlanes, of.Cone, of.SlashTransfer, of.BandAblation)
    setup.measure(*(one(**chosen) for one in options), lead=of.slash_heads)


@command(without=("model", "text", "dataset", "length", "prompts", *LOADING, "null_seeds", "no_null"))
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


@command(length=64)
def coupling(
    setup: Setup,
    k: Annotated[str, typer.Option(help="Numbers of top singular vectors, such as 10,30.")] = "10",
    tokens: Annotated[str, typer.Option(help="last, or positions such as 20,40,60.")] = "last",
    between_tokens: Annotated[bool, typer.Option("--between-tokens", help="Also between tokens of a layer.")] = False,
) -> None:
    """Coupling of residual Jacobians across layers, linearity and growth of the residual stream."""
    chosen = None if tokens == "last" else parse_indices(tokens, "--tokens") or []
    ks = parse_indices(k, "--k") or []
    from tl_posgen.coupling import Coupling, TokenCoupling

    layers = Coupling(k=ks, tokens="last" if chosen is None else chosen)
    setup.measure(*([layers, TokenCoupling(k=ks, tokens=chosen)] if between_tokens else [layers]))


@command(without=("model", "revision"), length=64)
def coupling_scores(
    setup: Setup,
    scores: Annotated[Path, typer.Argument(help="CSV with columns model, score [, d_model, parameters].")],
    score: Annotated[str, typer.Option(help="The column of scores.")] = "score",
    tokenizer: Tokenizer = None,
    k: Annotated[int, typer.Option(help="Number of top singular vectors.", min=1)] = 10,
) -> None:
    """Does coupling go with a score over many models, and is anything left given their size?"""
    cut, words = setup.cut, setup.words()
    from tl_posgen.coupling import coupling_scores as run

    with setup.parts() as parts:
        found = run(scores, words, score=score, tokenizer=tokenizer, k=k, keep=parts, **setup.place, **cut)
    setup.present(found, parts=parts)


@command(without=("model", "revision"))
def emerge(
    setup: Setup,
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoint directories or Hub revisions, in order.")],
    model: Annotated[str | None, typer.Option(help="Hub name, where the checkpoints are its revisions.")] = None,
    tokenizer: Tokenizer = None,
    coupling: Annotated[bool, typer.Option("--coupling", help="Also the coupling of residual Jacobians.")] = False,
) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?"""
    cut, words = setup.cut, setup.words()
    from tl_posgen.studies.emergence import MEASURES, emergence

    measures = (*MEASURES, "coupling") if coupling else MEASURES
    where = {"model": model, "tokenizer": tokenizer, **setup.place}
    with setup.parts() as parts:
        found = emergence(checkpoints, words, measures=measures, keep=parts, **where, **cut)
    setup.present(found, parts=parts)


@command(without=READING)
def compare(
    setup: Setup,
    first: Annotated[Path, typer.Argument(help="A report's directory, or its results.nc.")],
    second: Annotated[Path, typer.Argument(help="Another: of another model or text, or under an intervention.")],
) -> None:
    """What changes per head from one report to another; intervals are paired where the prompts are the same."""
    from tl_posgen.comparison import compare as run

    setup.prepare()
    setup.present(run(first, second))


@app.command()
def sweep(
    study: Annotated[Path, typer.Argument(help="TOML: models, revisions, texts, measures.")],
    out: Annotated[Path, typer.Option(help="Directory of the results, a file a job.")] = Path("runs"),
    executor: Annotated[str, typer.Option(help="local, processes or ray.")] = "local",
    workers: Annotated[int, typer.Option(help="How many processes.", min=1)] = 2,
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster; auto: the one running here; RAY_ADDRESS or a new one if left out."),
    ] = None,
    shard: Annotated[str, typer.Option(help="Which of how many parts, for any scheduler.")] = "1/1",
    retry: Annotated[bool, typer.Option("--retry", help="Also try again what failed.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print every table whole, not 40 lines at most.")] = False,
    plan: Annotated[bool, typer.Option("--list", help="List the jobs and what became of them; run nothing.")] = False,
) -> None:
    """Measure models x revisions x texts: a job a file; finished jobs are passed over, so a second run goes on.

    Exit code 1 where jobs failed or their worker was lost: --retry tries failed ones again.
    """
    from tl_posgen.report.terminal import print_measures
    from tl_posgen.studies.collect import report_study
    from tl_posgen.studies.run import states
    from tl_posgen.studies.run import sweep as run

    if plan:
        print(*(f"{state:10} {job}" for job, state in states(study, out).items()), sep="\n")
        return
    swept = run(study, out=out, executor=executor, workers=workers, address=address, shard=shard, retry=retry)
    if swept.is_whole:
        report = report_study(out)
        page = report.write(out / "report", force=True)
        print_measures(report, full=full)
        print(f"\nReport: {page}")
    print(f"{swept} in {out}")
    raise typer.Exit(int(bool(swept.failed or swept.unfinished)))


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
    cut, words, model = setup.cut, setup.words(), setup.pretrained()
    from tl_posgen.claims import judge_claims
    from tl_posgen.report.terminal import print_claims

    names = parse_names(papers) or []
    found = judge_claims(model, words, papers=names, checkpoints=checkpoints or [], keep=setup.out, **cut)
    setup.present(found, print_claims)
