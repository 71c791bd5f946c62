"""What a measure is: one declaration, which tables, figures, sentences, claims and files read.

share = Measure(
    name="mean_key_share",
    question="How much of a head's keys is their mean?",
    explanation="|E k|^2 / E |k|^2 of the keys before RoPE.",
    source="ours",
    collector=MeanKeyShare,
    variables={"share": Variable("mean key share", headline="mean_key_share")},
    summarise=lambda data: {"share": float(data["share"].mean())},
    findings=lambda own, null: [f"Mean keys hold {beside(own, null, 'share', '.0%')} of the energy of keys."],
    figures={"map": head_map("share")},
)
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.capture import LayerCapture

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Variable:
    """One variable of a measure's dataset; written into it as CF attributes.

    Attributes:
        label: what axes and tables call it (`long_name`).
        unit: such as "nats", "logits", "tokens" (`units`); "" for a pure number.
        description: its formula or meaning, one line.
        dims: its dimensions; (layer, head) makes it a column of `Result.frame()`.
        headline: its column in the per-head table of a report and in summary.json; "" for none.
        short: its heading in the terminal's table, which has room for few letters; a legend says the label.
    """

    label: str
    unit: str = ""
    description: str = ""
    dims: tuple[str, ...] = ("layer", "head")
    headline: str = ""
    short: str = ""


class Collector:
    """Takes in one layer of one prompt at a time, and says at the end what was found; made anew for every model.

    Attributes:
        options: the measure's options, or None where it has none.
        rows: what `add` took in.
        seed: of draws.
    """

    def __init__(self, options: Any = None, variables: Mapping[str, Variable] | None = None, seed: int = 0):
        self.options, self.seed = options, seed
        self.rows = HeadRows()
        self._variables = variables or {}

    def update(self, layer: LayerCapture) -> None:
        """Take in one layer of one prompt. Called in the order of the layers, prompt after prompt."""
        raise NotImplementedError

    def finish(self, tokens: Tensor, logits: Tensor) -> None:
        """Take in the logits [pos, vocabulary] of a whole prompt; called where the measure needs "logits"."""
        raise NotImplementedError

    def add(self, layer: LayerCapture, **values: Tensor) -> None:
        """Keep per-head values of this layer and prompt: [head] or [head, *dims]."""
        self.rows.add(layer, **values)

    def dataset(self) -> xr.Dataset:
        """What was found: unless overridden, the mean over prompts of everything that was added."""
        dims = {name: self._variables[name].dims[2:] if name in self._variables else () for name in self.rows.names}
        return xr.Dataset({name: self.rows.array(name, *dims[name]).mean("prompt") for name in self.rows.names})


class HeadRows:
    """Per-head arrays gathered layer by layer and prompt by prompt.

    `add(layer, r=[head], a=[head distance], ...)` takes them in; `array(name, *dims)` gives one array
    [prompt, layer, head, *dims], shorter prompts, and heads that a layer was not asked for, filled with NaN.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        self._heads: dict[int, tuple[int, ...]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._rows)

    def add(self, layer: LayerCapture, **values: Tensor) -> None:
        self._heads[layer.layer] = tuple(layer.heads)
        for name, value in values.items():
            rows = self._rows.setdefault(name, {})
            rows[layer.prompt, layer.layer] = value.detach().to("cpu", torch.float64).numpy()

    def array(self, name: str, *dims: str) -> xr.DataArray:
        rows = self._rows[name]
        prompts, layers = (sorted({key[axis] for key in rows}) for axis in (0, 1))
        heads = sorted(set().union(*self._heads.values()))
        shape = np.max([row.shape[1:] for row in rows.values()], axis=0).astype(int)
        values = np.full((len(prompts), len(layers), len(heads), *shape), np.nan)
        for (prompt, layer), row in rows.items():
            of_heads = [heads.index(head) for head in self._heads[layer]]
            inside = tuple(slice(n) for n in row.shape[1:])
            values[prompts.index(prompt), layers.index(layer)][(of_heads, *inside)] = row
        coords = {"prompt": prompts, "layer": layers, "head": heads}
        coords |= {dim: np.arange(n) for dim, n in zip(dims, shape, strict=True)}
        return xr.DataArray(values, coords, ("prompt", "layer", "head", *dims))


@dataclass(frozen=True)
class Options:
    """Base of a measure's options: a frozen dataclass, whose docstring is the measure's reference.

    Values of another type than annotated are refused here; `check` refuses others that cannot be used.
    """

    measure: ClassVar["Measure"]  # set where the measure is declared

    def __post_init__(self) -> None:
        for one in fields(self):
            require(one.name, getattr(self, one.name), one.type)
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be used, before anything runs; InputError names the option and the remedy."""


NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "None"}
NAMES |= {os.PathLike: "a path", pd.DataFrame: "a DataFrame"}


def require(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type than `fits` takes."""
    if not fits(value, kind):
        raise InputError(f"{name} = {value!r}: give {in_words(kind)}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an option's type: numbers, words, Literals, sequences of them, and unions of these.

    Example:
        >>> fits(1, float), fits(True, int), fits([0, 2], Sequence[int]), fits("02", Sequence[int])
        (True, False, True, False)
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Literal:
        return isinstance(value, str | int) and value in inside
    if origin is not None and issubclass(origin, Sequence):
        listed = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        return listed and all(fits(one, inside[0]) for one in value)
    if kind in (int, float):
        numbers = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def in_words(kind: Any) -> str:
    """An option's type as an error says it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(one) for one in inside)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inside))}"
    if origin is not None and issubclass(origin, Sequence):
        return f"a list, each {in_words(inside[0])}"
    return NAMES.get(kind, str(getattr(kind, "__name__", kind)))


def require_name(name: Any, what: str) -> None:
    """Refuse a name that files and pages cannot use, as that of a group or an anchor."""
    if not isinstance(name, str) or not name.isidentifier() or name == "null":
        raise InputError(f"{what} {name!r}: its name must be letters, digits and underscores, and not null")


@dataclass(frozen=True)
class TokenView:
    """What circuitsvis shows of a measure.

    Attributes:
        labels: from a dataset to one line for each example that can be shown.
        show: from a dataset and the number of an example to circuitsvis' page.
    """

    labels: Callable[[xr.Dataset], list[str]]
    show: Callable[[xr.Dataset, int], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Measure:
    """A measure, declared once; called on a model and prompts it gives its Result.

    Attributes:
        name: of its result, in `analyze(measures=...)` and on the command line.
        question: what it answers; the heading of its section.
        explanation: a paragraph below the heading.
        source: which paper, or "ours"; what is reconstructed is called so.
        variables: every variable of its dataset.
        summarise: the dataset's numbers that are shown or judged anywhere, computed here and nowhere else: a flat
            mapping to JSON values (numbers, short lists, head references such as "3.6").
        findings: from the summary, and that of the null or None, to sentences; see `tl_posgen.report.sentences`.
        figures: kind -> function from a Result to a plotly Figure.
        drawn: which of these kinds a result has data for; all if left out.
        off_page: kinds that `plot` draws and the page leaves out, where token views show the same.
        table: a short table for the terminal and the page, where one row a head is too long.
        tokens: what circuitsvis shows of it.
        caveats: what it means for a model whose encoding is "absolute", "alibi" or "none", where that differs.
        without_meaning: encodings whose numbers hold by construction; nothing is concluded from them.
        options: the dataclass of its options, or None.
        collector: fed by the forward pass that all collectors share; or
        procedure: (model, prompts, request, job) -> Result, for what runs the model itself.
        needs: what a collector reads beyond q and k, of {"v", "attn_scores", "pattern", "resid", "inputs"};
            "logits" of the whole prompt go to `finish`.
        after: measures whose results of the same run it is given, in `job.after`.
        matrices: how many float32 [head, query, key] matrices of one layer it holds at most at once, the forward
            pass's own included, where passes are streamed; 0 if its memory is linear in the length then. Passes that
            are not streamed hold up to 5 more. Prompts whose matrices no memory holds are refused.
        min_prompts: fewer are refused before anything runs.
        precise: whether its numbers need more digits than bfloat16 has: a model that is given by its name, and no dtype
            with it, is loaded in float32.
        requires: refuses a model that it cannot measure, before anything runs.
        check_prompts: refuses prompts that its options cannot be had of, before anything runs.
    """

    name: str
    question: str
    explanation: str
    source: str
    variables: Mapping[str, Variable]
    summarise: Callable[[xr.Dataset], Summary]
    findings: Callable[[Summary, "NullSummary | None"], list[str]] = lambda own, null: []
    figures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    drawn: Callable[[xr.Dataset], Sequence[str]] | None = None
    off_page: frozenset[str] = frozenset()
    table: Callable[[xr.Dataset], pd.DataFrame] | None = None
    tokens: TokenView | None = None
    caveats: Mapping[str, str] = field(default_factory=dict)
    without_meaning: frozenset[str] = frozenset()
    options: type[Options] | None = None
    collector: type[Collector] | None = None
    procedure: Callable[..., Any] | None = None
    needs: frozenset[str] = frozenset()
    after: tuple[str, ...] = ()
    matrices: int = 0
    min_prompts: int = 1
    precise: bool = False
    requires: Callable[[Any], None] = lambda model: None
    check_prompts: Callable[[Any, Sequence[Tensor]], None] = lambda options, tokens: None

    def __post_init__(self) -> None:
        require_name(self.name, "measure")
        if odd := [name for name in self.variables if not str(name).isidentifier()]:
            raise InputError(f"measure {self.name}: variable {odd[0]!r} must be letters, digits and underscores")
        if self.options is not None:
            taken = vars(self.options).get("measure")
            if taken is not None and taken.name != self.name:
                raise InputError(f"measure {self.name}: {self.options.__name__} is already that of {taken.name}")
            self.options.measure = self
        object.__setattr__(self, "__doc__", inspect.getdoc(self.options) if self.options else self.explanation)

    def __repr__(self) -> str:
        return f"<measure {self.name}: {self.question}>"

    def __call__(
        self,
        model: Any,
        prompts: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: Any = None,
        length: int | None = None,
        n_prompts: int | None = None,
        seed: int = 0,
        null_seeds: Sequence[int] = (0,),
        progress: bool = True,
        **options: Any,
    ):
        """The `Result` of this measure alone: `analyze(model, prompts, measures=[...], ...)[name]`.

        Args:
            model, prompts, layers, heads, length, n_prompts, seed, null_seeds, progress: as in `analyze`.
            options: of the measure, as its options dataclass lists them.
        """
        from tl_posgen.analysis import analyze

        return analyze(
            model,
            prompts,
            measures=[Request(self, self.make_options(**options))],
            layers=layers,
            heads=heads,
            length=length,
            n_prompts=n_prompts,
            seed=seed,
            null_seeds=null_seeds,
            progress=progress,
        )[self.name]

    def make_options(self, **options: Any) -> Options | None:
        """The options object; InputError for an option that the measure lacks."""
        known = [one.name for one in fields(self.options)] if self.options else []
        if unknown := [name for name in options if name not in known]:
            raise InputError(
                f"{self.name} has no option {unknown[0]!r}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )
        if self.options is None:
            return None
        needed = [one.name for one in fields(self.options) if one.default is MISSING and one.default_factory is MISSING]
        if missing := [name for name in needed if name not in options]:
            raise InputError(f"{self.name} needs the option {missing[0]!r}")
        return self.options(**options)

    def describe(self, dataset: xr.Dataset) -> xr.Dataset:
        """The dataset with label, unit and description of every declared variable in its attributes (CF names)."""
        described = dataset.copy()
        for name, variable in self.variables.items():
            if name in described:
                words = {"long_name": variable.label, "units": variable.unit, "description": variable.description}
                described[name].attrs |= {key: value for key, value in words.items() if value}
        return described

    def kinds(self, dataset: xr.Dataset) -> list[str]:
        """The figures that this dataset has data for."""
        return (
            list(self.figures) if self.drawn is None else [kind for kind in self.figures if kind in self.drawn(dataset)]
        )


@dataclass(frozen=True)
class Request:
    """A measure with the options it is asked for with."""

    measure: Measure
    options: Options | None = None

    @property
    def name(self) -> str:
        return self.measure.name

    def collect(self, seed: int) -> Collector:
        """A fresh collector: nothing leaks from one model's analysis into the next."""
        assert self.measure.collector is not None
        return self.measure.collector(self.options, self.measure.variables, seed)

    def as_dict(self) -> dict[str, Any]:
        """The options, JSON-ready, for the provenance."""
        return {} if self.options is None else jsonable(asdict(self.options))


def jsonable(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinity, which JSON lacks, become null, arrays lists, and others words.

    Example:
        >>> jsonable({"r": np.float32(0.5), "curve": np.array([1.0, np.nan]), 3: (True, None)})
        {'r': 0.5, 'curve': [1.0, None], '3': [True, None]}
    """
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    return [jsonable(one) for one in value] if isinstance(value, Sequence) else str(value)


class NullSummary(Mapping[str, Any]):
    """The summaries of one or several random inits: a number is the mean over the seeds that have one, a list of
    numbers the mean of each entry, anything else the first's.

    Example:
        >>> null = NullSummary([{"r": 0.3, "by_k": [1, 2], "head": "1.2"}, {"r": 0.5, "by_k": [1, 3], "head": "0.0"}])
        >>> null["r"], round(null.spread("r"), 4), null["by_k"], null["head"]
        (0.4, 0.1414, [1.0, 2.5], '1.2')
    """

    def __init__(self, summaries: Sequence[Summary]):
        self.seeds = list(summaries)

    def __getitem__(self, key: str) -> Any:
        values = [summary[key] for summary in self.seeds]
        if all(value == values[0] for value in values):
            return values[0]
        if all(fits(value, Sequence[float]) for value in values) and len(set(map(len, values))) == 1:
            return np.mean(values, axis=0).tolist()
        numbers = self._numbers(key)
        return float(np.mean(numbers)) if numbers else values[0]

    def _numbers(self, key: str) -> list[int | float]:
        """Of the seeds that have one."""
        return [summary[key] for summary in self.seeds if fits(summary[key], float)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.seeds[0])

    def __len__(self) -> int:
        return len(self.seeds[0])

    def spread(self, key: str) -> float | None:
        """Standard deviation over the seeds that have a number; None of fewer than two."""
        numbers = self._numbers(key)
        return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None


def rows_of(dataset: xr.Dataset) -> tuple[str, ...]:
    """The dimensions of one row of a result's frame."""
    rows = dataset.attrs.get("rows", ("layer", "head"))
    return (rows,) if isinstance(rows, str) else tuple(str(row) for row in rows)
