"""Captures of a cache: what `model.run_with_cache(tokens)` returned, read as a pass would have been captured."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import checked_needs, proved_capture
from tl_posgen.models.capture.padding import as_ids, ids_and_mask, pad_token, spans_of_mask, spans_of_tokens
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import is_pattern, layer_capture
from tl_posgen.models.layers.capture import FORMED, PARTS, LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, check_indices, select_heads
from tl_posgen.models.session import Session, session_of

_NO_CACHE = ", or analyse the model itself (tl_posgen.analyze): an ActivationCache holds no more"


def needed_names(model: Model | Session, needs: Iterable[str] = frozenset(), layers: Layers = None) -> list[str]:
    """Return the names to ask run_with_cache for: `model.run_with_cache(tokens, names_filter=needed_names(model))`.

    q and k take 2 n d numbers per head. Scores (needs={"attn_scores"}) take n^2, and are recomputed exactly without.

    Raises:
        InputError: a need that no cache can hold.

    Example:
        >>> from tl_posgen import load_model
        >>> needed_names(load_model("mini"), needs={"pattern"}, layers=[2])
        ['blocks.2.attn.hook_q', 'blocks.2.attn.hook_k', 'blocks.2.attn.hook_pattern']
    """
    session = session_of(model)
    wanted = checked_needs(needs, PARTS, _NO_CACHE) | {"q", "k"}
    indices = check_indices(layers, session.model.cfg.n_layers, "layer")
    return [session.layer(index).names[part] for index in indices for part in PARTS if part in wanted]


def captures_from_cache(
    cache: Any,
    model: Model | Session,
    layers: Layers = None,
    heads: Heads = None,
    tokens: Any = None,
    needs: Iterable[str] | None = None,
) -> Iterator[LayerCapture]:
    """Yield one LayerCapture per prompt and layer, prompt after prompt, each cut to its text.

    Args:
        cache: the ActivationCache (or dict) of `model.run_with_cache`, with or without its batch dimension.
        layers, heads: which, as in `capturing`; all if left out.
        tokens: the ids that were run [batch, pos], or what the tokenizer returned, with input_ids and attention_mask;
            of a single prompt they may be left out.
        needs: what it must hold beyond q and k, of {"v", "attn_scores", "pattern", "resid"}, and is handed over; if
            left out, whatever it holds.

    Cache and tokens may lie on any devices: a layer is moved to where it is in the model.

    Raises:
        InputError: the cache lacks something (the message says how to ask for it); several prompts without `tokens`;
            padding that cannot be told from text; tokens of another shape than it; a need that no cache can hold; no
            numbers, on the device meta.
    """
    session, needs = session_of(model), None if needs is None else checked_needs(needs, PARTS, _NO_CACHE)
    selected = select_heads(session, layers, heads)
    if not hasattr(cache, "keys"):
        raise InputError(f"the cache is a {type(cache).__name__}; give what model.run_with_cache(tokens) returned")
    cached_names, probed_layers = set(cache.keys()), [session.layer(layer) for layer in selected]
    required = [part for part in PARTS if part in (needs or frozenset()) | {"q", "k"}]
    missing = [
        (probed, part) for probed in probed_layers for part in required if probed.names[part] not in cached_names
    ]
    if missing:
        probed, part = missing[0]
        argument = f", needs={{{', '.join(map(repr, sorted(needs)))}}}" if needs else ""
        raise InputError(
            f"the cache has no {probed.names[part]} ({len(missing)} names are missing), the {part} of layer "
            f"{probed.geometry.layer}; make it with "
            f"model.run_with_cache(tokens, names_filter=tl_posgen.models.needed_names(model{argument}))"
        )
    for probed in probed_layers:
        for name in cached_names.intersection(probed.names.values()):
            if not isinstance(cache[name], Tensor):
                raise InputError(
                    f"the cache's {name} is a {type(cache[name]).__name__}; give tensors, as model.run_with_cache does"
                )
            if cache[name].is_meta:
                raise InputError(f"the cache's {name}: on the device meta, which holds no numbers; give those of a run")
        if probed.left_to_hf and (name := probed.names["attn_scores"]) in cached_names and is_pattern(cache[name]):
            raise InputError(
                f"the cache's {name} holds the pattern after softmax, because TransformerBridge leaves the attention "
                "of this architecture to Hugging Face; make the cache inside `with tl_posgen.streaming(model):`"
            )

    ids, mask = ids_and_mask(tokens)
    if ids is not None:
        ids = as_ids(ids, f"tokens: {ids!r} are no token ids; give those that were run, [batch, pos]")

    def read_parts(probed: Probed, parts: Iterable[str], prompts: slice) -> dict[str, Tensor]:
        """Return those of these parts that the cache holds, [prompt, ...], where the layer lies in the model."""
        device = next(session.attention(probed.geometry.layer).parameters()).device
        tensors = {part: cache[name] for part, name in probed.names.items() if part in parts and name in cached_names}
        if not getattr(cache, "has_batch_dim", True):
            tensors = {part: x[None] for part, x in tensors.items()}
        return {part: probed.read(part, x[prompts].to(device)) for part, x in tensors.items()}

    batch, _, length, _ = read_parts(probed_layers[0], ["q"], slice(None))["q"].shape
    if ids is not None and (batch, length) != tuple(ids.shape):
        raise InputError(
            f"tokens {list(ids.shape)}: the cache holds {batch} prompts of {length} tokens; give the ids that were "
            "run, [batch, pos]"
        )
    pad = pad_token(session.model.tokenizer)
    spans = spans_of_tokens(batch, length, ids, pad) if mask is None else spans_of_mask(mask)
    has_scores = all(probed.names["attn_scores"] in cached_names for probed in probed_layers)
    if not has_scores and (padded := [(prompt, span.start) for prompt, span in enumerate(spans) if span.start]):
        raise InputError(
            f"prompt {padded[0][0]}: {padded[0][1]} tokens before its text are padding, and whether the pass masked "
            "them is not known; add hook_attn_scores to the cache"
        )

    def captures() -> Iterator[LayerCapture]:
        wanted = PARTS if needs is None else {"q", "k", *FORMED} | needs
        for prompt, span in enumerate(spans):
            for probed in probed_layers:
                parts = {part: x[0] for part, x in read_parts(probed, wanted, slice(prompt, prompt + 1)).items()}
                handed_over, of_prompt = parts if needs is None else needs, None if ids is None else ids[prompt]
                heads_there = selected[probed.geometry.layer]
                sinks = session.sinks(probed.geometry.layer)
                place = (prompt, of_prompt, span, sinks)
                capture = layer_capture(probed.geometry, parts, heads_there, handed_over, *place)
                yield proved_capture(capture, parts, span)

    return captures()
