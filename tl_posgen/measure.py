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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.collector import Collector, Variable
from tl_posgen.core.measure import TokenView as TokenView
from tl_posgen.errors import InputError
from tl_posgen.options import Options, require_name
from tl_posgen.summary import NullSummary, Summary, jsonable


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
        curves: per-head variables with one dimension more, which the page draws in the panel of a head.
        by_head: kinds that draw a curve of every head; the page of more than 64 heads leaves them out.
        off_page: kinds that `plot` draws and the page leaves out, where token views show the same.
        table: a short table for the terminal and the page, where one row a head is too long.
        legend: what the headings of that table mean, below it.
        tokens: what circuitsvis shows of it.
        no_tokens: why it has no such view, and what has one instead.
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
        kind: the dataclass of a measure of `tl_posgen.core.measure`, which this stands for.
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
    curves: tuple[str, ...] = ()
    by_head: frozenset[str] = frozenset()
    off_page: frozenset[str] = frozenset()
    table: Callable[[xr.Dataset], pd.DataFrame] | None = None
    legend: str = ""
    tokens: TokenView | None = None
    no_tokens: str = ""
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
    kind: Any = None
    requires: Callable[[Any], None] = lambda model: None
    check_prompts: Callable[[Any, Sequence[Tensor]], None] = lambda options, tokens: None

    def __post_init__(self) -> None:
        require_name(self.name, "measure")
        if self.kind is not None:
            return
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
        fwd_hooks: Any = (),
        keep: Any = None,
        progress: bool = True,
        **options: Any,
    ):
        """The `Result` of this measure alone: `analyze(model, prompts, measures=[...], ...)[name]`.

        Args:
            model, prompts, layers, heads, length, n_prompts, seed, null_seeds, fwd_hooks, keep, progress: as in
                `analyze`.
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
            fwd_hooks=fwd_hooks,
            keep=keep,
            progress=progress,
        )[self.name]

    def make_options(self, /, **options: Any) -> Options | None:
        """The options object; InputError for an option that the measure lacks."""
        if self.kind is not None:
            return self.kind.with_options(options)
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
        if self.kind is not None:
            return self.kind.describe(self, dataset)
        described = dataset.copy()
        for name, variable in self.variables.items():
            if name in described:
                words = {"long_name": variable.label, "units": variable.unit, "description": variable.description}
                described[name].attrs |= {key: value for key, value in words.items() if value}
        return described

    def summary(self, dataset: xr.Dataset) -> dict[str, Any]:
        """What `summarise` says, and `<name>_low`, `<name>_high` of the means over heads that have an interval."""
        found = dict(self.summarise(dataset))
        for name in (name for name, one in self.variables.items() if one.interval and name in found):
            if f"mean_{name}_low" not in dataset or dataset[f"mean_{name}_low"].ndim:
                continue
            ends = {f"{name}{end}": float(dataset[f"mean_{name}{end}"]) for end in ("_low", "_high")}
            if found[name] == float(dataset[name].mean()) and np.isfinite(list(ends.values())).all():
                found |= ends
        return found

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
        if self.measure.kind is not None:
            return self.measure.collector(self.options)
        return self.measure.collector(self.options, self.measure.variables, seed)

    def as_dict(self) -> dict[str, Any]:
        """The options, JSON-ready, for the provenance."""
        if self.measure.kind is not None:
            return self.options.options()
        return {} if self.options is None else jsonable(asdict(self.options))


def rows_of(dataset: xr.Dataset) -> tuple[str, ...]:
    """The dimensions of one row of a result's frame."""
    rows = dataset.attrs.get("rows", ("layer", "head"))
    return (rows,) if isinstance(rows, str) else tuple(str(row) for row in rows)
