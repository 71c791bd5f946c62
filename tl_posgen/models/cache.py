"""Capture from an ActivationCache that already exists."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import chosen, layer_capture, refuse_padding
from tl_posgen.models.probe import Probed, probe, supported
from tl_posgen.models.sites import PARTS, plain_scores


def needed_names(model: Model, needs: frozenset[str] = frozenset(), layers: Sequence[int] | None = None) -> list[str]:
    """What to ask run_with_cache for: `model.run_with_cache(tokens, names_filter=needed_names(model))`.

    q and k take 2 n d numbers per head. Scores (needs={"attn_scores"}) take n^2, and are recomputed exactly without.
    """
    probed = probe(model)
    parts = [part for part in PARTS if part in needs | {"q", "k"}]
    return [
        supported(probed[layer]).sites.names[part]
        for layer in chosen(layers, model.cfg.n_layers, "layer")
        for part in parts
    ]


def captures_from_cache(
    cache: Any,
    model: Model,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> Iterator[LayerCapture]:
    """One LayerCapture per prompt and layer, prompt after prompt; with scores, pattern, v and resid where cached.

    Args:
        cache: the ActivationCache (or dict) of `model.run_with_cache`, with or without its batch dimension.
        layers, heads: which; all if left out.
        tokens: the ids that were run, if `LayerCapture.tokens` is wanted.

    Raises:
        InputError: the cache lacks q or k of a layer (the message says how to ask for them), or holds padded prompts.
    """
    indices, chosen_heads = chosen(layers, model.cfg.n_layers, "layer"), chosen(heads, model.cfg.n_heads, "head")
    missing = [name for name in needed_names(model, layers=indices) if name not in cache.keys()]  # noqa: SIM118
    if missing:
        raise InputError(
            f"the cache has no {missing[0]} ({len(missing)} names are missing); make it with "
            "model.run_with_cache(tokens, names_filter=tl_posgen.models.needed_names(model))"
        )
    return _captures(cache, [supported(probe(model)[index]) for index in indices], chosen_heads, tokens)


def _captures(
    cache: Any, probed: Sequence[Probed], heads: Sequence[int], tokens: Int[Tensor, "batch pos"] | None
) -> Iterator[LayerCapture]:
    for prompt in range(len(read(cache, probed[0])["q"])):
        for layer in probed:
            parts = read(cache, layer)
            of_prompt = {part: x[prompt] for part, x in parts.items()}
            yield layer_capture(layer, of_prompt, heads, parts, prompt, None if tokens is None else tokens[prompt])


def read(cache: Any, layer: Probed) -> dict[str, Tensor]:
    """The parts of one layer that the cache holds, each with its batch dimension."""
    names = set(cache.keys())
    held = {part: cache[name] for part, name in layer.sites.names.items() if name in names}
    if not getattr(cache, "has_batch_dim", True):
        held = {part: value[None] for part, value in held.items()}
    parts = {part: layer.sites.read(part, value) for part, value in held.items()}
    if "attn_scores" in parts:
        refuse_padding(layer, plain_scores(parts["attn_scores"][:, 0], parts["q"].dtype))
    return parts
