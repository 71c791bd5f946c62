"""The options that commands share, and how words of a command line are read."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Parameter
from cyclopts.validators import Number

from tl_posgen.errors import InputError, OutputError

_MOST_INDICES = 100_000
_GROUP = "Model, text, output"  # heading of the shared options


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options that commands share: model, text, null models, output.

    Args:
        model: mini (bundled), a Hub name, a Hugging Face directory, or a GGUF file.
        text: A text file, or a directory of them; the bundled book if left out.
        prompt: Instead, one prompt itself, whole.
        dataset: Instead, a name or path that `datasets` reads; name:config for one of several.
        length: Tokens per prompt.
        prompts: Number of prompts, spread over the text.
        consecutive: Take the prompts one after the other from the text's beginning.
        backend: auto, hooked (HookedTransformer) or bridge (TransformerBridge).
        dtype: auto (the checkpoint's), float32, bfloat16, float16 or float64.
        device: auto (cuda where there is one), cpu, cuda, cuda:1 or mps.
        revision: Branch, tag or commit on the Hub.
        tokenizer: A directory with another tokenizer, or mini; for a model that has none.
        seed: Seed of random draws.
        null_seeds: Seeds of the randomly initialised models, such as 0-2; 0 if left out.
        shuffled_seeds: Seeds of models of shuffled weights, or none; 0, for what one pass gives, if left out.
        null_device: Draw random inits on cpu or cuda.
        no_null: Skip the null models.
        out: Directory for index.html, summary.json and results.nc.
        force: Replace another run's report in --out.
        full: Print all, not three sentences and one table.
    """

    model: str = "mini"
    text: str | None = None
    prompt: str | None = None
    dataset: str | None = None
    length: Annotated[int | None, Parameter(validator=Number(gte=2))] = 256
    prompts: Annotated[int, Parameter(validator=Number(gte=1))] = 4
    consecutive: bool = False
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    null_seeds: str | None = None
    shuffled_seeds: str | None = None
    null_device: str = "cpu"
    no_null: bool = False
    out: str = "report"
    force: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        for option in ("model", "text", "dataset", "out"):
            if getattr(self, option) == "":
                raise InputError(f"--{option} '': empty; give a {'name or ' if option == 'model' else ''}path")
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("--prompt '': empty; give the text itself")
        given = [f"--{one}" for one in ("text", "prompt", "dataset") if getattr(self, one) is not None]
        nulls = {"--null-seeds": self.null_seeds, "--shuffled-seeds": self.shuffled_seeds}
        seeds = [f"--no-null and {option}" for option, written in nulls.items() if self.no_null and written is not None]
        for contradiction in ([" and ".join(given)] if len(given) > 1 else []) + seeds:
            raise InputError(f"{contradiction} contradict each other; give one of them")

    @property
    def cut(self) -> dict[str, Any]:
        """Settings that every measure takes: how the text is cut, seeds of draws and of null models."""
        cut: dict[str, Any] = {"length": self.length, "n_prompts": self.prompts, "consecutive": self.consecutive}
        if self.prompt is not None:
            cut = {"length": None, "n_prompts": None, "consecutive": False}
        seeds = {
            "null_seeds": "none" if self.no_null else self.null_seeds or "0",
            "shuffled_seeds": self.shuffled_seeds,
        }
        for name, written in seeds.items():
            if written is not None:
                option = f"--{name.replace('_', '-')}"
                cut[name] = [] if written == "none" else parse_indices(written, option)
        if self.null_device != "cpu":
            cut["null_device"] = self.null_device
        return cut | {"seed": self.seed}

    @property
    def place(self) -> dict[str, Any]:
        """Settings of models that a command names otherwise."""
        return {"backend": self.backend, "dtype": self.dtype, "device": self.device, "tokenizer": self.tokenizer}

    def words(self) -> Any:
        """Read the text, or take the prompt, and refuse an output that cannot be written."""
        from tl_posgen.studies.study import BUNDLED, Text

        name, _, config = (self.dataset or "").partition(":")
        if self.prompt is not None:
            words = [self.prompt]  # of a list no entry is taken for the name of a file
        else:
            words = (Text(dataset=name, config=config or None) if name else Text(self.text or BUNDLED)).words
        self.prepare()
        return words

    def prepare(self) -> None:
        """Refuse an output that cannot be written."""
        from tl_posgen.core.files import require_free, require_writable

        require_free(self.out, self.force)
        require_writable(self.out)

    def pretrained(self) -> Any:
        """Return the model, to be loaded by what measures it."""
        from tl_posgen.models.loading.load import Pretrained

        return Pretrained(self.model, revision=self.revision, **self.place)

    def measure(
        self,
        function: Callable[..., Any],
        subject: Any,
        *,
        show: Callable[..., None] | None = None,
        lead: Any = None,
        keep: Any = None,
        **how: Any,
    ) -> None:
        """Present what a function of the library finds of a subject and the text.

        Args:
            show, lead: how its tables are printed, and the function of the report that makes the first.
            keep: where finished parts are kept; if left out, in `out` until it is saved.
        """
        from tl_posgen.core.store import Parts

        cut, words = self.cut, self.words()
        with Parts(Path(self.out) / "parts") as parts:
            found = function(subject, words, keep=keep or parts, **how, **cut)
        self.present(found, show, parts=None if keep else parts, **({"lead": lead(found)} if lead else {}))

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
            try:
                write_files(self.out, report.page_files())
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                saved = Path(self.out, "results.nc")
                raise OutputError(f"no page could be made ({why}); {saved} is measured") from error
        except OutputError:
            with suppress(Exception):  # what broke the page may break the tables
                show(report)
            raise
        show(report)
        print(f"\nReport: {Path(self.out) / 'index.html'}")


def as_command(
    function: Callable[..., Any],
    own: Mapping[str, inspect.Parameter],
    name: str,
    words: str,
    without: Sequence[str],
    defaults: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return a function that takes the fields of a `Setup` beside its own options, as a command line gives them.

    Args:
        function: called with own options that were given, and a `Setup` as `setup`.
        own: its parameters.
        words: its description.
        without: fields that mean nothing here.
        defaults: where they are not the setup's.
    """
    usual = {"out": f"report-{name}", **defaults}
    help_of, hints = argument_help(Setup), inspect.get_annotations(Setup)
    shared = {
        one.name: option(one.name, hints[one.name], usual.get(one.name, one.default), help_of[one.name], group=_GROUP)
        for one in fields(Setup)
        if one.name not in {*without, *own}
    }

    def run(*arguments: Any, **given: Any) -> Any:
        cuts = [f"--{one}" for one in ("length", "prompts", "consecutive") if one in given]
        if cuts and given.get("prompt") is not None and "prompt" in shared:
            raise InputError(f"{cuts[0]} cuts a text, and --prompt is taken whole; give one of them")
        if shared:
            given["setup"] = Setup(**usual | {one: given.pop(one) for one in shared if one in given})
        return function(*arguments, **given)

    signature = inspect.Signature([*own.values(), *shared.values()])
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    run.__doc__ = words.partition("\n\nArgs:")[0]
    return run


def option(
    name: str, annotation: Any, default: Any, words: str, *, of_measure: bool = False, **more: Any
) -> inspect.Parameter:
    """Return an option with its help; lists are written with commas, and a flag of a measure can be switched off."""
    shown = False if default is None or default == () or default is False else as_words
    kinds = _alternatives(annotation)
    if float in kinds:
        # of int | float cyclopts would read 0.5 as the whole number 0
        annotation = reduce(or_, [kind for kind in kinds if kind is not int])
    elif int in kinds and "converter" not in more:
        more["converter"] = _convert_whole
    can_be_off = bool in kinds and (default is not False or of_measure)
    more["negative"] = f"--no-{name.replace('_', '-')}" if can_be_off else ()
    annotation = Annotated[annotation, Parameter(help=words, show_default=shown, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def measure_options(kind: Any) -> dict[str, inspect.Parameter]:
    """Return the options of a measure that words can give: not mappings."""
    from tl_posgen.core.options import annotations_of

    words, found = argument_help(kind), {}
    for one in fields(kind):
        kinds, more = _alternatives(annotations_of(kind)[one.name]), {}
        if any(_is_a(kind, Mapping) for kind in kinds):
            continue
        if lists := [kind for kind in kinds if _is_a(kind, Sequence)]:
            more = {"converter": partial(_convert_list, kinds), "n_tokens": 1}
            kinds = [Sequence[reduce(or_, _alternatives(get_args(kind)[0]))] for kind in lists]
        told = words.get(one.name, "")
        told, annotation = told[:1].upper() + told[1:], reduce(or_, kinds)
        found[one.name] = option(one.name, annotation, one.default, told, of_measure=True, **more)
    return found


def argument_help(described: Any) -> dict[str, str]:
    """Return the sentence of a docstring on each argument."""
    block = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", inspect.getdoc(described) or "", re.M | re.S)
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", block[1]) if block else []:
        names, _, words = entry.strip().partition(": ")
        found |= {name.strip(): re.sub(r"\s+", " ", words) for name in names.split(",")}
    return found


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union without their constraints; of another annotation itself alone."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _alternatives(part)]
    return [annotation]


def _is_a(annotation: Any, kind: type) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, kind)


def _convert_whole(_: Any, tokens: Sequence[Any]) -> int:
    """Return the word of an option as a whole number, where cyclopts would round it."""
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        raise InputError(f"{token.keyword} {token.value!r}: give a whole number") from None


def _convert_list(kinds: Sequence[Any], _: Any, tokens: Sequence[Any]) -> Any:
    """Return the words of an option as its types have them: a list, or a name that may stand in its place."""
    words, name = tokens[-1].value, tokens[-1].keyword
    if any(get_origin(kind) is Literal and words in get_args(kind) for kind in kinds):
        return words
    if not words.strip():
        return []
    entries = _alternatives(next(get_args(kind)[0] for kind in kinds if _is_a(kind, Sequence)))
    if entries == [int]:
        return parse_indices(words, name)
    if float not in entries:
        return parse_names(words)
    try:
        numbers = [float(word) for word in words.split(",")]
    except ValueError:
        raise InputError(f"{name} {words!r}: write numbers such as 0,0.05,0.5") from None
    return [int(one) if abs(one) < sys.maxsize and one == int(one) else one for one in numbers]


def as_words(value: Any) -> str:
    """Return a default as a command line would give it: 0,0.05,0.5."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ",".join(as_words(one) for one in value)


def parse_indices(words: str | None, name: str) -> list[int] | None:
    """'0,2-4' -> [0, 2, 3, 4], as written; whether one may stand twice, the library says."""
    if words is None:
        return None
    try:
        spans = [[int(end) for end in part.split("-")] for part in words.split(",")]
    except ValueError:
        spans = []
    if down := [span for span in spans if len(span) == 2 and span[0] > span[1]]:
        raise InputError(f"{name} {words!r}: a range counts up; write {down[0][1]}-{down[0][0]}")
    if not spans or any(len(span) > 2 for span in spans):
        raise InputError(f"{name} {words!r}: write indices and ranges such as 0,2-4")
    if sum(span[-1] - span[0] for span in spans) > _MOST_INDICES:
        raise InputError(f"{name} {words!r}: more than {_MOST_INDICES} indices; write a shorter range")
    return [index for span in spans for index in range(span[0], span[-1] + 1)]


def parse_heads(words: str | None) -> list[Any] | None:
    """'L3H1,0.2' -> ['L3H1', '0.2'], heads by name; '0,2-4' -> [0, 2, 3, 4], indices in every chosen layer."""
    if words is None or not re.search(r"[.hH(]", words):
        return parse_indices(words, "--heads")
    return [name.strip() for name in re.findall(r"\([^)]*\)|[^,]+", words)]


def parse_names(words: str | None) -> list[str] | None:
    """'planes, residual' -> ['planes', 'residual']."""
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]
