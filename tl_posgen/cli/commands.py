"""Commands: those of measures, made from their dataclasses, and analyses of several, studies, reports side by side."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, RepeatArgumentError, UnusedCliTokensError
from cyclopts.validators import Number

from tl_posgen.cli.options import (
    Setup,
    argument_help,
    as_command,
    measure_options,
    option,
    parse_heads,
    parse_indices,
    parse_list,
)
from tl_posgen.errors import InputError, PosgenError

_LOADING = ("name", "backend", "dtype", "device", "revision", "tokenizer")
_NULLS = ("nulls", "null_device")
_PAGE = ("out", "force", "full")
_TEXT = ("text", "prompt", "dataset", "length", "prompts", "consecutive", "first")
_SHARED = tuple(setting.name for setting in fields(Setup))
WRITTEN: dict[str, Callable[..., Any]] = {}  # name -> command that is a function below


@dataclass(frozen=True)
class _MeasureCommand:
    """A command that runs measures: help in one line; their names, where an option that several have goes to each of
    them; defaults of the shared options, where they are not the usual ones; shared options that mean nothing here; and,
    as "module:function", that of the report which makes results show each other's numbers."""

    help: str
    measures: Sequence[str]
    setup: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    join: str = ""

    def __call__(self, *, setup: Setup, **options: Any) -> None:
        from tl_posgen.core.engine import analyze
        from tl_posgen.core.registry import find
        from tl_posgen.core.report import Report

        measures = []
        for kind in filter(None, map(find, self.measures)):
            names = {setting.name for setting in fields(kind)}
            measures.append(kind.with_options({name: value for name, value in options.items() if name in names}))

        def measured(model: Any, prompts: Any, **settings: Any) -> Report:
            report = analyze(model, prompts, measures=measures, skip_unsupported=True, **settings)
            first = [name for name in self.measures if name in report]  # then those that they come after
            joined = resolve_name(self.join)(report) if self.join else report
            return Report({name: joined[name] for name in (*first, *report)}, report.provenance)

        setup.measure(measured, setup.pretrained())


COMMANDS = {
    "substitute": _MeasureCommand("Does the model run on position + content alone?", ["substitution"]),
    "distance": _MeasureCommand("What stays of scores and loss with every pair at one distance?", ["dummy_distance"]),
    "perturb": _MeasureCommand("How much order of tokens, positions, features does it need?", ["perturbation"]),
    "length": _MeasureCommand(
        "Beyond the training length: what becomes of attention outputs, and of the loss?",
        ["length_extrapolation"],
        {"backend": "bridge", "length": None},
        without=("length",),
    ),
    "planes": _MeasureCommand("Magnitude and phase in RoPE's planes: can queries and keys entangle?", ["planes"]),
    "perturb-planes": _MeasureCommand("What do magnitudes and phases in RoPE's planes carry?", ["plane_perturbation"]),
    "frequencies": _MeasureCommand(
        "Which of RoPE's planes heads use, how far they turn, what each costs, and how far the model reads.",
        ["plane_use", "plane_cost", "gap", "recall", "plane_roles"],
        join="tl_posgen.frequencies.joined_figure:join_costs_and_gap",
    ),
    "profiles": _MeasureCommand("One row a head over all subjects: what kind of head is it?", ["profiles"]),
    "slash": _MeasureCommand(
        "Heads that attend a fixed distance back: which, on random tokens too, and why.",
        ["slash", "slash_planes", "slash_biases", "cone", "slash_transfer", "slash_ablation", "band_ablation"],
        {"length": 512},
    ),
    "coupling": _MeasureCommand("Coupling of residual Jacobians, linearity, growth.", ["coupling"], {"length": 64}),
}


def run(words: Sequence[str]) -> int:
    """Run the command that these words name; return its exit code.

    Raises:
        InputError: words that are no command, or that it does not take; an option given twice.
    """
    app, name = app_for(words), "".join(words[:1])
    if name and not name.startswith("-") and name not in app:
        from tl_posgen.core.registry import measurable, none_such

        measures = [measure.replace("_", "-") for measure in measurable()]
        raise InputError(none_such("command", name, list(dict.fromkeys([*WRITTEN, *COMMANDS, *measures]))))
    try:
        return app(words, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        if isinstance(error.__cause__, PosgenError):  # of a converter
            raise error.__cause__ from error
        reason = str(error)
        if isinstance(error, RepeatArgumentError):
            is_flag = error.token.implicit_value is True
            reason = f"{error.token.keyword} is given twice; give it once{'' if is_flag else ', a list as in 1,2'}"
        if isinstance(error, UnusedCliTokensError):
            reason = f"{' '.join(error.unused_tokens or ())}: no option takes this word; write several values as in 1,2"
        raise InputError(f"{reason} (tl-posgen {name} --help lists what there is)") from error


def app_for(words: Sequence[str] = ()) -> App:
    """Return the commands. That of a measure has its options only if it is the first word: measures import torch.

    Every measure is a command by its own name, too; the list of commands shows those of `COMMANDS`. A measure that one
    of these runs alone has its settings: "length" of "length-extrapolation".
    """
    app = App(
        name="tl-posgen",
        help="How does a language model's attention use position?\n\nEvery measure is a command too: rules, "
        "sources, variance and others; `tl-posgen measures` lists them.",
        version=f"tl-posgen {version('tl-posgen')}",
        help_format="plaintext",
        default_parameter=Parameter(allow_repeating=False),  # but of lists, which have an entry each time
    )
    command = "".join(words[:1])
    for name, function in WRITTEN.items():
        app.command(function, name=name)
    for name, chosen in COMMANDS.items():
        if name != command:
            app.command(App(name=name, help=chosen.help))
    if not command or command in app:
        return app
    from tl_posgen.core import registry

    measure = command.replace("-", "_")
    alone = [candidate for candidate in COMMANDS.values() if candidate.measures == [measure]]
    chosen = COMMANDS.get(command) or next(iter(alone), None)
    if chosen is None and measure in registry.names():
        kind = registry.find_or_none(measure)
        chosen = _MeasureCommand(kind.question, [measure]) if kind and (kind.is_fed or kind.runs_model) else None
    if chosen is not None:
        kinds = [kind for name in chosen.measures if (kind := registry.find(name)) is not None]
        options = measure_options(*kinds)
        defaults = {"prompts": max(kind.usual_prompts for kind in kinds), **chosen.setup}
        app.command(as_command(chosen, options, command, chosen.help, chosen.without, defaults), name=command)
    return app


def name_options(message: str, command: str) -> str:
    """Return a message of the library with the command's options in place of keywords.

    Example:
        >>> name_options("n_prompts = 0; load it with backend='bridge'", "coupling")
        "--prompts 0; load it with --backend 'bridge'"
    """
    app = app_for([command])
    if command.startswith("-") or command not in app:
        return message
    function: Any = app[command].default_command
    options = {name: name.replace("_", "-") for name in inspect.signature(function).parameters}
    options |= {"n_prompts": "prompts"} if "prompts" in options else {}
    names = "|".join(options)
    pattern = rf"(?<![\w.(-])({names}) ?= ?(True\b|(?=[\w\"'\[(-]))?|^({names})(?= [-\d\['])"
    edited = re.sub(pattern, lambda match: f"--{options[match[1] or match[3]]}{' ' if match[2] == '' else ''}", message)
    return edited.replace("another place", "another place by --out DIR") if "out" in options else edited


# Commands that are functions


def _command(*, without: Sequence[str] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a command: its keywords are options, and beside them, if it takes a `Setup`, the shared ones.

    Args:
        without: shared options that mean nothing here. defaults: of shared options.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name, help_of = function.__name__[1:].replace("_", "-"), argument_help(function)
        parameters = dict(inspect.signature(function).parameters)
        left_out = _SHARED if parameters.pop("setup", None) is None else without
        options = {
            key: option(key, parameter.annotation, parameter.default, help_of[key]).replace(kind=parameter.kind)
            for key, parameter in parameters.items()
        }
        WRITTEN[name] = as_command(function, options, name, inspect.getdoc(function) or "", left_out, defaults)
        return function

    return register


@_command(length=512)
def _analyze(
    *,
    setup: Setup,
    measures: str | None = None,
    layers: str | None = None,
    heads: str | None = None,
    streaming: bool | None = None,
) -> None:
    """Measure how attention uses position on a text: a table here, and a report in --out.

    Args:
        measures: Such as three_axis,planes; `tl-posgen measures` lists them.
        layers: Layers, such as 0,2-3; all if left out.
        heads: Heads, such as L3H1,L0H2; all if left out.
        streaming: Form no score matrix; if left out, for prompts over 1,024 tokens.
    """
    where = {"layers": parse_indices(layers, "--layers"), "heads": parse_heads(heads)}
    from tl_posgen.core.engine import analyze
    from tl_posgen.core.registry import requested
    from tl_posgen.report.terminal import print_report

    chosen = requested(measures and parse_list(measures, "--measures"))
    settings = {"measures": chosen, "streaming": streaming, **where}
    setup.measure(analyze, setup.pretrained(), show=print_report, **settings)


@_command()
def _measures(*, full: bool = False) -> None:
    """List every measure that analyze can be asked for, those of other packages too.

    Args:
        full: Also the source of each.
    """
    from tl_posgen.report.terminal import print_known_measures

    print_known_measures(full=full)


@_command(without=(*_TEXT, "seed", *_NULLS, *_PAGE))
def _check(*, setup: Setup) -> None:
    """Print what each layer of a model does with positions, proved against the model's own scores."""
    from tl_posgen.models.layer_table import check

    check(setup.pretrained().load())


@_command(without=("model", *_TEXT, *_LOADING, *_NULLS))
def _toy(
    *,
    setup: Setup,
    distance: int = 3,
    planes: str = "all",
    seeds: Annotated[int, Parameter(validator=Number(gte=1))] = 3,
    steps: int = 1500,
) -> None:
    """Train the shallow RoPE transformer that grows a slash-dominant head.

    Args:
        distance: How many positions later the label is shown.
        planes: all, high_medium, high, medium or low.
        seeds: How many seeds, from --seed on.
        steps: Training steps.
    """
    setup.prepare()
    from tl_posgen.slash import slash_toy

    setup.present(slash_toy(distance, planes, seeds=range(setup.seed, setup.seed + seeds), steps=steps))


@_command(without=("model", "name", "revision", "prompt", "null_device", "first"), length=64)
def _coupling_scores(scores: Path, /, *, setup: Setup, score: str = "score", k: int = 10) -> None:
    """Does coupling go with a score over many models, more than their sizes do, and is anything left given these?

    Args:
        scores: CSV with columns model, score [, d_model, n_layers, parameters].
        score: The column of scores.
        k: Number of top singular vectors.
    """
    from tl_posgen.coupling import coupling_scores

    setup.measure(coupling_scores, scores, score=score, k=k, **setup.place)


@_command(without=("model", "name", "revision", "prompt", "null_device"))
def _emerge(checkpoints: list[str], /, *, setup: Setup, model: str | None = None, coupling: bool = False) -> None:
    """Every measure over a sequence of training checkpoints: when does the split form?

    Args:
        checkpoints: Checkpoint directories or Hub revisions, in order.
        model: Hub name, where the checkpoints are its revisions.
        coupling: Also the coupling of residual Jacobians.
    """
    from tl_posgen.studies import emergence

    measures = (*emergence.MEASURES, *(["coupling"] if coupling else []))
    setup.measure(emergence.emergence, checkpoints, measures=measures, model=model, **setup.place)


@_command(without=("length", "prompts", "consecutive", "first", "seed", *_NULLS))
def _explain(
    *,
    prompt: str,
    head: str,
    setup: Setup,
    query: int = -1,
    key: int | None = None,
    against: int | None = None,
    other: str | None = None,
) -> None:
    """Why does a head attend from one token of a prompt to others? Terms, planes and sources of its scores.

    Args:
        prompt: The prompt that is explained; --text is the reference beside it.
        head: One head, such as L3H1 or 3.1.
        query: The token that attends; -1 is the last.
        key: The key whose sources and planes are shown; that of most attention if left out.
        against: The key whose score is taken away; the mean of the other keys if left out.
        other: Another prompt of as many tokens: what makes the difference to it?
    """
    from tl_posgen.models.selection import parse_head
    from tl_posgen.prompt import explain

    layer, index = parse_head(head)
    text, model = setup.words(), setup.pretrained()
    reference = None if setup.text is None and setup.dataset is None else text
    setup.present(explain(model, prompt, layer, index, query, against, key=key, other=other, reference=reference))


@_command(without=tuple(name for name in _SHARED if name not in _PAGE))
def _compare(first: Path, second: Path, /, *, setup: Setup) -> None:
    """Show what changes per head from one report to another; intervals are paired where the prompts are the same.

    Args:
        first: A report's directory, or its results.nc.
        second: Another: of another model or text, or under an intervention.
    """
    from tl_posgen.comparison import compare

    setup.prepare()
    setup.present(compare(first, second))


@_command()
def _sweep(
    study: Path,
    /,
    *,
    out: Path = Path("runs"),
    workers: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    ray: str | None = None,
    full: bool = False,
    list: bool = False,
) -> int:
    """Measure models x revisions x texts: a job a file; finished jobs are passed over, so a second run goes on.

    Exit code 1 where jobs failed; a second run tries them again.

    Args:
        study: TOML: models, revisions, texts, measures.
        out: Directory of the results, a file a job.
        workers: How many processes.
        ray: Address of a Ray cluster; auto: the one running here; local: a new one.
        full: Print all, not three sentences and one table.
        list: List the jobs and what became of them; run nothing.
    """
    from tl_posgen.report.terminal import print_measures
    from tl_posgen.studies import overview, sweep

    jobs = sweep.states(study, out) if list else sweep.sweep(study, out=out, workers=workers, ray=ray)
    if list:
        print(*(f"{job:{max(map(len, jobs))}}  {state}" for job, state in jobs.items()), sep="\n")
        return 0
    finished = sum(state == "finished" for state in jobs.values())
    if finished:
        report = overview.report_study(out)
        page = report.write(out / "report", force=True)
        print_measures(report, full=full)
        print(f"\nReport: {page}")
    print(f"{finished} finished, {len(jobs) - finished} failed in {out}")
    return int(finished < len(jobs))


@_command(without=("prompt", "null_device"))
def _claims(
    *, setup: Setup, papers: str = "position,slash,coupling,frequency", checkpoints: list[str] | None = None
) -> None:
    """Run every measure that a claim of the papers needs, and table each claim: held, partly, or not, by how much.

    Takes minutes to hours. Finished parts are kept in --out, and a second run goes on from them.

    Args:
        papers: Any of position, slash, coupling, frequency, or single claims, such as "frequency 6,frequency 13".
        checkpoints: A checkpoint of the model in training; repeat, in order.
    """
    from tl_posgen.claims import judge_claims
    from tl_posgen.report.terminal import print_claims

    settings = {"papers": parse_list(papers, "--papers"), "checkpoints": checkpoints or []}
    setup.measure(judge_claims, setup.pretrained(), show=print_claims, keep=setup.out, **settings)
