"""The options that every command shares, declared once."""

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tl_posgen.errors import InputError, OutputError

app = typer.Typer(
    help="How does a language model's attention use position?",
    epilog="Every measure is a command too: rules, what-if-rope, sources, variance and others; `tl-posgen measures` "
    "lists them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options that commands share: model, text, random inits, output."""

    model: Annotated[
        str, typer.Option(help="mini (bundled), a Hub name, a Hugging Face directory, or a GGUF file.")
    ] = "mini"
    text: Annotated[
        str | None, typer.Option(help="A text file, or a directory of them; the bundled book if left out.")
    ] = None
    prompt: Annotated[str | None, typer.Option(help="Instead, one prompt itself, whole.")] = None
    dataset: Annotated[
        str | None, typer.Option(help="Instead, a name or path that `datasets` reads; name:config for one of several.")
    ] = None
    length: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 256
    prompts: Annotated[int, typer.Option(help="Number of prompts, spread over the text.", min=1)] = 4
    consecutive: Annotated[
        bool, typer.Option("--consecutive", help="Take the prompts one after the other from the text's beginning.")
    ] = False
    backend: Annotated[str, typer.Option(help="auto, hooked (HookedTransformer) or bridge (TransformerBridge).")] = (
        "auto"
    )
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16 or float64.")] = "auto"
    device: Annotated[str, typer.Option(help="auto (cuda where there is one), cpu, cuda, cuda:1 or mps.")] = "auto"
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="A directory with another tokenizer, or mini; for a model that has none.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of random draws.", min=0)] = 0
    null_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the randomly initialised models, such as 0-2; 0 if left out.")
    ] = None
    shuffled_seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of models of shuffled weights, or none; 0, for what one pass gives, if left out."),
    ] = None
    no_null: Annotated[bool, typer.Option("--no-null", help="Skip the null models.")] = False
    out: Annotated[str, typer.Option(help="Directory for index.html, summary.json and results.nc.")] = "report"
    force: Annotated[bool, typer.Option("--force", help="Replace another run's report in --out.")] = False
    full: Annotated[bool, typer.Option("--full", help="Print all, not three sentences and one table.")] = False

    def __post_init__(self) -> None:
        for option in ("model", "text", "dataset", "out"):
            if getattr(self, option) == "":
                raise InputError(f"--{option} '': empty; give a {'name or ' if option == 'model' else ''}path")
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("--prompt '': empty; give the text itself")
        given = [f"--{one}" for one in ("text", "prompt", "dataset") if getattr(self, one) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} contradict each other; give one of them")
        for option, given_seeds in (("--null-seeds", self.null_seeds), ("--shuffled-seeds", self.shuffled_seeds)):
            if self.no_null and given_seeds is not None:
                raise InputError(f"--no-null and {option} contradict each other; give one of them")

    @property
    def cut(self) -> dict[str, Any]:
        """Settings that every measure takes: how the text is cut, seeds, random inits."""
        written = "0" if self.null_seeds is None else self.null_seeds
        null_seeds = [] if self.no_null else parse_indices(written, "--null-seeds")
        cut: dict[str, Any] = {"length": self.length, "n_prompts": self.prompts, "consecutive": self.consecutive}
        if self.prompt is not None:
            cut = {"length": None, "n_prompts": None, "consecutive": False}
        cut |= {"seed": self.seed, "null_seeds": null_seeds}
        if self.shuffled_seeds is not None:
            none = self.shuffled_seeds == "none"
            cut["shuffled_seeds"] = [] if none else parse_indices(self.shuffled_seeds, "--shuffled-seeds")
        return cut

    @property
    def place(self) -> dict[str, Any]:
        """Settings of models that a command names otherwise."""
        return {"backend": self.backend, "dtype": self.dtype, "device": self.device}

    def words(self) -> Any:
        """Read the text, or take the prompt, and refuse an output that cannot be written."""
        from tl_posgen.studies.study import BUNDLED, Text

        if self.prompt is not None:
            self.prepare()
            return [self.prompt]  # of a list no entry is taken for the name of a file
        name, _, config = (self.dataset or "").partition(":")
        text = Text(dataset=name, config=config or None) if name else Text(self.text or BUNDLED)
        words = text.words
        self.prepare()
        return words

    def prepare(self) -> None:
        """Refuse an output that cannot be written."""
        from tl_posgen.core.files import require_free, require_writable

        require_free(self.out, self.force)
        require_writable(self.out)

    def pretrained(self, backend: str | None = None) -> Any:
        """Return the model, to be loaded by what measures it."""
        from tl_posgen.models.loading.load import Pretrained

        how = (backend or self.backend, self.dtype, self.device)
        return Pretrained(self.model, *how, revision=self.revision, tokenizer=self.tokenizer)

    def measure(
        self, *measures: Any, backend: str | None = None, lead: Callable[[Any], Any] | None = None, **more: Any
    ) -> None:
        """Measure the model on the text and present what was found, the table that `lead` makes of it first."""
        cut, words, model = self.cut | more, self.words(), self.pretrained(backend)
        from tl_posgen.core.engine import analyze
        from tl_posgen.core.registry import measure_from
        from tl_posgen.core.report import Report

        with self.parts() as parts:
            found = analyze(model, words, measures=list(measures), skip_unsupported=True, keep=parts, **cut)
        asked = [name for name in (measure_from(one).name for one in measures) if name in found]
        ordered = {name: found[name] for name in (*asked, *found)}  # what they come after stands behind them
        self.present(Report(ordered, found.provenance), parts=parts, lead=None if lead is None else lead(found))

    def parts(self) -> Any:
        """Return the place where finished parts are kept, so that a stopped command goes on from them."""
        from tl_posgen.core.store import Parts

        return Parts(Path(self.out) / "parts")

    def present(self, found: Any, show: Callable[..., None] | None = None, *, parts: Any = None, **more: Any) -> None:
        """Save a report or one result in `out`, then write its page, then print its tables by `show`.

        Results that cannot be written are still shown.

        Args:
            parts: finished parts that it was made of, of no more use when it is saved.
        """
        from tl_posgen.core.files import write_files
        from tl_posgen.core.report import Report
        from tl_posgen.report.terminal import print_measures

        report = found if isinstance(found, Report) else Report({found.name: found}, found.provenance)
        show = partial(show or print_measures, full=self.full, **more)
        try:
            write_files(self.out, {"results.nc": report.as_bytes()})
            if parts is not None:
                parts.discard()
            page = self.page(report)
        except OutputError:
            with suppress(Exception):  # what broke the page may break the tables
                show(report)
            raise
        show(report)
        print(f"\nReport: {page}")

    def page(self, report: Any) -> Path:
        """Write the page of a report whose results are saved."""
        from tl_posgen.core.files import write_files

        try:
            write_files(self.out, report.page_files())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise OutputError(
                f"no page could be made ({reason}); {Path(self.out, 'results.nc')} is measured"
            ) from error
        return Path(self.out) / "index.html"


def command(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function whose first parameter is a `Setup` a command: the setup's fields become options beside its own.

    Args:
        without: fields that mean nothing here. defaults: of this command, where they are not the setup's; --out is
            `report-<command>`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(function.__name__.replace("_", "-"))(as_command(function, without=without, **defaults))
        return function

    return register


def as_command(function: Callable[..., None], *, without: tuple[str, ...] = (), **defaults: Any) -> Callable[..., None]:
    """Return a function of options alone: the setup's fields and the function's own parameters."""
    hints = get_type_hints(Setup, include_extras=True)
    name = function.__name__.replace("_", "-")
    chosen = {field.name: field.default for field in fields(Setup)} | {"out": f"report-{name}"} | defaults
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in chosen.items()
        if name not in without
    ]
    own_hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared = [one for one in shared if one.name not in {other.name for other in own}]
    # arguments have no default and stand first on the command line
    arguments, own_options = ([p for p in own if (p.default is p.empty) == needed] for needed in (True, False))

    def run(ctx: Any, **options: Any) -> None:
        if options.get("prompt") is not None and function.__name__ != "explain":
            refuse_cut(ctx)
        setup = Setup(**{parameter.name: options.pop(parameter.name) for parameter in shared})
        function(setup, **options)

    ordered = (*arguments, *shared[:2], *own_options, *shared[2:])
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in ordered]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = inspect.Signature([context, *parameters])  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {"ctx": typer.Context} | {p.name: own_hints.get(p.name, p.annotation) for p in parameters}
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def refuse_cut(ctx: Any) -> None:
    """Refuse options that cut a text where one whole prompt is given."""
    for name in ("length", "prompts", "consecutive"):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name} cuts a text, and --prompt is taken whole; give one of them")


RENAMED = {"n_prompts": "prompts"}  # keywords of the library whose option has another name
VALUE = r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\([^)]*\)|[\w.-]+)"""


def option_names(command: str) -> list[str]:
    """Return the names of a command's options as the library's keywords have them."""
    from tl_posgen.cli.measure_commands import COMMANDS, built, command_of_measure

    if (chosen := COMMANDS.get(command) or command_of_measure(command)) is not None:
        return [str(one.name) for one in built(command, chosen).params]
    functions = [one.callback for one in app.registered_commands if one.name == command and one.callback is not None]
    return [name for function in functions for name in inspect.signature(function).parameters]


def name_options(message: str, command: str) -> str:
    """Return a message of the library with the command's options in place of keywords.

    Example:
        >>> name_options("no tokenizer there; give tokenizer=, the directory", "emerge")
        'no tokenizer there; give --tokenizer, the directory'
        >>> name_options("n_prompts = 0; load it with backend=\\"bridge\\"", "coupling")
        '--prompts 0; load it with --backend bridge'
        >>> name_options("gamma 2.0 is outside [0, 1]; from_layer leaves none", "substitute")
        '--gamma 2.0 is outside [0, 1]; --from-layer leaves none'
    """
    import tl_posgen.cli.commands  # noqa: F401  # pyright: ignore[reportUnusedImport]

    taken = option_names(command)
    options = {name: name for name in taken} | {name: own for name, own in RENAMED.items() if own in taken}
    for name, option in options.items():
        keyword = rf"(?<![\w.-])(?<!\w\(){name}(?: ?=(?: ?(?P<value>{VALUE}))?" + (r"|\b)" if "_" in name else ")")
        named = re.compile(rf"{keyword}|^{name}(?= [-\d\['])")  # else it is a word of prose
        message = named.sub(partial(as_option, f"--{option.replace('_', '-')}"), message)
    return message


def as_option(option: str, found: re.Match[str]) -> str:
    """Return the option with the value that a keyword was given, as a command line has it."""
    value = (found["value"] or "").strip("\"'[]()").replace(", ", ",")
    return option if value in ("", "True") else f"{option} {value}"


MOST_INDICES = 100_000


def parse_indices(words: str | None, option: str) -> list[int] | None:
    """'0,2-4' -> [0, 2, 3, 4], as written; whether one may stand twice, the library says."""
    if words is None:
        return None
    try:
        spans = [[int(end) for end in part.split("-")] for part in words.split(",")]
    except ValueError:
        spans = []
    if not spans or any(len(span) > 2 or span[0] > span[-1] for span in spans):
        raise InputError(f"{option} {words!r}: write indices and ranges such as 0,2-4")
    if sum(span[-1] - span[0] for span in spans) > MOST_INDICES:
        raise InputError(f"{option} {words!r}: more than {MOST_INDICES} indices; write a shorter range")
    return [index for span in spans for index in range(span[0], span[-1] + 1)]


def parse_heads(words: str | None) -> list[Any] | None:
    """Return heads as names, or as indices that are meant in every chosen layer.

    Example:
        >>> parse_heads("L3H1,0.2"), parse_heads("0,2-4")
        (['L3H1', '0.2'], [0, 2, 3, 4])
    """
    if words is None or not re.search(r"[.hH(]", words):
        return parse_indices(words, "--heads")
    return [name.strip() for name in re.findall(r"\([^)]*\)|[^,]+", words)]


def parse_numbers(words: str, option: str) -> list[float]:
    """'0,0.05,0.5' -> [0.0, 0.05, 0.5]."""
    try:
        return [float(word) for word in words.split(",")]
    except ValueError:
        raise InputError(f"{option} {words!r}: write numbers such as 0,0.05,0.5") from None


def parse_names(words: str | None) -> list[str] | None:
    """'planes, residual' -> ['planes', 'residual']."""
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]
