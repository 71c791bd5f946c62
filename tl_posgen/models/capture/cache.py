"""Capture from an ActivationCache that already exists."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.backends.sites import FORMED, PARTS, checked_needs
from tl_posgen.models.capture.padding import (
    REMEDY,
    PadToken,
    ids_and_mask,
    seen_by_scores,
    spans_of_mask,
    spans_of_tokens,
)
from tl_posgen.models.geometry.pass_proof import proved_capture
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import is_pattern
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, check_indices, select_heads
from tl_posgen.models.session import Session, session_of


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
    session, needs = session_of(model), _checked(needs)
    indices = check_indices(layers, session.model.cfg.n_layers, "layer")
    return [name for names in _names(session, needs, indices).values() for name in names.values()]


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
    session, needs = session_of(model), None if needs is None else _checked(needs)
    selected = select_heads(session.model, layers, heads)
    if not hasattr(cache, "keys"):
        raise InputError(f"the cache is a {type(cache).__name__}; give what model.run_with_cache(tokens) returned")
    required, held = _names(session, needs or frozenset(), selected), set(cache.keys())
    missing = [(layer, part, name) for layer, of in required.items() for part, name in of.items() if name not in held]
    if missing:
        layer, part, name = missing[0]
        asked = f", needs={{{', '.join(map(repr, sorted(needs)))}}}" if needs else ""
        raise InputError(
            f"the cache has no {name} ({len(missing)} names are missing), the {part} of layer {layer}; make it with "
            f"model.run_with_cache(tokens, names_filter=tl_posgen.models.needed_names(model{asked}))"
        )
    probed = [session.layer(layer) for layer in selected]
    for one in probed:
        for name in held.intersection(one.sites.names.values()):
            _require_numbers(f"the cache's {name}", cache[name])
        if one.handed_on and (name := one.sites.names["attn_scores"]) in held and is_pattern(cache[name]):
            raise InputError(
                f"the cache's {name} holds the pattern after softmax, because TransformerBridge leaves the attention "
                "of this architecture to Hugging Face; make the cache inside `with tl_posgen.streaming(model):`"
            )
    given, mask = ids_and_mask(tokens)
    ids = None if given is None else _ids(given)
    read = partial(_read, cache, session)
    parts = read(probed[0], frozenset(), moved=False)  # of all prompts
    spans = _spans(parts, probed[0], ids, mask, PadToken.of_tokenizer(session.model.tokenizer))
    return _captures(read, probed, selected, ids, spans, needs)


def _require_numbers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on the device meta."""
    if tensor.is_meta:
        raise InputError(f"{name}: on the device meta, which holds no numbers; give those of a pass that was run")


def _checked(needs: Iterable[str]) -> frozenset[str]:
    needs = checked_needs(needs, (*PARTS, "inputs", "logits"))
    if unheld := needs & {"inputs", "logits"}:
        raise InputError(
            f"{' and '.join(sorted(unheld))}: an ActivationCache cannot give them; analyse the model itself instead "
            "(tl_posgen.analyze, or tl_posgen.models.run_capture), which runs it"
        )
    return needs


def _names(session: Session, needs: frozenset[str], layers: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return layer -> part -> hook name."""
    wanted = [part for part in PARTS if part in needs | {"q", "k"}]
    return {layer: {part: session.layer(layer).sites.names[part] for part in wanted} for layer in layers}


def _ids(tokens: Any) -> Int[Tensor, "batch pos"]:
    try:
        ids = torch.atleast_2d(torch.as_tensor(tokens))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"tokens: {tokens!r} are no token ids; give those that were run, [batch, pos]") from error
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise InputError(f"tokens of {ids.dtype} are no token ids; give those that were run, [batch, pos]")
    _require_numbers("tokens", ids)
    return ids


def _spans(
    parts: Mapping[str, Tensor],
    layer: Probed,
    tokens: Int[Tensor, "batch pos"] | None,
    mask: Bool[Tensor, "batch pos"] | None,
    pad: PadToken,
) -> list[slice]:
    """Find where the text of every prompt stands, by the parts of one layer."""
    batch, _, length, _ = parts["q"].shape
    if tokens is not None and (batch, length) != tuple(tokens.shape):
        raise InputError(
            f"tokens {list(tokens.shape)}: the cache holds {batch} prompts of {length} tokens; give the ids that were "
            "run, [batch, pos]"
        )
    spans = spans_of_tokens(batch, length, tokens, pad) if mask is None else spans_of_mask(mask)
    seen = torch.ones(batch, length, dtype=torch.bool)
    if known := "attn_scores" in parts:
        seen = seen_by_scores(layer.geometry, parts["attn_scores"], parts["q"].dtype).cpu()
    for prompt, span in enumerate(spans):
        unmasked = bool(seen[prompt].all())
        if span.start and unmasked:
            told = "its padding token is at" if mask is None else "its mask hides"
            why = (
                "the pass did not" if known else "whether the pass did is not known; add hook_attn_scores to the cache"
            )
            raise InputError(f"prompt {prompt}: {told} {span.start} tokens before the text, and {why}")
        if not unmasked and seen[prompt].nonzero()[:, 0].tolist() != list(range(length))[span]:
            raise InputError(f"prompt {prompt}: the pass masked other tokens than its padding; {REMEDY}")
    return spans


def _captures(
    read: Callable[..., dict[str, Tensor]],
    probed: list[Probed],
    selected: Mapping[int, list[int]],
    tokens: Int[Tensor, "batch pos"] | None,
    spans: list[slice],
    needs: frozenset[str] | None,
) -> Iterator[LayerCapture]:
    for prompt, span in enumerate(spans):
        for layer in probed:
            parts = {part: x[0] for part, x in read(layer, needs, slice(prompt, prompt + 1)).items()}
            ids, handed = None if tokens is None else tokens[prompt], parts if needs is None else needs
            yield proved_capture(layer, parts, selected[layer.geometry.layer], handed, prompt, ids, span)


def _read(
    cache: Any,
    session: Session,
    layer: Probed,
    needs: frozenset[str] | None,
    prompts: slice = slice(None),
    *,
    moved: bool = True,
) -> dict[str, Tensor]:
    """Read the wanted parts of one layer, and those that prove it, with their batch dimension, moved to where the layer
    is, or where they lie."""
    device = next(session.attention(layer.geometry.layer).parameters()).device
    stored, wanted = set(cache.keys()), layer.sites.names if needs is None else {"q", "k", *FORMED} | needs
    held = {part: cache[name] for part, name in layer.sites.names.items() if name in stored and part in wanted}
    batched = getattr(cache, "has_batch_dim", True)
    of_prompts = {part: (value if batched else value[None])[prompts] for part, value in held.items()}
    return {part: layer.sites.read(part, x.to(device) if moved else x) for part, x in of_prompts.items()}
