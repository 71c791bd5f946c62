"""The options that commands share, and how words of a command line are read."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

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
        name: What titles and tables call the model; its name or file if left out.
        text: A text file, or a directory of them; the bundled book if left out.
        prompt: Instead, one prompt itself, whole.
        dataset: Instead, a name or path that `datasets` reads; name:config for one of several.
        length: Tokens per prompt.
        prompts: Number of prompts, spread over the text.
        consecutive: Take the prompts one after the other from the text's beginning.
        first: A token that every prompt begins with, such as '<|endoftext|>', or its id.
        backend: auto, hooked (HookedTransformer) or bridge (TransformerBridge).
        dtype: auto (the checkpoint's), float32, bfloat16, float16 or float64.
        device: auto (cuda where there is one), cpu, cuda, cuda:1 or mps.
        revision: Branch, tag or commit on the Hub.
        tokenizer: A directory with another tokenizer, or mini; for a model that has none.
        seed: Seed of random draws.
        nulls: How many random inits to measure beside the model, 0 for no null model. Or seeds by kind of null model:
            "random init: 0-2; shuffled: 0".
        null_device: Draw random inits on cpu or cuda.
        out: Directory for index.html, summary.json and results.nc.
        force: Replace another run's report in --out.
        full: Print all, not three sentences and one table.
    """

    model: str = "mini"
    name: str | None = None
    text: str | None = None
    prompt: str | None = None
    dataset: str | None = None
    length: Annotated[int | None, Parameter(validator=Number(gte=2))] = 256
    prompts: Annotated[int, Parameter(validator=Number(gte=1))] = 4
    consecutive: bool = False
    first: str | None = None
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    nulls: str = "1"
    null_device: str = "cpu"
    out: str = "report"
    force: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        for option in ("model", "text", "dataset", "out"):
            if getattr(self, option) == "":
                raise InputError(f"--{option} '': empty; give a {'name or ' if option == 'model' else ''}path")
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("--prompt '': empty; give the text itself")
        texts = [f"--{option}" for option in ("text", "prompt", "dataset") if getattr(self, option) is not None]
        if len(texts) > 1:
            raise InputError(f"{' and '.join(texts)} contradict each other; give one of them")

    @property
    def cut(self) -> dict[str, Any]:
        """Settings that every measure takes: how the text is cut, seeds of draws, null models."""
        cut: dict[str, Any] = {"length": self.length, "n_prompts": self.prompts, "consecutive": self.consecutive}
        if self.prompt is not None:
            cut = {"length": None, "n_prompts": None, "consecutive": False}
        cut["nulls"] = _parse_nulls(self.nulls)
        if self.first is not None:
            cut["first"] = int(self.first) if self.first.isdecimal() else self.first
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
            text = [self.prompt]  # of a list no entry is taken for the name of a file
        else:
            text = (Text(dataset=name, config=config or None) if name else Text(self.text or BUNDLED)).words
        self.prepare()
        return text

    def prepare(self) -> None:
        """Refuse an output that cannot be written."""
        from tl_posgen.core.files import require_free, require_writable

        is_whole = os.path.lexists(Path(self.out, "index.html"))  # which a run that was stopped has not written
        require_free(self.out, self.force or not is_whole)
        require_writable(self.out)

    def pretrained(self) -> Any:
        """Return the model, to be loaded by what measures it."""
        from tl_posgen.models.loading.load import Pretrained

        return Pretrained(self.model, revision=self.revision, name=self.name, **self.place)

    def measure(
        self,
        function: Callable[..., Any],
        subject: Any,
        *,
        show: Callable[..., None] | None = None,
        keep: Any = None,
        **settings: Any,
    ) -> None:
        """Present what a function of the library finds of a subject and the text.

        Args:
            show: how its tables are printed.
            keep: where finished parts are kept; if left out, in `out` until it is saved.
        """
        from tl_posgen.core.store import Parts

        cut, text = self.cut, self.words()
        with Parts(Path(self.out) / "parts") as parts:
            result = function(subject, text, keep=keep or parts, **settings, **cut)
        self.present(result, show, parts=None if keep else parts)

    def present(self, result: Any, show: Callable[..., None] | None = None, *, parts: Any = None) -> None:
        """Save a report or one result in `out`, then write its page, then print its tables by `show`.

        Results that cannot be written are still shown. What another run has left in `out` while this one was at work
        is not replaced.

        Args:
            parts: finished parts that it was made of, of no more use when it is saved.
        """
        from tl_posgen.core.files import require_free, write_files
        from tl_posgen.core.formatting import prompts_in_words
        from tl_posgen.core.report import Report
        from tl_posgen.report.terminal import print_measures

        report = result if isinstance(result, Report) else Report({result.name: result}, result.provenance)
        show = partial(show or print_measures, full=self.full)
        try:
            try:
                require_free(self.out, self.force or report.is_in(self.out))
            except OutputError as error:
                where_kept = "" if parts is None else f". What this run measured is kept in {parts.directory}"
                raise OutputError(f"{error}{where_kept}") from error
            write_files(self.out, {"results.nc": report.as_bytes()})
            failure = None
            try:
                write_files(self.out, report.page_files())
            except Exception as error:
                failure = error
            if parts is not None:
                parts.discard()
            if failure is not None:
                why = f"{type(failure).__name__}: {failure}".splitlines()[0]
                saved = Path(self.out, "results.nc")
                raise OutputError(f"no page could be made ({why}); {saved} is measured") from failure
        except OutputError:
            with suppress(Exception):  # what broke the page may break the tables
                show(report)
            raise
        show(report)
        n, length, text, drawn, first = (
            report.provenance.get(name) for name in ("prompts", "length", "text", "drawn", "first_token")
        )
        pieces = (prompts_in_words(n, length, text), drawn, f"first token: {first}" if first else "")
        cut = f"{', '.join(filter(None, pieces))}. " if pieces[0] else ""
        print(f"\n{cut}Report: {Path(self.out) / 'index.html'}")


def as_command(
    function: Callable[..., Any],
    options: Mapping[str, inspect.Parameter],
    name: str,
    doc: str,
    without: Sequence[str],
    defaults: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return a function that takes the fields of a `Setup` beside its own options, as a command line gives them.

    Args:
        function: called with own options that were given, and a `Setup` as `setup`.
        options: its parameters.
        doc: its description; its `Args:` may have other words for fields of the setup.
        without: fields that mean nothing here.
        defaults: where they are not the setup's.
    """
    usual = {"out": f"report-{name}", **defaults}
    help_of, hints = argument_help(Setup) | argument_help(doc), inspect.get_annotations(Setup)
    shared = {
        field.name: option(
            field.name, hints[field.name], usual.get(field.name, field.default), help_of[field.name], group=_GROUP
        )
        for field in fields(Setup)
        if field.name not in {*without, *options}
    }

    def run(*arguments: Any, **values: Any) -> Any:
        cuts = [f"--{cut}" for cut in ("length", "prompts", "consecutive") if cut in values]
        if cuts and values.get("prompt") is not None and "prompt" in shared:
            raise InputError(f"{cuts[0]} cuts a text, and --prompt is taken whole; give one of them")
        if shared:
            values["setup"] = Setup(**usual | {key: values.pop(key) for key in shared if key in values})
        return function(*arguments, **values)

    signature = inspect.Signature([*options.values(), *shared.values()])
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    run.__doc__ = doc.partition("\n\nArgs:")[0]
    return run


def option(
    name: str, annotation: Any, default: Any, help_text: str, *, of_measure: bool = False, **more: Any
) -> inspect.Parameter:
    """Return an option with its help; one of a measure, or a number, is read by `_read`, a flag can be switched off."""
    show_default = False if default is None or default == () or default is False else as_words
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    is_flag = plain in (bool, bool | None)
    if not is_flag and (of_measure or plain in (int, int | None)):  # cyclopts would round 0.5 to 0
        more |= {"converter": partial(_read, annotation if of_measure else plain), "n_tokens": 1}
    can_be_off = is_flag and (default is not False or of_measure)
    more["negative"] = f"--no-{name.replace('_', '-')}" if can_be_off else ()
    more |= {"allow_repeating": True} if "list[" in str(plain) and not of_measure else {}
    annotation = Annotated[annotation, Parameter(**{"help": help_text, "show_default": show_default} | more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def measure_options(*kinds: Any) -> dict[str, inspect.Parameter]:
    """Return the options of measures that words can give: not mappings. Of one that several have the help is the
    first's, with all defaults where these differ."""
    from tl_posgen.core.options import annotations_of

    options: dict[str, inspect.Parameter] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        for field in fields(kind):
            defaults.setdefault(field.name, {})[kind.name] = field.default
    for kind in kinds:
        help_of, annotations = argument_help(kind), annotations_of(kind)
        for field in fields(kind):
            if field.name in options or "Mapping" in str(annotations[field.name]):
                continue
            help_text, of_measures, more = help_of.get(field.name, ""), defaults[field.name], dict[str, Any]()
            if len({as_words(default) for default in of_measures.values()}) > 1:
                all_defaults = "; ".join(f"{as_words(default)} in {name}" for name, default in of_measures.items())
                more = {"show_default": lambda _, all_defaults=all_defaults: all_defaults}
            arguments = (field.name, annotations[field.name], field.default, help_text[:1].upper() + help_text[1:])
            options[field.name] = option(*arguments, of_measure=True, **more)
    return options


def argument_help(described: Any) -> dict[str, str]:
    """Return the sentence of a docstring, or of what has one, on each argument."""
    text = described if isinstance(described, str) else inspect.getdoc(described) or ""
    block = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", text, re.M | re.S)
    sentences: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", block[1]) if block else []:
        names, _, sentence = entry.strip().partition(": ")
        sentences |= {name.strip(): re.sub(r"\s+", " ", sentence) for name in names.split(",")}
    return sentences


def _read(annotation: Any, _: Any, tokens: Sequence[Any]) -> Any:
    """Return the words of an option as a word, a list or a number: the first that its annotation allows."""
    from tl_posgen.core.options import refusal

    words, name, wanted = tokens[-1].value, tokens[-1].keyword, ""
    entries = parse_list(words, name)
    readings = [words, entries, *(entries if len(entries) == 1 else ())]
    for reading in readings:
        if not (wanted := refusal(reading, annotation)):
            return reading
    raise InputError(f"{name} {readings[-1] if entries else words!r}: give {wanted}")


def as_words(value: Any) -> str:
    """Return a default as a command line would give it: 0,0.05,0.5."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ",".join(as_words(entry) for entry in value)


def parse_list(words: str, name: str) -> list[Any]:
    """'0,2-4' -> [0, 2, 3, 4], 'words, 0.5, -1' -> ['words', 0.5, -1], as written; whether one may stand twice, the
    library says."""
    entries: list[Any] = []
    for word in filter(None, map(str.strip, words.split(","))):
        if span := re.fullmatch(r"(\d+)-(\d+)", word):
            first, last = map(int, span.groups())
            if first > last:
                raise InputError(f"{name} {words!r}: a range counts up; write {last}-{first}")
            if last - first > _MOST_INDICES:
                raise InputError(f"{name} {words!r}: more than {_MOST_INDICES} indices; write a shorter range")
            entries += range(first, last + 1)
            continue
        for kind in (int, float, str):
            with suppress(ValueError):
                entries.append(kind(word))
                break
    return entries


def parse_indices(words: str | None, name: str) -> list[int] | None:
    """'0,2-4' -> [0, 2, 3, 4]; nothing else than indices."""
    indices = None if words is None else parse_list(words, name)
    if indices is not None and not (indices and all(isinstance(index, int) and index >= 0 for index in indices)):
        raise InputError(f"{name} {words!r}: write indices and ranges such as 0,2-4")
    return indices


def parse_heads(words: str | None) -> list[tuple[int, int]] | None:
    """'L3H1,0.2,(1, 3)' -> [(3, 1), (0, 2), (1, 3)]."""
    from tl_posgen.models.head_names import parse_head

    return None if words is None else [parse_head(name) for name in re.findall(r"\([^)]*\)|[^,]+", words)]


def _parse_nulls(words: str) -> Any:
    """'3' -> 3; 'random init: 0-2; shuffled: 0' -> seeds by kind of null model."""
    if words.strip().isdecimal():
        return int(words)
    if ":" not in words:
        raise InputError(
            f"--nulls {words!r}: write how many random inits, 0 for no null model; or seeds by kind, such as "
            "'random init: 0-2; shuffled: 0'"
        )
    kinds = [[side.strip() for side in part.split(":", 1)] for part in words.split(";") if part.strip()]
    names = [kind for kind, *_ in kinds]
    if twice := [kind for kind in names if names.count(kind) > 1]:
        raise InputError(f"--nulls {words!r}: {twice[0]} is given twice; give all its seeds at once, such as 0,1")
    if wrong := [kind for kind, *seeds in kinds if not seeds or not seeds[0] or ":" in seeds[0]]:
        raise InputError(f"--nulls {words!r}: give each kind its seeds, kinds parted by ;, such as '{wrong[0]}: 0,1'")
    return {kind: parse_indices(seeds, f"--nulls {kind}:") for kind, seeds in kinds}
