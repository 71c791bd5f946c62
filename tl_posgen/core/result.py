"""Result: the numbers that one measure found of one model beside its random inits; selected, drawn and saved."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.caveats import of_dataset, of_provenance, restrictions
from tl_posgen.core.files import results_bytes, write_whole
from tl_posgen.core.formatting import about_metric, counted, prompts_in_words
from tl_posgen.core.measure import ENDS, HEAD, TOKENS
from tl_posgen.core.numbers import MOST_LABELS, SAMPLE_DIMS, TRAINED, Numbers, at_labels, by_dim, mean_of, one_side
from tl_posgen.core.options import Count, Whole, refusal
from tl_posgen.core.ranking import others_last, random_control, ranked_heads
from tl_posgen.core.views import view
from tl_posgen.errors import InputError
from tl_posgen.models.provenance import SAME_WEIGHTS
from tl_posgen.models.selection import Heads, head_name, named_heads

_MOST_COLUMNS = 8  # of one variable in a frame: a column for each label of a dim


@dataclass(frozen=True)
class Result:
    """The numbers of one measure.

    Attributes:
        measure: with the options that it was measured with.
        dataset: labelled arrays. Along `init` stand the model ("trained"), each random init (its seed) and each
            model of shuffled weights ("shuffled 0"); along
            `group` all prompts ("all") and, of variables with an interval, all but one group of prompts.
        provenance: model, versions, dtype, seeds, options, prompt hash.
    """

    measure: Any  # of a subclass of Measure, whose own methods claims call
    dataset: xr.Dataset
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.measure.name

    @cached_property
    def numbers(self) -> Numbers:
        """Every number with its interval and random inits: `result.numbers("r", tokens="all")`."""
        return Numbers(self.measure, self.dataset.assign_attrs(metric=self.metric) if self.metric else self.dataset)

    @property
    def metric(self) -> str:
        """Name of the metric in the place of the loss; "" for the loss itself."""
        return str(self.provenance.get("metric") or "")

    def worded(self, text: str) -> str:
        """Return words on the loss as they are true of these numbers: on the metric in its place, where there is
        one."""
        return about_metric(text, self.metric) if self.metric else text

    def sel(self, *, init: str | int = TRAINED, **labels: Any) -> xr.Dataset:
        """Return the arrays of one init, all prompts, at these labels: `result.sel(first_token=False)`.

        Raises:
            InputError: a label or a dim that the result lacks.
        """
        return at_labels(self._of_init(str(init)), by_dim(labels), self.name)

    def _of_init(self, init: str) -> xr.Dataset:
        inits = [str(value) for value in self.dataset["init"].values]
        if init not in inits:
            raise InputError(f"{self.name}: no init {init!r}; it has {', '.join(inits)}")
        label = str(self.dataset["init_label"].sel(init=init).values) if "init_label" in self.dataset.coords else init
        dataset = self.dataset
        if init != TRAINED:  # what was measured of the model alone is not of a random init
            dataset = dataset[[name for name, array in dataset.data_vars.items() if "init" in array.dims]]
        data = one_side(dataset, init).drop_vars(("init_label", "init"), errors="ignore")
        return data.assign_attrs(self.dataset.attrs, model=label)

    @cached_property
    def trained(self) -> xr.Dataset:
        """The arrays of the model, all prompts."""
        return self._of_init(TRAINED)

    @cached_property
    def nulls(self) -> tuple[xr.Dataset, ...]:
        """The arrays of every null model."""
        return tuple(self._of_init(init) for init in self.numbers.nulls)

    @cached_property
    def by_kind(self) -> dict[str, xr.Dataset]:
        """The arrays of the model, "trained", and of the first null model of each kind, "random init" and "shuffled",
        which figures draw."""
        nulls = self.numbers.by_null
        return {TRAINED: self.trained} | {kind: self._of_init(numbers.labels[0]) for kind, numbers in nulls.items()}

    @property
    def null(self) -> xr.Dataset | None:
        """The arrays of the first random init; None without one."""
        return self.by_kind.get("random init")

    # Words

    @property
    def encodings(self) -> list[str]:
        """Encodings of positions in the model's layers, such as "rotary"; empty if unknown."""
        return [name for name in str(self.provenance.get("encoding", "")).split(", ") if name]

    def findings(self) -> list[str]:
        """Return what was found, in sentences, with what the model's encoding and hooks make of it."""
        return [*self.sentences, *self.notes]

    @cached_property
    def sentences(self) -> list[str]:
        """Findings in words, the headline first; none where it holds by construction."""
        meaningful = not self.encodings or set(self.encodings) - self.measure.without_meaning
        return [self.worded(sentence) for sentence in self.measure.findings(self.numbers)] if meaningful else []

    @property
    def notes(self) -> list[str]:
        """Effects of the model's encoding and of hooks on the result, in words."""
        return [*([self.caveat] if self.caveat else []), *(f"{self.name}: {warning}" for warning in self.warnings)]

    @cached_property
    def caveat(self) -> str | None:
        """Restriction of the measure for the model's encoding; None without one."""
        words = restrictions(self.measure.caveats, self.encodings)
        return f"{self.name}: {words}" if words else None

    @property
    def warnings(self) -> list[str]:
        """Warnings about edited scores or patterns, hooks, a missing proof, a random init with the model's weights."""
        has_loss = any("loss" in of.label for name, of in self.measure.variables.items() if name in self.dataset)
        warnings = [*of_dataset(self.dataset.attrs), *of_provenance(self.provenance, has_loss=has_loss)]
        if any(SAME_WEIGHTS in str(null.attrs.get("model", "")) for null in self.nulls):
            warnings.append("the random init has the model's own weights, so the two cannot differ.")
        return warnings

    # Tables

    def frame(self, *, init: str | int = TRAINED, every: bool | None = None, **labels: Any) -> pd.DataFrame:
        """Return a row a head (or per `measure.rows`) and a column a headline quantity, at these labels; means over
        prompts and draws. A quantity that is kept with the ends of its interval has two columns more.

        Args:
            init: "trained", or the seed of a random init.
            every: all quantities that have one number a row, behind the headlines; as the measure chooses if None.
            labels: such as first_token=False, for tokens="without first"; the usual ones where left out.
        """
        labels = by_dim(labels)
        data = self.sel(init=init, **labels)
        rows = [row for row in self.measure.rows if row not in labels or row in data.dims]
        usual = {"tokens": TOKENS[0], **self.measure.usual()}
        chosen = {dim: label for dim, label in usual.items() if dim not in labels}
        headlines = [name for name, variable in self.measure.variables.items() if variable.headline]
        every = (self.measure.whole_rows if every is None else every) or not headlines
        columns: dict[str, xr.DataArray] = {}
        for name in sorted(data.data_vars, key=lambda name: [*headlines, name].index(name)):
            array = data[name]
            if "draw" in array.dims and "draw" not in rows and array.dtype.kind in "fiub":
                array = array.mean("draw")
            over = [dim for dim in array.dims if dim not in (*rows, *chosen, *SAMPLE_DIMS, "end")]
            few = all(array.sizes[dim] <= _MOST_COLUMNS for dim in over)
            if set(rows) <= set(array.dims) and few and (every or name in headlines):
                by_end = {"": array if set(SAMPLE_DIMS) & set(rows) else mean_of(array)}
                by_end |= {f", {end}": array.sel(end=end, drop=True) for end in ENDS[1:] if "end" in array.dims}
                for end, part in by_end.items():
                    labelled = columns_of(part, rows, chosen)
                    columns |= {", ".join([str(name), *at]) + end: column for at, column in labelled}
        named = [n for n, coord in data.coords.items() if coord.dims == tuple(rows) and n not in rows]
        table = xr.Dataset(columns, {name: data.coords[name] for name in named})
        if not columns:
            return pd.DataFrame(columns=rows)
        if not rows:
            return pd.DataFrame(
                {name: [float(column)] for name, column in columns.items() if column.dtype.kind in "fiub"}
            )
        frame: Any = table.to_dataframe(dim_order=rows).reset_index()
        telling = [name for name in columns if frame[name].dtype != bool] or list(columns)  # False says nothing alone
        frame = frame[[*rows, *named, *columns]].dropna(how="all", subset=telling)
        return self._with_whole(frame, {name: name.partition(", ")[0] for name in columns})

    def _with_whole(self, frame: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
        """Return a frame with whole numbers as such, where no row lacks one; `columns` are those of variables."""
        variables = self.measure.variables
        whole_columns = [name for name, of in columns.items() if of in variables and variables[of].whole]
        return frame.astype({name: int for name in whole_columns if frame[name].notna().all()})

    def headline_frame(self, of: str = TRAINED) -> pd.DataFrame | None:
        """Return the per-head headlines under the names that reports give them, of the model, or the mean over the null
        models of a kind; None for rows that are no heads."""
        labels = [TRAINED] if of == TRAINED else self.numbers.labels_by_null.get(of, [])
        if tuple(self.measure.rows) != HEAD or not labels:
            return None
        headlines = [self._headlines(self.trained if of == TRAINED else self._of_init(label)) for label in labels]
        columns = {
            column: array
            if len(labels) == 1
            else xr.concat([by_column[column][0] for by_column in headlines], "init").mean("init")
            for column, (array, _, _) in headlines[0].items()
        }
        if not columns:
            return None
        variables = {column: str(array.name) for column, array in columns.items()}
        frame: Any = xr.Dataset(columns).to_dataframe(dim_order=list(HEAD)).reset_index()[[*HEAD, *columns]]
        if "heads" in self.provenance:  # a few were chosen; of two layers' heads, the dataset holds every pair
            names = [head_name(*place) for place in zip(frame["layer"], frame["head"], strict=True)]
            frame = frame[[name in self.provenance["heads"] for name in names]]
        frame = frame.dropna(how="all", subset=list(columns)).reset_index(drop=True)  # a layer with fewer heads
        return self._with_whole(frame, variables) if len(labels) == 1 else frame

    def headline_labels(self) -> dict[str, tuple[str, str]]:
        """Return, for every column of `headline_frame`, its short heading and its label."""
        return {column: (short, label) for column, (_, short, label) in self._headlines(self.trained).items()}

    def _headlines(self, data: xr.Dataset) -> dict[str, tuple[xr.DataArray, str, str]]:
        """Return, by column, array, short heading and label of each headline that has a value a head; of a measure
        without headlines, of each quantity of one number a head."""
        variables, chosen = self.measure.variables, {"tokens": TOKENS[0], **self.measure.usual()}
        has_headlines, headlines = any(variable.headline for variable in variables.values()), {}
        for name, variable in variables.items():
            dims = set(data[name].dims) if name in data else set()
            is_shown = variable.headline if has_headlines else dims - set(chosen) == set(HEAD)
            if not is_shown or not set(HEAD) <= dims or dims & set(SAMPLE_DIMS):
                continue
            array, title = mean_of(data[name]), variable.headline or f"{self.name}_{name}"
            short = variable.short or ("" if set(array.dims) - {*HEAD, *chosen} else variable.label)
            for at, column in columns_of(array, HEAD, chosen):
                headings = " ".join([short, *at]).strip(), ", ".join([variable.label, *at])
                headlines["_".join([title, *at])] = column, *headings
        return headlines

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame | None]:
        """The short tables that were asked for: page and terminal show the same ones."""
        return {}

    def table(self, of: str = TRAINED) -> pd.DataFrame:
        """Return the table of the model, of its random inits ("random init") or of its shuffled weights ("shuffled"):
        a row a condition where the measure has such a table, otherwise what `frame` gives, of the first of a kind.

        With a metric in the place of the loss its columns speak of the metric.
        """
        numbers = {TRAINED: self.numbers} | self.numbers.by_null
        if of not in numbers:
            raise InputError(f"{self.name} has no numbers of {of!r}: it has those of {', '.join(numbers)}")
        if of not in self._tables:
            self._tables[of] = self.measure.table(numbers[of])
        table = self._tables[of]
        if table is None:
            return self.frame(init=TRAINED if of == TRAINED else numbers[of].labels[0])
        if not self.metric:
            return table.copy()
        return table.rename(columns=lambda name: re.sub(r"\bloss\b", "metric", str(name)))

    @property
    def legend(self) -> str:
        """The meaning of the headings of `table`."""
        return self.worded(self.measure.legend)

    def heads(
        self,
        top: int | None = 5,
        by: str | None = None,
        *,
        lowest: bool = False,
        random: int | None = None,
        other_than: Heads = None,
        **labels: Any,
    ) -> pd.DataFrame:
        """Return the `top` heads by a quantity: layer, head, the quantity, largest first, and what stands beside it.

        Args:
            top: how many; None for all.
            by: a per-head variable or its column in a report's frame, such as "position" or "position_share"; of
                `tl_posgen.compare` a number by either name. The measure's first headline if left out.
            lowest: the heads of the lowest values, lowest first.
            random: a seed: as a control, as many of the other heads drawn at random, as many in each layer as the
                `top` ones have there, as far as the layer has others.
            other_than: with `random`, heads in the place of the `top` ones: as many others as these are.
            labels: such as first_token=False, for tokens="without first".

        Raises:
            InputError: a quantity that is not one number a head, fewer heads than a control needs.
        """
        for name, value, kind in (("top", top, Count), ("lowest", lowest, bool), ("random", random, Whole)):
            if value is not None and (wanted := refusal(value, kind)):
                raise InputError(f"{name} = {value!r}: give {wanted}")
        if other_than is not None and random is None:
            raise InputError("other_than is of a control: give random=, a seed, too")
        frame, variables = ranked_heads(self.measure, self.trained, by, labels, lowest=lowest)
        if other_than is not None:
            frame, top = others_last(frame, named_heads(other_than))
        chosen = frame if random is None else random_control(frame, len(frame) if top is None else top, random)
        return self._with_whole(chosen.head(top or len(chosen)), variables)

    def as_summary(self) -> list[dict[str, Any]]:
        """Return its part of summary.json: every number of few labels, with its interval and random inits."""
        return self.numbers.summary()

    def of_heads(self, heads: Heads) -> "Result":
        """Return the result of these heads alone; its numbers, tables and figures are then means over them.

        Raises:
            InputError: heads that the result lacks, or no numbers of single heads.

        Example:
            >>> from tl_posgen.position import MeanKey
            >>> MeanKey()("mini", "Down, down, down.", nulls=0).of_heads("L3H1").frame().shape
            (1, 3)
        """
        pairs = list(dict.fromkeys(named_heads(heads)))
        names, data = [head_name(*pair) for pair in pairs], self.dataset
        if not set(HEAD) <= set(data.coords):
            raise InputError(f"{self.name} has no numbers of single heads; leave heads out")
        layers, indices = (data[dim].values.tolist() for dim in HEAD)
        is_grid = data["layer"].dims != data["head"].dims
        places = list(product(layers, indices)) if is_grid else list(zip(layers, indices, strict=True))
        if lacking := [name for name, pair in zip(names, pairs, strict=True) if pair not in places]:
            listed = [head_name(*place) for place in places[:MOST_LABELS]]
            more = ", .." if len(places) > len(listed) else ""
            raise InputError(f"{self.name} has no head {lacking[0]}; it has {', '.join(listed)}{more}")
        if is_grid:
            data = _of_grid(data, pairs)
        else:
            data = data.isel({data["head"].dims[0]: np.array([place in pairs for place in places])})
        if self.measure.patterns in data:
            unit = self.measure.variables[self.measure.patterns].dims[1]
            data = data.isel({unit: data[unit].isin(names).values})
        return replace(self, dataset=self.measure.of_heads(data), provenance={**self.provenance, "heads": names})

    def head(self, head: Heads | SupportsIndex, *more: Any) -> Any:
        """Return the numbers of one head with their null models, and its curves; see `Report.head`."""
        return view("one head")({self.name: self}, head, *more)

    # Pictures

    @property
    def kinds(self) -> list[str]:
        """The kinds of figures that `plot` can draw of this result."""
        drawn = self.measure.kinds(self.trained)
        return [kind for kind in self.measure.figures if kind in drawn]

    def plot(self, kind: str | None = None, *, heads: Heads = None):
        """Return a plotly Figure of this result beside its first random init: of this kind, the first if left out.

        Args:
            heads: draw these alone, of the null models too: "L3H1", "3.1" or (3, 1), several in a list, or a frame.

        Raises:
            InputError: another kind, nothing to draw, heads that the result lacks; heads where the figure is of the
                whole model.
        """
        if heads is not None:
            chosen = self.of_heads(heads)
            if (kind or next(iter(self.kinds), "")) in self.measure.whole_model:
                raise InputError(
                    f"heads: {kind or self.kinds[0]!r} of {self.name} is of the whole model; leave heads out, or draw "
                    f"another of {', '.join(map(repr, self.kinds))}"
                )
            return chosen.plot(kind)
        if not self.kinds:
            why = "figures are those that its class declares, which is imported before the file is loaded"
            if names := ", ".join(self.measure.figures):
                why = f"these prompts give nothing to draw as {names}, which longer or more prompts may"
            raise InputError(f"{self.name} has no figure; its numbers are in .dataset and .frame(); {why}")
        kind = self.kinds[0] if kind is None else kind
        if kind not in self.kinds:
            raise InputError(f"kind={kind!r}: {self.name} draws {', '.join(map(repr, self.kinds))} of this result")
        figure = self.measure.figures[kind](self)
        return view("figure in other words")(figure, self.worded) if self.metric else figure

    def token_labels(self) -> list[str]:
        """Return a line for each token-level picture."""
        labels = [] if self.measure.token_view is None else self.measure.token_view.labels(self.trained)
        return [self.worded(label).replace("red: worse", "red: higher") for label in labels] if self.metric else labels

    def show(self, example: int = 0):
        """Return a circuitsvis page of this result, token by token, below a line that says what it draws."""
        of_tokens = self.measure.token_view
        if of_tokens is None:
            raise InputError(
                f"{self.name} has no token-level view, as its numbers are not of single tokens: use .plot(), or "
                "measure attention_examples or split_examples"
            )
        labels = self.token_labels()
        if not 0 <= example < len(labels):
            raise InputError(f"example={example}: {self.name} has {len(labels)}: {'; '.join(labels)}")
        return view("token by token")(of_tokens.show(self.trained, example), labels[example])

    # Files and notebooks

    def save(self, path: str | os.PathLike) -> Path:
        """Write NetCDF4 to `path`, whole or not at all; `tl_posgen.load` reads it back."""
        return write_whole(path, results_bytes({self.name: (self.dataset, self.provenance)}, self.provenance))

    def _repr_html_(self) -> str:
        """In a notebook: findings, a table, the first figure."""
        return view("result in a cell")(self).html()

    def _ipython_display_(self) -> None:
        view("result in a cell")(self).display(repr(self))

    def __repr__(self) -> str:
        name = f"{type(self).__name__}({self.name}; {self.trained.attrs.get('model', 'model')}"
        return shown_as(name, [self], self.sentences)


def shown_as(name: str, results: Iterable[Result], sentences: Sequence[str]) -> str:
    """Return a name that is open for the number of heads and prompts, and the first sentence."""
    sizes, provenance = [0], dict[str, Any]()
    for result in results:
        provenance = dict(result.provenance)
        sizes.append(len(provenance["heads"]) if "heads" in provenance else _n_heads(result))
    heads = counted(max(sizes), "head") if max(sizes) else ""
    prompts = prompts_in_words(provenance.get("prompts"), provenance.get("length"))
    return f"{', '.join(filter(None, [name, heads, prompts]))}){': ' * bool(sentences)}{''.join(sentences[:1])}"


def _n_heads(result: Result) -> int:
    """Return how many heads have a number."""
    arrays = [array for array in result.trained.values() if set(HEAD) <= set(array.dims) and array.dtype.kind in "fiu"]
    return max((int(array.notnull().any(set(array.dims) - set(HEAD)).sum()) for array in arrays), default=0)


def _of_grid(data: xr.Dataset, pairs: Sequence[tuple[int, int]]) -> xr.Dataset:
    """Return a dataset over the layers and heads of these pairs; without values where both are no pair."""
    layers, heads = (sorted({pair[at] for pair in pairs}) for at in (0, 1))
    data = data.sel(layer=layers, head=heads)
    chosen = xr.DataArray([[(layer, head) in pairs for head in heads] for layer in layers], dims=HEAD)
    if chosen.all():
        return data
    of_heads = {name: array for name, array in data.items() if set(HEAD) <= set(array.dims)}
    masked = {
        name: array & chosen if array.dtype.kind == "b" else array.where(chosen) for name, array in of_heads.items()
    }
    return data.assign({name: array.transpose(*of_heads[name].dims) for name, array in masked.items()})


def columns_of(
    array: xr.DataArray, rows: Sequence[str], chosen: Mapping[str, Any]
) -> Iterator[tuple[list[str], xr.DataArray]]:
    """Yield an array as columns over `rows`, each behind its labels: at the chosen labels of its other dims, else a
    column a label.

    Example:
        >>> share = xr.DataArray([[0.2, 0.8]], {"head": [0], "part": ["q", "k"]}, ("head", "part"))
        >>> [labels for labels, _ in columns_of(share, ["head"], {})]
        [['q'], ['k']]
        >>> [labels for labels, _ in columns_of(share, ["head"], {"part": "k"})]
        [[]]
    """
    array = array.sel({dim: label for dim, label in chosen.items() if dim in array.dims and dim not in rows}, drop=True)
    over = [dim for dim in array.dims if dim not in rows]
    for place in np.ndindex(*(array.sizes[dim] for dim in over)):
        column = array.isel(dict(zip(over, place, strict=True)))
        labels = [
            f"{column[dim].item()}" if dim in column.coords else str(at) for dim, at in zip(over, place, strict=True)
        ]
        scalars = [name for name, coord in column.coords.items() if not coord.ndim]
        yield [label for label in labels if label not in ("", TOKENS[0])], column.drop_vars(scalars)
