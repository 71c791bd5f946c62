"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen import registry
from tl_posgen.core.result import Result as NewResult
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks.given import Hooks, check_hooks
from tl_posgen.measure import Measure, Request
from tl_posgen.measuring import Measuring
from tl_posgen.models import open_model
from tl_posgen.models.conversion.weights import release
from tl_posgen.models.loading.load import is_ours
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.selection import select_heads
from tl_posgen.models.streaming.stream import chosen
from tl_posgen.models.tokens import to_prompts
from tl_posgen.models.wrapped import wrap
from tl_posgen.null import RandomInits, check_seed, check_seeds, random_inits_of
from tl_posgen.options import Options, require
from tl_posgen.parts import Parts, configuration_of, refuse_hooks
from tl_posgen.procedure import references
from tl_posgen.progress import Passes
from tl_posgen.result import Report, Result

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | Options | Request | Sequence[Any] | None


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
    fwd_hooks: Hooks = (),
    after: Mapping[str, Result] | None = None,
    skip_unsupported: bool = False,
    streaming: bool | None = None,
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Report:
    """Measure how a model's attention uses position: one forward pass per prompt, shared by all that one pass can give.

    Args:
        model: a HookedTransformer or TransformerBridge; or a name or directory for `load_model`, or a `Pretrained`:
            what is loaded here makes room for its random inits when it has been measured.
        prompts: a text, texts, token ids [batch, pos], or what a Hugging Face tokenizer returns. A text is tokenised
            with the tokenizer's own special tokens. Padding is left out, see `tl_posgen.models.tokens.to_prompts`.
        measures: names, `Measure`s, or options such as `ThreeAxis(ridge=1)`; three_axis, variance, mean_key
            and attention_examples if left out. `tl_posgen.registry.names()` lists them.
        layers: restrict the analysis; all if left out.
        heads: indices, meant in every chosen layer; or (layer, head) pairs; or a frame with columns layer and head,
            such as `report.heads("slash", top=5)`. All if left out.
        length, n_prompts: cut texts into n_prompts consecutive prompts of `length` tokens.
        seed: of random draws.
        null_seeds: seeds of the randomly initialised models of the same shape that everything is repeated on; () for
            none.
        fwd_hooks: hooks under which everything is measured, as TransformerLens takes them: (name of a hook point or a
            function that chooses names, hook) each; the random inits under the same. Beside the report of the intact
            model, `tl_posgen.compare` shows what they change.
        after: finished results (a `Report`, say) of the same model, prompts and null_seeds: what a measure needs of
            them is taken from there and not measured again.
        skip_unsupported: leave out measures that cannot be had of this model, with a word, instead of refusing.
        streaming: whether forward passes form no [query, key] matrix, see `tl_posgen.streaming`; if left out, those of
            prompts longer than 1,024 tokens where the model allows it.
        keep: directory for finished parts: what the measures that share a pass, and each of the others, found of the
            model and of each random init. An analysis that was stopped goes on from there when it is called again with
            the same weights, prompts and settings; measures of other packages, and what shares their pass, are
            measured anew.
        progress: show a bar of the forward passes, and say early how long it takes if that is more than 20 s.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: unusable prompts, layers or heads that do not exist, unknown measures, hook points; `keep` with
            hooks; a finished part that is damaged: the message names its file.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", null_seeds=())
        >>> report["variance"].frame().columns[:3].tolist()
        ['layer', 'head', 'position']
    """
    seed = check_seed(seed)
    if not isinstance(null_seeds, RandomInits):
        check_seeds(null_seeds)
    require("streaming", streaming, bool | None)
    known = check_after(after)
    asked = registry.requested(measures)
    for request in asked:
        require_options(request, known.get(request.name))
    requests = [request for request in asked if request.name not in known]
    ours, precise = is_ours(model), any(request.measure.precise for request in requests)
    model = open_model(model, precise=precise)
    hooked = {"fwd_hooks": named} if (named := check_hooks(model, fwd_hooks)) else {}
    keeping = Parts.of(keep)
    if keep is not None:
        refuse_hooks(model, hooked)
    matrices = max((request.measure.matrices for request in requests), default=0)
    passes = Passes(shown=progress, models=1 + len(null_seeds))
    with wrap(model).exclusive("analyze"), chosen(streaming, matrices), passes, keeping as parts:
        requests = supported(requests, model, skip_unsupported)
        selected = select_heads(model, layers, heads)
        random_inits = random_inits_of(model, null_seeds)
        cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "seed": seed}
        tokens: list[Tensor] = []
        provenance: dict[str, Any] = {}
        if known or any(request.measure.collector for request in requests):  # a procedure may cut in its own way
            tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
            require_prompts(requests, tokens)
            requests = [prepared(request, model, tokens) for request in requests]
            provenance = provenance_of(model, tokens, random_inits, seed) | references(selected, layers, heads) | hooked
            for name, result in known.items():
                require_same(name, result, provenance)
        configuration: dict[str, Any] = {}
        if parts.directory is not None:
            listed = layers if layers is None or isinstance(layers, int) else list(layers)
            chosen_heads = {"layers": listed, "all_heads": heads is None, "heads": selected}
            configuration = configuration_of(model, prompts, **cut, **chosen_heads, tokens=tokens, streaming=streaming)
        whole = Measuring(
            model=model,
            prompts=prompts,
            requests=requests,
            tokens=tokens,
            known=known,
            provenance=provenance,
            where={"layers": layers, "heads": heads},
            cut=cut,
            hooks=fwd_hooks,
            named=hooked,
            random_inits=random_inits,
            in_place=ours,
            passes=passes,
            parts=parts,
            configuration=configuration,
        ).run()
        if random_inits is not null_seeds:
            random_inits.let_go()
        if ours:
            release(model)
        found = {request.name: whole[request.name] for request in asked if request.name in whole}
        return Report(found, provenance or next(iter(found.values())).provenance)


def prepared(request: Request, model: Any, tokens: Sequence[Tensor]) -> Request:
    """Return the request with options that were left out filled in for these prompts."""
    if request.measure.kind is None or request.measure.collector is None:
        return request
    return Request(request.measure, request.options.prepare(model, tokens))


def check_after(after: Any) -> dict[str, Result]:
    """Finished results by name; InputError for anything else."""
    known = dict(after) if isinstance(after, Mapping) else {} if after is None else None
    if known is None or not all(
        isinstance(one, Result | NewResult) and one.name == name for name, one in known.items()
    ):
        raise InputError("after: give a Report, or a mapping of measure name to its Result")
    return known


def require_options(request: Request, known: Result | None) -> None:
    """Refuse a finished result of other options than are asked for."""
    if known is not None and (then := known.provenance.get("options", {})) != (now := request.as_dict()):
        raise InputError(f"after: {request.name} was measured with {then}, and is asked for with {now}; leave it out")


def require_same(name: str, result: Result, provenance: Mapping[str, Any]) -> None:
    """Refuse a finished result of another model, other prompts or other random inits."""
    for key in ("weights", "backend", "dtype", "tokens_sha256", "null_seeds", "heads", "fwd_hooks"):
        then, now = (one.get(key, "all" if key == "heads" else "none") for one in (result.provenance, provenance))
        if then != now:
            raise InputError(
                f"after: {name} was measured with another {key} ({then}, now {now}); leave it out to measure it anew"
            )


def supported(requests: Sequence[Request], model: Any, skip: bool) -> list[Request]:
    """The measures that can be had of this model; others are refused, or with `skip` said on the progress bar's stream.

    Raises:
        UnsupportedModelError: such a measure; with `skip`, where it leaves none of them.
    """
    refused = refusals(requests, model)
    if refused and not skip:
        raise next(iter(refused.values()))
    if refused and len(refused) == len(requests):
        raise UnsupportedModelError("; ".join(f"{name} cannot be had: {reason}" for name, reason in refused.items()))
    for name, reason in refused.items():
        tqdm.write(f"{name} is left out: {reason}", file=sys.stderr)
    return [request for request in requests if request.name not in refused]


def refusals(requests: Sequence[Request], model: Any) -> dict[str, UnsupportedModelError]:
    """Why measures cannot be had of this model, or of what they come after, by name."""
    refused: dict[str, UnsupportedModelError] = {}
    for request in requests:
        try:
            (request.measure if request.measure.kind is None else request.options).requires(model)
        except UnsupportedModelError as reason:
            refused[request.name] = reason
        for name in request.measure.after:
            if name in refused:
                refused.setdefault(request.name, refused[name])
    return refused


def require_prompts(requests: Sequence[Request], tokens: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse prompts that a measure cannot be had of."""
    if short := [n for n, prompt in enumerate(tokens) if len(prompt) < 2]:
        raise InputError(f"prompt {short[0]} has only {len(tokens[short[0]])} token; two are needed at least")
    for request in requests:
        if len(tokens) < (least := request.measure.min_prompts):
            raise InputError(
                f"{request.name} compares prompts: {least} at least, not {len(tokens)}; give n_prompts={least}"
            )
        request.measure.check_prompts(request.options, tokens)
