"""Capture from an ActivationCache that already exists."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.probe_layers import Probed
from tl_posgen.models.reading import layer_capture, refuse_padding
from tl_posgen.models.selection import Heads, Layers, chosen, select_heads
from tl_posgen.models.sites import PARTS, checked_needs, plain_scores
from tl_posgen.models.wrapped import wrap


def needed_names(model: Model, needs: Iterable[str] = frozenset(), layers: Layers = None) -> list[str]:
    """What to ask run_with_cache for: `model.run_with_cache(tokens, names_filter=needed_names(model))`.

    q and k take 2 n d numbers per head. Scores (needs={"attn_scores"}) take n^2, and are recomputed exactly without.

    Raises:
        InputError: a need that no cache can hold.

    Example:
        >>> from tl_posgen import load_model
        >>> needed_names(load_model("mini"), needs={"pattern"}, layers=[2])
        ['blocks.2.attn.hook_q', 'blocks.2.attn.hook_k', 'blocks.2.attn.hook_pattern']
    """
    indices = chosen(layers, model.cfg.n_layers, "layer")
    return [name for names in _names(model, _checked(needs), indices).values() for name in names.values()]


def captures_from_cache(
    cache: Any,
    model: Model,
    layers: Layers = None,
    heads: Heads = None,
    tokens: Int[Tensor, "batch pos"] | None = None,
    needs: Iterable[str] | None = None,
) -> Iterator[LayerCapture]:
    """One LayerCapture per prompt and layer, prompt after prompt.

    Args:
        cache: the ActivationCache (or dict) of `model.run_with_cache`, with or without its batch dimension.
        layers, heads: which, as in `capture_hooks`; all if left out.
        tokens: the ids that were run, if `LayerCapture.tokens` is wanted.
        needs: what it must hold beyond q and k, of {"v", "attn_scores", "pattern", "resid"}, and is handed over; if
            left out, whatever it holds.

    Raises:
        InputError: the cache lacks something (the message says how to ask for it), or holds padded prompts; tokens
            of another shape than it; a need that no cache can hold.
    """
    needs = None if needs is None else _checked(needs)
    selected = select_heads(model, layers, heads)
    if not hasattr(cache, "keys"):
        raise InputError(f"the cache is a {type(cache).__name__}; give what model.run_with_cache(tokens) returned")
    required, held = _names(model, needs or frozenset(), selected), set(cache.keys())
    missing = [(layer, part, name) for layer, of in required.items() for part, name in of.items() if name not in held]
    if missing:
        layer, part, name = missing[0]
        asked = f", needs={{{', '.join(map(repr, sorted(needs)))}}}" if needs else ""
        raise InputError(
            f"the cache has no {name} ({len(missing)} names are missing), the {part} of layer {layer}; make it with "
            f"model.run_with_cache(tokens, names_filter=tl_posgen.models.needed_names(model{asked}))"
        )
    probed = [wrap(model).layer(layer) for layer in selected]
    queries = _read(cache, probed[0], frozenset())["q"]
    if tokens is not None and (len(queries), queries.shape[2]) != tuple(tokens.shape):
        raise InputError(
            f"tokens {list(tokens.shape)}: the cache holds {len(queries)} prompts of {queries.shape[2]} tokens; give "
            "the ids that were run, [batch, pos]"
        )
    return _captures(cache, probed, selected, tokens, needs)


def _checked(needs: Iterable[str]) -> frozenset[str]:
    needs = checked_needs(needs, (*PARTS, "inputs", "logits"))
    if unheld := needs & {"inputs", "logits"}:
        raise InputError(
            f"{' and '.join(sorted(unheld))}: an ActivationCache cannot give them; analyse the model itself instead "
            "(tl_posgen.analyze, or tl_posgen.models.run_capture), which runs it"
        )
    return needs


def _names(model: Model, needs: frozenset[str], layers: Iterable[int]) -> dict[int, dict[str, str]]:
    """layer -> part -> hook name."""
    wanted = [part for part in PARTS if part in needs | {"q", "k"}]
    return {layer: {part: wrap(model).layer(layer).sites.names[part] for part in wanted} for layer in layers}


def _captures(
    cache: Any,
    probed: list[Probed],
    selected: Mapping[int, list[int]],
    tokens: Int[Tensor, "batch pos"] | None,
    needs: frozenset[str] | None,
) -> Iterator[LayerCapture]:
    for prompt in range(len(_read(cache, probed[0], frozenset())["q"])):
        for layer in probed:
            parts = {part: x[prompt] for part, x in _read(cache, layer, needs).items()}
            ids, handed = None if tokens is None else tokens[prompt], parts if needs is None else needs
            yield layer_capture(layer, parts, selected[layer.geometry.layer], handed, prompt, ids)


def _read(cache: Any, layer: Probed, needs: frozenset[str] | None) -> dict[str, Tensor]:
    """What the cache holds of one layer and is wanted (scores always), with its batch dimension."""
    stored, wanted = set(cache.keys()), layer.sites.names if needs is None else {"q", "k", "attn_scores"} | needs
    held = {part: cache[name] for part, name in layer.sites.names.items() if name in stored and part in wanted}
    batched = getattr(cache, "has_batch_dim", True)
    parts = {part: layer.sites.read(part, value if batched else value[None]) for part, value in held.items()}
    if "attn_scores" in parts:  # padding shows in them
        refuse_padding(layer, plain_scores(parts["attn_scores"][:, 0], parts["q"].dtype))
    return parts
