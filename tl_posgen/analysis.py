"""The main job: prompts through a model once, every analyzer fed layer by layer, and the same for the null."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.analyzers.attention_examples import AttentionExamples, pick_heads
from tl_posgen.analyzers.base import Analyzer
from tl_posgen.analyzers.feed import Feed, measure
from tl_posgen.analyzers.registry import make_analyzers
from tl_posgen.errors import InputError
from tl_posgen.models.cache import captures_from_cache
from tl_posgen.models.hooks import capturing, chosen
from tl_posgen.models.load import load_model
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.report import Report
from tl_posgen.results import Result

Prompts = str | Sequence[str] | Int[Tensor, "batch pos"]


def analyze(
    model: Any,
    prompts: Prompts,
    *,
    analyzers: Sequence[str | Analyzer] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    length: int | None = None,
    n_prompts: int | None = None,
    null_seed: int | None = 0,
    examples: int = 2,
    progress: bool = True,
) -> Report:
    """Measure how a model's attention uses position: one forward pass per prompt, shared by all analyzers.

    Args:
        model: a HookedTransformer or TransformerBridge, or a name or directory for `load_model`.
        prompts: a text, texts, or token ids [batch, pos]. A text is tokenised with the tokenizer's own special tokens.
        analyzers: names or analyzer objects (see `tl_posgen.analyzers.base.Analyzer`); the three of the foundation
            (three_axis, variance, mean_key) if left out.
        layers, heads: restrict the analysis; all if left out. Heads are meant in every chosen layer.
        length, n_prompts: cut texts into n_prompts consecutive prompts of `length` tokens.
        null_seed: seed of the randomly initialised model of the same shape that every measure is repeated on; None
            skips it.
        examples: how many of the most and of the least position-driven heads to show token by token; 0 for none.
        progress: show a progress bar.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: unusable prompts, layers or heads that do not exist, unknown analyzers.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", null_seed=None)
        >>> report["variance"].frame().columns[:3].tolist()
        ['layer', 'head', 'position']
    """
    if isinstance(model, str):
        model = load_model(model)
    feeding = make_analyzers(analyzers)
    chosen(layers, model.cfg.n_layers, "layer")
    chosen(heads, model.cfg.n_heads, "head")
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    where = {"layers": layers, "heads": heads, "progress": progress}
    fresh = copy.deepcopy(feeding)
    datasets = measure(model, tokens, feeding, **where)
    nulls: dict[str, xr.Dataset] = {}
    if null_seed is not None:
        null_model = random_like(model, null_seed)
        nulls = measure(null_model, tokens, fresh, **where, label=null_label(null_seed))
        del null_model
    if examples and "three_axis" in datasets:
        picked = pick_heads(datasets["three_axis"], examples)
        analyzer = AttentionExamples(picked, token_strings(model, tokens[0]))
        example_layers = sorted({layer for layer, _, _ in picked})
        datasets |= measure(model, tokens[:1], [analyzer], layers=example_layers, progress=False)
    return as_report(datasets, nulls, provenance_of(model, tokens, null_seed))


@contextmanager
def attach(
    model: Any,
    analyzers: Sequence[str | Analyzer] | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator["Run"]:
    """Register analyzers as hooks: any forward pass inside the block feeds them, beside the user's own hooks.

    Prompts of one batch must have one length (no padding) and fit no KV cache. The hooks are removed at the end of the
    block, whatever happens inside.

    Yields:
        A `Run`; its `report()` may be called inside or after the block.

    Example:
        >>> import torch, tl_posgen
        >>> model = tl_posgen.load_model("mini")
        >>> with tl_posgen.attach(model, ["three_axis"]) as run:
        ...     _ = model(torch.arange(40)[None])
        >>> run.report()["three_axis"].frame().shape[0] == 16
        True
    """
    run = Run(model, make_analyzers(analyzers), layers, heads)
    with capturing(model, run.feed, needs=run.feed.needs, layers=layers, heads=heads):
        yield run


class Run:
    """The analyzers attached to a model, and what they have been fed so far."""

    def __init__(self, model: Any, analyzers: Sequence[Analyzer], layers: Any, heads: Any):
        self.model, self.layers, self.heads = model, layers, heads
        self.feed, self._fresh = Feed(analyzers), copy.deepcopy(list(analyzers))

    def report(self, *, null_seed: int | None = None) -> Report:
        """What was found. With a null_seed the same tokens also go, unhooked, through a randomly initialised model."""
        datasets, nulls = self.feed.datasets(model_label(self.model), self.model), {}
        tokens = self.feed.known_prompts()
        if null_seed is not None:
            if len(tokens) < len(self.feed.prompts):
                raise InputError("null_seed: some forward passes were not given token ids; run the null yourself")
            null_model = random_like(self.model, null_seed)
            where = {"layers": self.layers, "heads": self.heads, "progress": False}
            nulls = measure(null_model, tokens, copy.deepcopy(self._fresh), **where, label=null_label(null_seed))
        return as_report(datasets, nulls, provenance_of(self.model, tokens, null_seed))


def analyze_cache(
    model: Any,
    cache: Any,
    *,
    analyzers: Sequence[str | Analyzer] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Report:
    """Measure from an existing ActivationCache of `model.run_with_cache`; no forward pass is made, and no null.

    The names that the cache must hold are `tl_posgen.models.cache.needed_names(model)`.
    """
    feed = Feed(make_analyzers(analyzers))
    for capture in captures_from_cache(cache, model, layers=layers, heads=heads):
        feed(capture)
    return as_report(feed.datasets(model_label(model), model), {}, provenance_of(model, feed.known_prompts(), None))


def as_report(
    datasets: Mapping[str, xr.Dataset], nulls: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]
) -> Report:
    results = {name: Result(name, data, nulls.get(name), provenance) for name, data in datasets.items()}
    return Report(results, provenance)
