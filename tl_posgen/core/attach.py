"""Forward passes that are the user's own: measured while they run, or from a cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tl_posgen.core import registry
from tl_posgen.core.engine import Measures, require_prompts, supported
from tl_posgen.core.feed import Feed, one_pass
from tl_posgen.core.inits import result_of
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, Nulls
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.report import Report
from tl_posgen.core.run import Run
from tl_posgen.editing.given import every_hook_firing
from tl_posgen.errors import InputError, check_seed
from tl_posgen.models.capture.cache import captures_from_cache
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import session_of


@contextmanager
def attach(
    model: Model, measures: Measures = None, *, layers: Layers = None, heads: Heads = None, seed: int = 0
) -> Iterator["Attached"]:
    """Register measures as hooks: any forward pass inside the block feeds them, beside the user's own hooks.

    The scores that the pass ends up with are measured, whatever the order in which hooks were added: under edited
    scores measures of scores and patterns take those, and measures of queries and keys refuse; under an edited pattern
    measures of patterns take that; the results say so. Every forward pass counts as a prompt, also those that
    `generate(use_past_kv_cache=False)` makes, one a token, on both kinds of model. Padding is left out where a
    mask or a padding token of its own tells it. Refused are a KV cache, and passes under a hook that fires nowhere. The
    hooks are removed at the end of the block, whatever happens inside. Measures that run the model themselves cannot be
    attached.

    Yields:
        An `Attached`; its `report()` may be called inside or after the block.

    Example:
        >>> import torch, tl_posgen
        >>> model = tl_posgen.load_model("mini")
        >>> with tl_posgen.attach(model, ["three_axis"]) as run:
        ...     _ = model(torch.arange(40)[None])
        >>> run.report()["three_axis"].frame().shape[0] == 16
        True
    """
    run = Attached(model, _collecting(measures, "attach", model), layers, heads, check_seed(seed))
    with every_hook_firing(model), capturing(model, run.feed, needs=run.feed.needs, layers=layers, heads=heads):
        yield run


def _collecting(measures: Measures, where: str, model: Any) -> list[Measure]:
    """Return measures that a user's own forward passes can feed; of the usual ones, all that need no more."""
    session = session_of(model)
    requested = [measure.attached(session) for measure in registry.requested(measures)]
    if measures is None:
        requested = [measure for measure in requested if measure.is_fed and not measure.runs_model]
    for measure in requested:
        if measure.runs_model:
            raise InputError(f"{where}: {measure.name} runs the model itself; call it, or name it in analyze")
        if "logits" in measure.needs:
            raise InputError(
                f"{where}: {measure.name} needs the logits of whole prompts; call it, or name it in analyze"
            )
    return supported(requested, session, skip=False)


class Attached:
    """Measures attached to a model, and what they have been fed so far."""

    def __init__(self, model: Any, measures: Sequence[Measure], layers: Any, heads: Any, seed: int):
        self.model, self.measures, self.seed = model, measures, seed
        self.where: dict[str, Any] = {"layers": layers, "heads": heads}
        self.feed = Feed(measures, seed=seed)
        for measure in measures:
            measure.refuse(Run(measure, session_of(model), None, [], self.where, seed))

    def report(self, *, nulls: Nulls = 0) -> Report:
        """Return what was found. The same tokens also go, unhooked, through null models, where these are asked for as
        in `analyze`."""
        feed, null_models = self.feed, NullModels(self.model, nulls)
        n_layers = len(select_heads(self.model, **self.where))
        by_init = {TRAINED: feed.datasets(null_models.session.label, n_layers)}
        token_ids = [tokens for tokens in feed.prompts.values() if tokens is not None]
        if null_models and len(token_ids) < len(feed.prompts):
            raise InputError("nulls: some forward passes were not given token ids; run the null model yourself")
        # a prompt whose token ids are not known has its length
        rows = [torch.zeros(feed.lengths[n]).long() if ids is None else ids for n, ids in feed.prompts.items()]
        for measure in self.measures:
            require_prompts(measure, null_models.session, rows)
        prepared = [measure.prepare(null_models.session, rows) for measure in self.measures]
        for init, (title, null_model) in zip(null_models, null_models.models(), strict=True):
            by_init[init] = one_pass(
                session_of(null_model), token_ids, self.measures, **self.where, label=title, seed=self.seed
            )
        provenance = provenance_of(null_models.session, token_ids, null_models.by_kind, self.seed)
        lengths = sorted(set(feed.lengths.values()))
        provenance |= {"prompts": len(rows), "length": lengths[0] if len(lengths) == 1 else lengths}
        if len(token_ids) < len(rows):
            provenance["tokens_sha256"] = None
        results = {}
        for measure in prepared:
            of_measure = {init: datasets[measure.name] for init, datasets in by_init.items()}
            results[measure.name] = result_of(measure, of_measure, provenance)
        return Report(results, provenance)


def analyze_cache(
    model: Model,
    cache: Any,
    *,
    tokens: Any = None,
    measures: Measures = None,
    layers: Layers = None,
    heads: Heads = None,
    seed: int = 0,
) -> Report:
    """Measure from an existing ActivationCache of `model.run_with_cache`; no forward pass is made, and no null.

    The names that the cache must hold are `tl_posgen.models.needed_names(model, needs=...)`.

    Args:
        tokens: the ids that were run [batch, pos], or what the tokenizer returned (input_ids and attention_mask); of a
            single prompt they may be left out. Padding is left out by them. They and the cache may lie on any devices.

    Raises:
        InputError: the cache lacks what a measure needs (the message names the hook); several prompts without `tokens`.
        UnsupportedModelError: the cached scores or pattern are not those of the cached q and k, which a measure needs.
    """
    run = Attached(model, _collecting(measures, "analyze_cache", model), layers, heads, check_seed(seed))
    needs = run.feed.needs
    for capture in captures_from_cache(cache, model, layers=layers, heads=heads, tokens=tokens, needs=needs):
        run.feed(capture)
    return run.report()
