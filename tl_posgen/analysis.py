"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen import registry
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.measure import Collector, Measure, Options, Request, require
from tl_posgen.models import open_model
from tl_posgen.models.cache import captures_from_cache
from tl_posgen.models.capture import EditedCapture, LayerCapture
from tl_posgen.models.capturing import capturing, run_capture
from tl_posgen.models.load import is_ours
from tl_posgen.models.provenance import model_label, provenance_of
from tl_posgen.models.selection import select_heads
from tl_posgen.models.streaming import chosen
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.models.weights import release
from tl_posgen.models.wrapped import wrap
from tl_posgen.null import RandomInits, check_seed, random_inits_of
from tl_posgen.result import Report, Result

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | Options | Request | Sequence[Any] | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a measure is to be taken: what every procedure is told beside its model, prompts and options.

    Attributes:
        layers, heads, length, n_prompts, seed, progress: as in `analyze`.
        random_inits: the null models.
        after: results of the same run, those that the measure names in `after`; without their random inits, which are
            measured when everything has been measured of the model.
        later: what `result` was given, by measure: taken of every random init when its turn comes.
    """

    layers: Sequence[int] | None = None
    heads: Any = None
    length: int | None = None
    n_prompts: int | None = None
    seed: int = 0
    random_inits: RandomInits
    progress: bool = True
    after: Mapping[str, Result] = field(default_factory=dict)
    later: dict[str, Callable[..., xr.Dataset]] = field(default_factory=dict)

    def result(
        self,
        request: Request,
        model: Any,
        tokens: Sequence[Int[Tensor, " _"]],
        of_model: Callable[..., xr.Dataset],
    ) -> Result:
        """`of_model(model, label, after)` of the model as a Result; `analyze` adds that of every random init.

        `after` is what `job.after` holds of that model: dataset by name.
        """
        dataset = of_model(model, model_label(model), {name: one.dataset for name, one in self.after.items()})
        self.later[request.name] = of_model
        chosen = references(select_heads(model, self.layers, self.heads), self.layers, self.heads)
        return as_result(request, [dataset], provenance_of(model, tokens, self.random_inits, self.seed) | chosen)


def analyze(
    model: Any,
    prompts: Prompts,
    *,
    measures: Measures = None,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    length: int | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    after: Mapping[str, Result] | None = None,
    skip_unsupported: bool = False,
    streaming: bool | None = None,
    progress: bool = True,
) -> Report:
    """Measure how a model's attention uses position: one forward pass per prompt, shared by all that one pass can give.

    Args:
        model: a HookedTransformer or TransformerBridge; or a name or directory for `load_model`, or a `Pretrained`:
            what is loaded here makes room for its random inits when it has been measured.
        prompts: a text, texts, token ids [batch, pos], or what a Hugging Face tokenizer returns. A text is tokenised
            with the tokenizer's own special tokens. Padding is left out, see `tl_posgen.models.tokens.to_prompts`.
        measures: names, `Measure`s, or options such as `ThreeAxis(ridge=1)`; three_axis, variance, mean_key and
            attention_examples if left out. `tl_posgen.registry.names()` lists them.
        layers: restrict the analysis; all if left out.
        heads: indices, meant in every chosen layer; or (layer, head) pairs; or a frame with columns layer and head,
            such as `report.heads("slash", top=5)`. All if left out.
        length, n_prompts: cut texts into n_prompts consecutive prompts of `length` tokens.
        seed: of random draws.
        null_seeds: seeds of the randomly initialised models of the same shape that everything is repeated on; () for
            none.
        after: finished results (a `Report`, say) of the same model, prompts and null_seeds: what a measure needs of
            them is taken from there and not measured again.
        skip_unsupported: leave out measures that cannot be had of this model, with a word, instead of refusing.
        streaming: whether forward passes form no [query, key] matrix, see `tl_posgen.streaming`; if left out, those of
            prompts longer than 1,024 tokens where the model allows it.
        progress: show progress bars.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: unusable prompts, layers or heads that do not exist, unknown measures.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", null_seeds=())
        >>> report["variance"].frame().columns[:3].tolist()
        ['layer', 'head', 'position']
    """
    seed = check_seed(seed)
    require("streaming", streaming, bool | None)
    known = check_after(after)
    asked = registry.requested(measures)
    for request in asked:
        require_options(request, known.get(request.name))
    requests = [request for request in asked if request.name not in known]
    ours, precise = is_ours(model), any(request.measure.precise for request in requests)
    model = open_model(model, precise=precise)
    matrices = max((request.measure.matrices for request in requests), default=0)
    with wrap(model).exclusive("analyze"), chosen(streaming, matrices):
        requests = supported(requests, model, skip_unsupported)
        selected = select_heads(model, layers, heads)
        random_inits = random_inits_of(model, null_seeds)
        where: dict[str, Any] = {"layers": layers, "heads": heads, "progress": progress}
        shared = [request for request in requests if request.measure.collector is not None]
        results: dict[str, Result] = {}
        tokens: list[Tensor] = []
        provenance: Mapping[str, Any] = {}
        if shared or known:  # what runs the model itself may cut the text in its own way
            tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
            require_prompts(requests, tokens)
            provenance = provenance_of(model, tokens, random_inits, seed) | references(selected, layers, heads)
            for name, result in known.items():
                require_same(name, result, provenance)
        if shared:
            own = one_pass(model, tokens, shared, **where, seed=seed, label=model_label(model))
            results = {request.name: as_result(request, [own[request.name]], provenance) for request in shared}
        later: dict[str, Callable[..., xr.Dataset]] = {}
        for request in requests:
            if request.measure.procedure is None:
                continue
            job = Job(
                **where,
                length=length,
                n_prompts=n_prompts,
                seed=seed,
                random_inits=random_inits,
                after={name: results.get(name) or known[name] for name in request.measure.after},
                later=later,
            )
            results[request.name] = request.measure.procedure(model, prompts, request, job)
        sides: list[dict[str, xr.Dataset]] = []
        for label, other in random_inits.models(in_place=ours) if shared or later else ():
            side = {name: one.nulls[len(sides)] for name, one in known.items() if one.nulls}
            if shared:
                side |= one_pass(other, tokens, shared, **where, seed=seed, label=label)
            for request in requests:
                if request.name in later:
                    found_before = {name: side[name] for name in request.measure.after}
                    side[request.name] = later[request.name](other, label, found_before)
            sides.append(side)
        for request in (request for request in requests if request in shared or request.name in later):
            nulls = tuple(request.measure.describe(side[request.name]) for side in sides)
            results[request.name] = replace(results[request.name], nulls=nulls)
        if random_inits is not null_seeds:
            random_inits.let_go()
        if ours:
            release(model)
        whole = {**known, **results}
        found = {request.name: whole[request.name] for request in asked if request.name in whole}
        return Report(found, provenance or next(iter(found.values())).provenance)


def references(selected: Mapping[int, Sequence[int]], layers: Any, heads: Any) -> dict[str, Any]:
    """What the provenance says of chosen heads: nothing of all, else their references such as "3.6"."""
    if layers is None and heads is None:
        return {}
    return {"heads": [f"{layer}.{head}" for layer, chosen in selected.items() for head in chosen]}


def check_after(after: Any) -> dict[str, Result]:
    """Finished results by name; InputError for anything else."""
    known = dict(after) if isinstance(after, Mapping) else {} if after is None else None
    if known is None or not all(isinstance(one, Result) and one.name == name for name, one in known.items()):
        raise InputError("after: give a Report, or a mapping of measure name to its Result")
    return known


def require_options(request: Request, known: Result | None) -> None:
    """Refuse a finished result of other options than are asked for."""
    if known is not None and (then := known.provenance.get("options", {})) != (now := request.as_dict()):
        raise InputError(f"after: {request.name} was measured with {then}, and is asked for with {now}; leave it out")


def require_same(name: str, result: Result, provenance: Mapping[str, Any]) -> None:
    """Refuse a finished result of another model, other prompts or other random inits."""
    for key in ("weights", "backend", "dtype", "tokens_sha256", "null_seeds", "heads"):
        then, now = (one.get(key, "all") for one in (result.provenance, provenance))
        if then != now:
            raise InputError(
                f"after: {name} was measured with another {key} ({then}, now {now}); leave it out to measure it anew"
            )


def supported(requests: Sequence[Request], model: Any, skip: bool) -> list[Request]:
    """The measures that can be had of this model; others are refused, or with `skip` said on the progress bar's stream.

    Raises:
        UnsupportedModelError: such a measure; with `skip`, where it leaves none of them.
    """
    refused: dict[str, UnsupportedModelError] = {}
    for request in requests:
        try:
            request.measure.requires(model)
            if lacking := [name for name in request.measure.after if name in refused]:
                raise refused[lacking[0]]
        except UnsupportedModelError as reason:
            if not skip:
                raise
            refused[request.name] = reason
    if refused and len(refused) == len(requests):
        raise UnsupportedModelError("; ".join(f"{name} cannot be had: {reason}" for name, reason in refused.items()))
    for name, reason in refused.items():
        tqdm.write(f"{name} is left out: {reason}")
    return [request for request in requests if request.name not in refused]


def one_pass(
    model: Any,
    tokens: Sequence[Int[Tensor, " _"]],
    requests: Sequence[Request],
    *,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    seed: int = 0,
    progress: bool = True,
    label: str,
) -> dict[str, xr.Dataset]:
    """Every prompt through the model once, each layer handed to each collector; datasets by measure name."""
    feed = Feed(requests, seed)
    for prompt in tqdm(tokens, desc=label, unit="prompt", disable=not progress):
        feed.first_prompt = len(feed.prompts)
        logits = run_capture(model, prompt[None], feed, needs=feed.needs, layers=layers, heads=heads)
        if logits is not None:
            feed.finish(prompt, logits[0])
    return feed.datasets(model, label, len(select_heads(model, layers, heads)))


class Feed:
    """Hands every captured layer to every collector, and remembers the prompts."""

    def __init__(self, requests: Sequence[Request], seed: int = 0):
        self.collectors: dict[str, Collector] = {request.name: request.collect(seed) for request in requests}
        self.finishing = [self.collectors[one.name] for one in requests if "logits" in one.measure.needs]
        self.needs = frozenset[str]().union(*(request.measure.needs for request in requests))
        self.prompts: dict[int, Int[Tensor, " pos"] | None] = {}
        self.layers: dict[int, int] = {}  # prompt -> how many of its layers were captured
        self.edits: dict[int, str] = {}  # layer -> how its scores differ from those of its queries and keys
        self.edited_patterns: set[int] = set()  # layers whose pattern is not the softmax of its scores
        self.of_patterns = {request.name for request in requests if "pattern" in request.measure.needs}
        self.proved = True
        self.first_prompt = 0
        self.lengths: dict[int, int] = {}

    def __call__(self, capture: LayerCapture) -> None:
        capture.prompt += self.first_prompt
        self.prompts.setdefault(capture.prompt, capture.tokens)
        self.lengths.setdefault(capture.prompt, capture.length)
        self.proved &= capture.proved
        if isinstance(capture, EditedCapture):
            self.edits.setdefault(capture.layer, capture.why)
        if capture.edited_pattern:
            self.edited_patterns.add(capture.layer)
        self.layers[capture.prompt] = self.layers.get(capture.prompt, 0) + 1
        for collector in self.collectors.values():
            collector.update(capture)

    def finish(self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocabulary"]) -> None:
        """Hand the logits of a whole prompt to the collectors that need them."""
        for collector in self.finishing:
            collector.finish(tokens, logits)

    def counted(self) -> dict[str, Any]:
        """What the provenance says of all prompts, whether or not their token ids are known."""
        lengths = sorted(set(self.lengths.values()))
        return {"prompts": len(self.prompts), "length": lengths[0] if len(lengths) == 1 else lengths}

    def known_prompts(self) -> list[Int[Tensor, " _"]]:
        return [tokens for tokens in self.prompts.values() if tokens is not None]

    def datasets(self, model: Any, label: str, n_layers: int | None = None) -> dict[str, xr.Dataset]:
        """What every collector found, by name; token ids have their texts beside them.

        Args:
            n_layers: how many layers were asked for of each prompt; as many as any had, if left out.
        """
        if not self.prompts:
            raise InputError("no forward pass was captured: run the model on tokens inside the `with` block")
        whole = max(self.layers.values()) if n_layers is None else n_layers
        if short := [prompt for prompt, layers in self.layers.items() if layers < whole]:
            raise InputError(
                f"prompt {short[0]} was captured in {self.layers[short[0]]} of {whole} layers: its forward pass ended "
                "early (an error, or stop_at_layer), and is in the averages of those layers; attach anew"
            )
        said: dict[str, Any] = {"model": label} | ({} if self.proved else {"unproved": 1})
        if self.edits:
            layers = sorted(self.edits)
            said |= {"edited_layers": layers, "edited": self.edits[layers[0]]}
        found = {name: one.dataset().assign_attrs(said) for name, one in self.collectors.items()}
        for name in self.of_patterns if self.edited_patterns else ():
            found[name] = found[name].assign_attrs(edited_patterns=sorted(self.edited_patterns))
        return {name: with_token_texts(dataset, model) for name, dataset in found.items()}


def with_token_texts(dataset: xr.Dataset, model: Any) -> xr.Dataset:
    """The dataset with the text of its tokens beside each variable that holds token ids: `<name>_text`."""
    texts: dict[str, tuple] = {}
    for name, array in dataset.variables.items():
        if array.attrs.get("holds") != "token ids":
            continue
        ids, place = np.unique(array.values, return_inverse=True)
        known = ids[ids >= 0]  # -1 fills up where there are fewer than elsewhere
        words = [""] * (len(ids) - len(known)) + token_strings(model, torch.from_numpy(known))
        texts[f"{name}_text"] = (array.dims, np.array(words, dtype=object)[place].reshape(array.shape))
    return dataset.assign(texts)


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
    run = Run(model, collecting(measures, "attach"), layers, heads, seed)
    with capturing(model, run.feed, needs=run.feed.needs, layers=layers, heads=heads):
        yield run


def collecting(measures: Measures, where: str) -> list[Request]:
    """The measures that forward passes of somebody else can feed; of the usual ones, those that can."""
    requests = registry.requested(measures)
    if measures is None:
        requests = [request for request in requests if request.measure.collector is not None]
    for request in requests:
        if request.measure.collector is None:
            raise InputError(f"{where}: {request.name} runs the model itself; call it, or name it in analyze")
    return requests


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
        tokens, random_inits = self.feed.known_prompts(), RandomInits(self.model, null_seeds)
        if null_seeds and len(tokens) < len(self.feed.prompts):
            raise InputError("null_seeds: some forward passes were not given token ids; run the null yourself")
        for label, other in random_inits.models():
            again = {**self.where, "seed": self.seed, "progress": False, "label": label}
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
    requests = collecting(measures, "analyze_cache")
    feed = Feed(requests, seed)
    for capture in captures_from_cache(cache, model, layers=layers, heads=heads, tokens=tokens, needs=feed.needs):
        feed(capture)
    datasets = feed.datasets(model, model_label(model))
    provenance = provenance_of(model, feed.known_prompts(), (), seed) | feed.counted()
    return Report({one.name: as_result(one, [datasets[one.name]], provenance) for one in requests}, provenance)


def as_result(request: Request, datasets: Sequence[xr.Dataset], provenance: Mapping[str, Any]) -> Result:
    """A Result of a model's dataset and those of its random inits, every variable described."""
    measure = request.measure
    own, *nulls = (measure.describe(dataset) for dataset in datasets)
    registered = registry.find(request.name) is measure
    options = {"options": request.as_dict()} if request.options else {}
    return Result(request.name, own, tuple(nulls), {**provenance, **options}, declared=None if registered else measure)


def require_prompts(requests: Sequence[Request], tokens: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse prompts that a measure cannot be had of, before anything runs."""
    for request in requests:
        if len(tokens) < (least := request.measure.min_prompts):
            raise InputError(
                f"{request.name} compares prompts: {least} at least, not {len(tokens)}; give n_prompts={least}"
            )
        request.measure.check_prompts(request.options, tokens)
