"""Forward passes that are the user's own: measured while they run, or from a cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tl_posgen import registry
from tl_posgen.analysis import Measures, prepared, require_prompts, supported
from tl_posgen.errors import InputError
from tl_posgen.feed import Feed, one_pass
from tl_posgen.measure import Request
from tl_posgen.models.capture.cache import captures_from_cache
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.provenance import model_label, provenance_of
from tl_posgen.models.selection import select_heads
from tl_posgen.models.wrapped import wrap
from tl_posgen.null import RandomInits, check_seed
from tl_posgen.procedure import as_result
from tl_posgen.result import Report


@contextmanager
def attach(
    model: Any,
    measures: Measures = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    seed: int = 0,
) -> Iterator["Run"]:
    """Register measures as hooks: any forward pass inside the block feeds them, beside the user's own hooks.

    What is measured is what the pass ends up with, whatever the order in which hooks were added: under edited scores
    measures of scores and patterns take those, and measures of queries and keys refuse; under an edited pattern
    measures of patterns take that; the results say so. Every forward pass counts as a prompt, also those that
    `generate(use_past_kv_cache=False)` makes, one a token, on both kinds of model. Padding is left out where a
    mask or a padding token of its own tells it. A KV cache is refused. The hooks are removed at the end of the block,
    whatever happens inside. Measures that run the model themselves cannot be attached.

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
    run = Run(model, collecting(measures, "attach", model), layers, heads, check_seed(seed))
    with capturing(model, run.feed, needs=run.feed.needs, layers=layers, heads=heads):
        yield run


def collecting(measures: Measures, where: str, model: Any) -> list[Request]:
    """The measures that forward passes of somebody else can feed; of the usual ones, those that can."""
    wrap(model)  # refuse what is no model
    requests = registry.requested(measures)
    if measures is None:
        requests = [request for request in requests if attachable(request)]
    for request in requests:
        if not attachable(request):
            raise InputError(f"{where}: {request.name} runs the model itself; call it, or name it in analyze")
        if "logits" in request.measure.needs:
            raise InputError(
                f"{where}: {request.name} needs the logits of whole prompts; call it, or name it in analyze"
            )
    return supported(requests, model, skip=False)


def attachable(request: Request) -> bool:
    """Return whether forward passes of somebody else give all that a measure needs."""
    return request.measure.collector is not None and request.measure.procedure is None


class Run:
    """The measures attached to a model, and what they have been fed so far."""

    def __init__(self, model: Any, requests: Sequence[Request], layers: Any, heads: Any, seed: int):
        self.model, self.requests, self.seed = model, requests, seed
        self.where: dict[str, Any] = {"layers": layers, "heads": heads}
        self.feed = Feed(requests, seed)

    def report(self, *, null_seeds: Sequence[int] = ()) -> Report:
        """What was found. With null_seeds the same tokens also go, unhooked, through randomly initialised models."""
        n_layers = len(select_heads(self.model, **self.where))
        sides = [self.feed.datasets(self.model, model_label(self.model), n_layers)]
        require_prompts(self.requests, self.feed.captured_prompts())
        for request in self.requests:
            prepared(request, self.model, self.feed.captured_prompts())
        tokens, random_inits = self.feed.known_prompts(), RandomInits(self.model, null_seeds)
        if null_seeds and len(tokens) < len(self.feed.prompts):
            raise InputError("null_seeds: some forward passes were not given token ids; run the null yourself")
        for label, other in random_inits.models():
            again = {**self.where, "seed": self.seed, "label": label}
            sides.append(one_pass(other, tokens, self.requests, **again))
        provenance = provenance_of(self.model, tokens, random_inits, self.seed) | self.feed.counted()
        named = {one.name: as_result(one, [side[one.name] for side in sides], provenance) for one in self.requests}
        return Report(named, provenance)


def analyze_cache(
    model: Any,
    cache: Any,
    *,
    tokens: Any = None,
    measures: Measures = None,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    seed: int = 0,
) -> Report:
    """Measure from an existing ActivationCache of `model.run_with_cache`; no forward pass is made, and no null.

    The names that the cache must hold are `tl_posgen.models.needed_names(model, needs=...)`.

    Args:
        tokens: the ids that were run [batch, pos], or what the tokenizer returned (input_ids and attention_mask); of a
            single prompt they may be left out. Padding is left out by them.

    Raises:
        InputError: the cache lacks what a measure needs (the message names the hook); several prompts without `tokens`.
        UnsupportedModelError: the cached scores or pattern are not those of the cached q and k, which a measure needs.
    """
    requests = collecting(measures, "analyze_cache", model)
    feed = Feed(requests, seed := check_seed(seed))
    for capture in captures_from_cache(cache, model, layers=layers, heads=heads, tokens=tokens, needs=feed.needs):
        feed(capture)
    datasets = feed.datasets(model, model_label(model))
    require_prompts(requests, feed.captured_prompts())
    provenance = provenance_of(model, feed.known_prompts(), (), seed) | feed.counted()
    return Report({one.name: as_result(one, [datasets[one.name]], provenance) for one in requests}, provenance)
