"""Commands made from measures: a field of the dataclass is an option, the docstring is its help."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from tl_posgen.cli.options import Setup, as_command, parse_indices, parse_names, parse_numbers
from tl_posgen.errors import InputError


@dataclass(frozen=True)
class MeasureCommand:
    """A command that runs measures.

    Attributes:
        help: one line.
        measures: names; an option that several have goes to each of them.
        setup: defaults of the shared options, where they are not the usual ones.
        options: defaults of the measures' options, where a command line wants others than the library.
        backend: that is used where none is chosen.
        without: shared options that mean nothing here.
        with_flag: flag -> (measure that it adds, help).
        lead: function of the report that makes the first table, as "module:function".
    """

    help: str
    measures: Sequence[str]
    setup: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    without: tuple[str, ...] = ()
    with_flag: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lead: str = ""


COMMANDS = {
    "substitute": MeasureCommand(
        "Replace the scores by position + content and measure the loss: does the model run on the split?",
        ["substitution"],
    ),
    "distance": MeasureCommand(
        "Put every pair at a distance of your choosing: what stays of the scores, and of the loss?", ["dummy_distance"]
    ),
    "perturb": MeasureCommand(
        "Move tokens, positions or features: loss and cloze accuracy. How much order does the model need?",
        ["perturbation"],
    ),
    "length": MeasureCommand(
        "Run beyond the training length: do attention outputs stay in their distribution, and at what loss?",
        ["length_extrapolation"],
        backend="bridge",
        without=("length",),
    ),
    "planes": MeasureCommand(
        "Magnitude and phase of queries and keys in RoPE's planes: could the model entangle, and did training?",
        ["planes", "plane_sufficiency"],
    ),
    "perturb-planes": MeasureCommand(
        "Shuffle magnitudes, phases or positions in RoPE's planes: what does it cost, all at once and plane by plane?",
        ["plane_perturbation"],
    ),
    "profiles": MeasureCommand(
        "One row a head over all subjects: rank, interaction, slash, induction, costs. What goes together?",
        ["profiles"],
    ),
    "cut-keys": MeasureCommand(
        "Cut keys towards rank one in the running model: what becomes of interaction, slash and loss?",
        ["key_cut"],
    ),
    "slash": MeasureCommand(
        "Heads that attend a fixed distance back: which, on random tokens too, and why.",
        ["slash", "slash_planes", "cone", "slash_transfer", "band_ablation"],
        {"length": 512},
        lead="tl_posgen.slash.slash_heads:slash_heads",
    ),
    "coupling": MeasureCommand(
        "Coupling of residual Jacobians across layers, linearity and growth of the residual stream.",
        ["coupling"],
        {"length": 64},
        with_flag={"between_tokens": ("token_coupling", "Also between tokens of a layer.")},
    ),
}


class Commands(TyperGroup):
    """Commands written as functions, and those of measures, which are built when they are called.

    Every measure is a command by its own name, too; the list of commands shows those of `COMMANDS`. Contexts are those
    of click, or of the copy of it that newer releases of Typer hold.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].help)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name = args[0] if args else ""
        if (chosen := COMMANDS.get(name) or command_of_measure(name)) is not None:
            return name, built(name, chosen), args[1:]
        known = self.list_commands(ctx)
        if name and name not in known:
            from tl_posgen.core.registry import measurable, none_such

            measures = [one.replace("_", "-") for one in measurable()]
            ctx.fail(none_such("command", name, list(dict.fromkeys([*known, *measures]))))
        return super().resolve_command(ctx, args)


def command_of_measure(name: str) -> MeasureCommand | None:
    """Return the command of a measure by its own name, "three-axis"; None where there is no such measure.

    That of `COMMANDS` which runs it alone, with its settings, where there is one: "length" of "length-extrapolation".
    """
    from tl_posgen.core import registry

    known = name.replace("-", "_")
    for command in COMMANDS.values():
        if command.measures == [known]:
            return command
    if known not in registry.names():
        return None
    kind = registry.find_or_none(known)
    if kind is None or not (kind.is_fed or kind.runs_model):
        return None
    return MeasureCommand(kind.question, [known])


def built(name: str, chosen: MeasureCommand) -> Any:
    """Return a command with the shared options and those of its measures."""
    from tl_posgen.core.registry import find

    every = [*chosen.measures, *(measure for measure, _ in chosen.with_flag.values())]
    kinds = {measure: kind for measure in every if (kind := find(measure)) is not None}
    parameters: dict[str, inspect.Parameter] = {}
    for kind in kinds.values():  # where two measures have an option, the default of the first is shown
        parameters = {one.name: one for one in option_parameters(kind, chosen.options)} | parameters
    flags = [flag_parameter(flag, text) for flag, (_, text) in chosen.with_flag.items()]

    def run(setup: Setup, **options: Any) -> None:
        added = [measure for flag, (measure, _) in chosen.with_flag.items() if options[flag]]
        given = {**chosen.options, **{name: value for name, value in options.items() if value is not None}}
        measures = [with_options(kinds[one], given) for one in [*chosen.measures, *added]]
        more: dict[str, Any] = {"length": None} if "length" in chosen.without else {}
        backend = chosen.backend if setup.backend == "auto" else None
        lead = resolve_name(chosen.lead) if chosen.lead else None
        setup.measure(*measures, backend=backend, lead=lead, **more)

    run.__name__, run.__doc__ = name.replace("-", "_"), chosen.help
    own = [*parameters.values(), *flags]
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter("setup", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Setup), *own]
    )
    run.__annotations__ = {one.name: one.annotation for one in own}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    prompts = max(kind.usual_prompts for kind in kinds.values())
    app.command(name)(as_command(run, without=chosen.without, **{"prompts": prompts, **chosen.setup}))
    return typer.main.get_command(app)


def flag_parameter(name: str, text: str) -> inspect.Parameter:
    """Return a flag of a command."""
    annotation = Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


# Options from fields


def option_parameters(kind: Any, defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return a parameter for each field of a measure that a command line can give; None where it does not."""
    from tl_posgen.core.options import annotations_of

    words, annotations = argument_help(kind), annotations_of(kind)
    found = []
    for one in fields(kind):
        if not is_writable(annotations[one.name]):
            continue
        default = defaults.get(one.name, one.default)
        is_flag = bool in alternatives(annotations[one.name])
        option = typer.Option(help=with_default(words.get(one.name, ""), default))
        annotation = Annotated[bool | None if is_flag else str | None, option]
        found.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


def with_default(words: str, default: Any) -> str:
    """Return the help of an option with its default.

    Example:
        >>> with_default("positions of the tokens.", (20, 40))
        'Positions of the tokens; 20,40 if left out.'
    """
    words = words[:1].upper() + words[1:]
    if default is None or default == ():
        return words
    default = {True: "on", False: "off"}[default] if isinstance(default, bool) else as_words(default)
    return f"{words.rstrip('.')}; {default} if left out."


def with_options(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return a measure with the words of a command line as its options."""
    from tl_posgen.core.options import annotations_of

    options = {}
    for name, annotation in annotations_of(kind).items():
        value = given.get(name)
        if isinstance(value, str):
            value = value_of(value, annotation, f"--{name.replace('_', '-')}")
        if name in given:
            options[name] = value
    return kind.with_options(options)


def plain(annotation: Any) -> Any:
    """Return an annotation without its constraints."""
    return plain(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union; of another annotation itself alone."""
    annotation = plain(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in alternatives(part)]
    return [annotation]


def is_writable(annotation: Any) -> bool:
    """Return whether words of a command line can give an option."""
    return not any(
        isinstance(get_origin(one), type) and issubclass(get_origin(one), Mapping) for one in alternatives(annotation)
    )


def value_of(words: str, annotation: Any, option: str) -> Any:
    """Return the words of an option as its annotation has them: numbers, names, lists of them.

    Example:
        >>> value_of("0,2-4", Sequence[int], "--layers"), value_of("last", Literal["last"] | Sequence[int], "--tokens")
        ([0, 2, 3, 4], 'last')
    """
    kinds = alternatives(annotation)
    for kind in kinds:
        if get_origin(kind) is Literal and words in map(str, get_args(kind)):
            return words
    for kind in kinds:
        if get_origin(kind) not in (None, Literal):
            return list_of(words, get_args(kind)[0], option)
    if int in kinds or float in kinds:
        number = parse_numbers(words, option)
        if len(number) != 1:
            raise InputError(f"{option} {words!r}: give one number")
        is_whole = number[0] == int(number[0]) if abs(number[0]) < sys.maxsize else False
        return int(number[0]) if is_whole else number[0]
    return words


def list_of(words: str, annotation: Any, option: str) -> list[Any]:
    """Return a list of numbers or names."""
    if not words.strip():
        return []
    kinds = alternatives(annotation)
    if kinds == [int]:
        return parse_indices(words, option) or []
    if int in kinds or float in kinds:
        return [int(one) if float(one).is_integer() else one for one in parse_numbers(words, option)]
    return parse_names(words) or []


def as_words(value: Any) -> str:
    """Return a default as a command line would give it.

    Example:
        >>> as_words((0, 0.05, 0.5)), as_words("head"), as_words(16)
        ('0,0.05,0.5', 'head', '16')
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ",".join(as_words(one) for one in value)


def argument_help(kind: Any) -> dict[str, str]:
    """Return the sentence of the docstring on each option."""
    block = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", inspect.cleandoc(kind.__doc__ or ""), re.M | re.S)
    if block is None:
        return {}
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", block[1]):
        names, _, words = entry.strip().partition(": ")
        found |= {name.strip(): re.sub(r"\s+", " ", words) for name in names.split(",")}
    return found
