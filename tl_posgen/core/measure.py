"""A measure: one frozen dataclass whose fields are its options and whose docstring is its description."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.core.files import jsonable
from tl_posgen.core.options import check_options, with_options
from tl_posgen.errors import InputError

if TYPE_CHECKING:
    from tl_posgen.core.numbers import Numbers
    from tl_posgen.core.result import Result
    from tl_posgen.core.run import Run
    from tl_posgen.core.sums import Sums
    from tl_posgen.models.layers.capture import LayerCapture
    from tl_posgen.models.loading.load import AnyModel
    from tl_posgen.models.session import Session

HEAD = ("layer", "head")
TOKENS = ("all", "without first")  # labels of the dim "tokens": the first token of a prompt often is an attention sink
ENDS = ("value", "low", "high")  # labels of the dim "end": a number that comes with the ends of its own interval
DEFINED: dict[str, type["Measure"]] = {}  # by name, whose newest definition in this session it is
LABELS: dict[str, Sequence[Any]] = {"tokens": TOKENS, "side": ("q", "k"), "end": ENDS}  # of dims that measures share


@dataclass(frozen=True)
class Variable:
    """One quantity of a measure's dataset; written into it as CF attributes.

    Attributes:
        label: its name on axes and in tables (`long_name`).
        unit: such as "nats", "logits", "tokens" (`units`); "" for a pure number.
        description: its formula or meaning, one line.
        dims: its dimensions, `init` and `group` left out; (layer, head) at the usual labels of the other dims makes it
            a column of `Result.frame()`.
        headline: its column in the per-head table of a report; "" for none.
        short: its heading in the terminal's table, which has room for few letters; a legend spells it out. If left
            out, its label, or the labels of a dim that it has a column each for.
        interval: whether it is also computed without each group of prompts, for a 95 % interval over prompts. For
            smooth functions of sums over prompts, see `tl_posgen.stats.intervals`.
        bounds: the range of its values, (-1, 1) of a correlation, which its interval does not leave; None for none.
        judged: whether sentences say where it is not above its nulls: of what training is said to make high.
        ranked: whether the terminal's table, where not all heads fit, shows those with most of it.
        compared: whether comparisons of two reports hold it; not a yardstick, which no model can change.
        shown_with: a variable of the same dims that `Result.heads` shows beside it, such as a best score's distance.
        whole: whether its values are whole numbers, and stay such in tables of a few chosen heads.
    """

    label: str
    unit: str = ""
    description: str = ""
    dims: tuple[str, ...] = HEAD
    headline: str = ""
    short: str = ""
    interval: bool = False
    bounds: tuple[int | float, int | float] | None = None
    judged: bool = False
    ranked: bool = False
    compared: bool = True
    shown_with: str = ""
    whole: bool = False

    @classmethod
    def share(
        cls,
        label: str,
        description: str = "",
        dims: tuple[str, ...] = HEAD,
        headline: str = "",
        short: str = "",
        interval: bool = True,
        **more: Any,
    ) -> "Variable":
        """Return a share of a whole, in [0, 1], a number without a unit; it has an interval over prompts if not told
        otherwise.

        Example:
            >>> Variable.share("key share").bounds, Variable.correlation("r", interval=False).bounds
            ((0, 1), (-1, 1))
        """
        return cls(label, "", description, dims, headline, short, interval, (0, 1), **more)

    @classmethod
    def correlation(cls, *arguments: Any, **more: Any) -> "Variable":
        """Return a correlation or a cosine, in [-1, 1]; the arguments are those of `share`."""
        return replace(cls.share(*arguments, **more), bounds=(-1, 1))

    @property
    def attributes(self) -> dict[str, str]:
        """CF attributes: long_name, units, description."""
        attributes = {"long_name": self.label, "units": self.unit, "description": self.description}
        return {name: text for name, text in attributes.items() if text}


@dataclass(frozen=True)
class TokenView:
    """A token-level picture by circuitsvis.

    Attributes:
        labels: from a dataset to one line for each example that can be shown.
        show: from a dataset and the number of an example to circuitsvis' page.
    """

    labels: Callable[[xr.Dataset], list[str]]
    show: Callable[[xr.Dataset, int], Any]


@dataclass(frozen=True)
class Measure:
    """Base of a measure: subclasses are frozen dataclasses whose fields are options; called on a model and prompts, an
    instance gives its `Result`.

    A measure defines `of_layer`, from one layer of one prompt to arrays that are averaged over prompts (or to objects
    with a `+`), in the forward pass that all measures share; or `of_model`, which runs the model itself; or both. What
    is faster for several layers at once is a second step, `of_layers`.

    The class docstring is the measure's description: its first paragraph the formula, its second the explanation shown
    on pages, then `Args:` (the options), `Source:` and `Example:`.

    Attributes:
        name: in text and on the command line, made of the class's: "three_axis" of ThreeAxis.
        explanation: the paragraph below the heading of its section, the second of the docstring.
        source: the paper, or "ours"; a reconstruction is called one.
        is_fed, runs_model: whether the shared forward pass feeds it; whether it runs the model itself.
        question: the question that it answers; the heading of its section.
        variables: every variable of its dataset.
        needs: what `of_layer` reads beyond q and k, of {"v", "attn_scores", "pattern", "resid", "inputs"}; "logits" of
            the whole prompt go to `of_logits`.
        after: measures whose datasets `of_model` reads by `run.dataset_of(...)`.
        one_length: whether prompts must have one length within the training context.
        matrices: how many float32 [head, query, key] matrices of one layer it holds at most at once in streamed passes,
            the forward pass's own included; 0 if its memory is linear in the length.
        precise: whether bfloat16 is too coarse: a model given by its name, with no dtype, is loaded in float32.
        has_null: whether it is also measured on random inits.
        result_class: of its results, where they have methods of their own; `Result` if None.
        rows: dims of one row of `Result.frame()`.
        whole_rows: whether that has every quantity of a row if not asked for, and not the headlines alone.
        figures: kind -> function from a Result to a plotly Figure.
        curves: per-head variables with one dim more, which the page draws in the panel of a head.
        patterns: variable [kind, unit, row, column], of every head named L0H0, .. along "unit", with maps between the
            first tokens, which the page draws in the panel of a head.
        by_head: kinds that draw a curve for every head; the page of more than 64 heads leaves them out.
        whole_model: kinds of figures that are of the whole model and not of single heads.
        legend: the meaning of the headings of `table`.
        words: what sentences, tables and figures call the labels of a dim, such as "RoPE removed" for no_rope; see
            `in_words`.
        token_view: its token-level picture.
        caveats: its meaning for a model whose encoding is "absolute", "alibi" or "none", where that differs.
        without_meaning: encodings whose numbers hold by construction; nothing is concluded from them.
        n_headlines: how many of its sentences stand before those of other measures, and how many figures a page opens.
        usual_prompts: how many prompts its command takes if not told.
    """

    name: ClassVar[str] = "measure"
    explanation: ClassVar[str] = ""
    source: ClassVar[str] = "ours"
    is_fed: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    question: ClassVar[str] = ""
    variables: ClassVar[Mapping[str, Variable]] = {}
    needs: ClassVar[frozenset[str]] = frozenset()
    after: ClassVar[tuple[type["Measure"], ...]] = ()
    one_length: ClassVar[bool] = False
    matrices: ClassVar[int] = 0
    precise: ClassVar[bool] = False
    has_null: ClassVar[bool] = True
    result_class: ClassVar[type["Result"] | None] = None
    rows: ClassVar[tuple[str, ...]] = HEAD
    whole_rows: ClassVar[bool] = False
    figures: ClassVar[Mapping[str, Callable[["Result"], Any]]] = {}
    curves: ClassVar[tuple[str, ...]] = ()
    patterns: ClassVar[str] = ""
    by_head: ClassVar[frozenset[str]] = frozenset()
    whole_model: ClassVar[frozenset[str]] = frozenset()
    legend: ClassVar[str] = ""
    words: ClassVar[Mapping[str, str]] = {}
    token_view: ClassVar[TokenView | None] = None
    caveats: ClassVar[Mapping[str, str]] = {}
    without_meaning: ClassVar[frozenset[str]] = frozenset()
    n_headlines: ClassVar[int] = 1
    usual_prompts: ClassVar[int] = 4

    def __init_subclass__(cls) -> None:
        paragraphs = paragraphs_of(cls)
        cls.name = vars(cls).get("name") or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.explanation = paragraphs[min(1, len(paragraphs) - 1)]
        cls.source = next(
            (text.removeprefix("Source:").strip() for text in paragraphs if text[:7] == "Source:"), "ours"
        )
        cls.is_fed = cls.of_layer is not Measure.of_layer or cls.of_logits is not Measure.of_logits
        cls.runs_model = cls.of_model is not Measure.of_model
        if not cls.name.isidentifier() or cls.name == "null":  # names of groups in files, of anchors on pages
            raise InputError(f"measure {cls.name!r}: its name must be letters, digits and underscores, and not null")
        if odd := [name for name in cls.variables if not str(name).isidentifier()]:
            raise InputError(f"measure {cls.name}: variable {odd[0]!r} must be letters, digits and underscores")
        DEFINED[cls.name] = cls

    def __post_init__(self) -> None:
        for kind in type(self).__mro__:  # up to this class, whose names are of the class
            annotations = inspect.get_annotations(kind) if issubclass(kind, Measure) and kind is not Measure else {}
            declared = {*vars(kind).get("__dataclass_fields__", ()), *inspect.get_annotations(Measure)}
            if options := [
                name for name, of in annotations.items() if "ClassVar" not in str(of) and name not in declared
            ]:
                raise InputError(
                    f"measure {self.name}: {options[0]} is no option of it; put @dataclass(frozen=True) above "
                    f"{kind.__name__}"
                )
        check_options(self, self.name)

    def options(self) -> dict[str, Any]:
        """Options by name, JSON-ready."""
        return jsonable({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def with_options(cls, options: Mapping[str, Any]) -> "Measure":
        """Return the measure with these options, see `tl_posgen.core.options.with_options`."""
        return with_options(cls, options, cls.name)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        """Return the labels of its own dims, such as an option chooses; `tokens` and `side` have theirs already."""
        return {}

    def usual(self) -> Mapping[str, Any]:
        """Return the label that a number has along each dim where none is given; `tokens` is "all" if left out."""
        return {}

    # Its computation

    def prompt_tokens(
        self, session: "Session", prompts: Any, length: int | None, n_prompts: int | None, consecutive: bool = False
    ) -> Sequence[Tensor]:
        """Return the token ids of every prompt that `of_model` measures."""
        from tl_posgen.models.tokens import to_prompts

        return to_prompts(session, prompts, length, n_prompts, consecutive=consecutive)

    def requires(self, session: "Session") -> None:
        """Refuse a model that it cannot measure, before anything runs (UnsupportedModelError)."""

    def prepare(self, session: "Session", tokens: Sequence[Tensor]) -> "Measure":
        """Return the measure with options that were left out filled in; refuse prompts that it cannot measure."""
        return self

    def refuse(self, run: "Run") -> None:
        """Refuse layers, heads and options that it cannot measure, before the first forward pass; nothing is measured
        in `run` yet."""

    def attached(self, session: "Session") -> "Measure":
        """Return the measure with the options filled in that `prepare` makes of the model and of prompts, for passes
        whose prompts are not known before."""
        return self

    def of_layer(self, layer: "LayerCapture") -> Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return, by name, an array [*dims of the variable, layer left out] or an object with a `+`, of one prompt.

        A pair of such mappings, of all tokens and without the first one, fills the dim "tokens" of what both have.
        """
        raise NotImplementedError

    def of_layers(self, layer_values: Sequence[Any]) -> Sequence[Any]:
        """Return the values that `of_layer` describes, of several layers and prompts, from what it gave of each;
        unchanged, unless overridden. It is for many small operations, which take an accelerator as long for one layer
        as for ten.

        Where it is overridden, what `of_layer` gives is kept until enough layers have come, so `of_layer` must give
        neither the capture nor a tensor that it will overwrite.
        """
        return layer_values

    def of_logits(self, tokens: Tensor, logits: Tensor, session: "Session") -> Mapping[str, Any]:
        """Return, by name, arrays of the logits [pos, vocabulary] of one prompt, which ran in this session; for
        measures that need "logits"."""
        raise NotImplementedError

    def of_sums(self, sums: "Sums") -> xr.Dataset:
        """Return the dataset of the sums over prompts: means, unless overridden."""
        return sums.means()

    def of_model(self, run: "Run") -> xr.Dataset:
        """Return the dataset of a running model."""
        raise NotImplementedError

    # Its words and pictures

    def findings(self, numbers: "Numbers") -> list[str]:
        """Return what was found, in sentences made of numbers: every headline's, unless overridden."""
        headlines = {
            variable: numbers(name)
            for name, variable in self.variables.items()
            if variable.headline and name in numbers
        }
        headings = {
            variable: f"{variable.label[:1].upper()}{variable.label[1:]}{f', {variable.unit}' if variable.unit else ''}"
            for variable in headlines
        }
        return [f"{headings[variable]}: {number}." for variable, number in headlines.items()]

    def in_words(self, label: Any) -> str:
        """Return a label as readers see it, by `words`; one without words as it is."""
        return in_words(label, self.words)

    def table(self, numbers: "Numbers") -> pd.DataFrame | None:
        """Return a short table for the terminal and the page, where one row a head is too long; None for none."""
        return None

    def leading_table(self, report: Mapping[str, "Result"]) -> pd.DataFrame | None:
        """Return the table that stands first in terminal and page where this measure is the first of the report; its
        `attrs` hold a title and a legend."""
        return None

    def of_heads(self, data: xr.Dataset) -> xr.Dataset:
        """Return the dataset of chosen heads, with every number that is a mean over heads made again of these."""
        return data

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return the kinds of figures that a dataset has data for."""
        return list(self.figures)

    # Its call

    def __call__(self, model: "AnyModel", prompts: Any = None, **settings: Any) -> "Result":
        """Return the `Result` of this measure alone; settings are those of `tl_posgen.analyze`.

        Example:
            >>> from tl_posgen.position import MeanKey
            >>> MeanKey(d0=8)("mini", "Down, down, down.", nulls=0).frame().shape
            (16, 3)
        """
        from tl_posgen.core.engine import analyze

        return analyze(model, prompts, measures=[self], **settings)[self.name]

    def describe(self, data: xr.Dataset) -> xr.Dataset:
        """Return the dataset with label, unit and description of every variable in its attributes (CF names)."""
        described = data.copy()
        for name, variable in self.variables.items():
            if name in described:
                described[name].attrs |= variable.attributes
        return described


def in_words(label: Any, words: Mapping[str, str]) -> str:
    """Return a label as readers see it; one without words as it is. A measure has it as its own method.

    Example:
        >>> words = {"no_rope": "RoPE removed", "triangle": "triangle of width"}
        >>> [in_words(label, words) for label in ("no_rope", "triangle_8", "no_rope at 0.3", "means")]
        ['RoPE removed', 'triangle of width 8', 'RoPE removed at 0.3', 'means']
    """
    label = str(label)
    name, _, number = label.rpartition("_")
    if number.isdigit() and name in words:
        return f"{words[name]} {number}"
    first = label.split(" ")[0].removesuffix(",")
    return words.get(label) or words.get(first, first) + label[len(first) :]


def paragraphs_of(cls: type) -> list[str]:
    """Return the paragraphs of a class's docstring, each as one line."""
    text = inspect.cleandoc(cls.__doc__ or cls.__name__)
    return [re.sub(r"\s+", " ", paragraph).strip() for paragraph in text.split("\n\n")]


def with_token_variants(values: Mapping[str, Any] | tuple[Mapping[str, Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return values by name; of a pair, those of all tokens and those without the first token along a first axis,
    padded with NaN to one shape. What the second lacks stays as it is.

    Example:
        >>> import torch
        >>> of_all = {"r": torch.tensor([0.5]), "a": torch.tensor([2.0])}
        >>> both = with_token_variants((of_all, {"r": torch.tensor([0.25])}))
        >>> both["r"].tolist(), both["a"].tolist()
        ([[0.5], [0.25]], [2.0])
    """
    import torch

    if not isinstance(values, tuple):
        return values
    of_all, without_first = values
    joined = dict(of_all)
    for name, value_without in without_first.items():
        value = of_all[name]
        shape = [max(sizes) for sizes in zip(value.shape, value_without.shape, strict=True)]
        joined[name] = torch.full((2, *shape), torch.nan, dtype=DOUBLE, device=value.device)
        for row, variant in zip(joined[name], (value, value_without), strict=True):
            row[tuple(map(slice, variant.shape))] = variant
    return joined
