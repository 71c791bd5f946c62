"""Path patching of scores: position, content or interaction of one prompt in the running pass of another."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, finished, replace_scores
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loading.load import open_model
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.wrapped import wrap
from tl_posgen.prompt.numbers.split_terms import TERMS
from tl_posgen.prompt.score_split import one_prompt, terms_of
from tl_posgen.residual.reference import Reference, given_reference

Part = Literal["position", "key_part", "query_key", "content", "interaction"]
OF_PART = {"content": ("key_part", "query_key")} | {term: (term,) for term in TERMS}


def patch_parts(
    model: Any,
    from_prompt: Any,
    parts: Sequence[Part | str] = ("position",),
    heads: Heads = None,
    reference: Any = None,
) -> HookList:
    """W_ij <- W_ij - sum of parts_ij of the prompt that runs + those of another prompt, in chosen heads.

    Parts are those of `split`. With all of them the head attends as it does on the other prompt.

    Args:
        from_prompt: a text or token ids, whose parts are put in; the prompts that run have as many tokens.
        parts: any of "position", "key_part", "query_key", "content" (key_part + query_key), "interaction".
        heads: "3.1", "L3H1", (layer, head) pairs, a frame, or indices for all layers; all if left out.
        reference: as in `split`; the same for both prompts.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others.

    Raises:
        InputError: an unknown part, several prompts; later, in the forward pass: another number of tokens.
        UnsupportedModelError: a layer whose scores cannot be replaced.

    Source: ours; path patching is usual, of position and content in scores it is not.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> hooks = patch_parts(model, "The Queen ran after the Hatter", ("content",), heads="3.1")
        >>> tokens = model.to_tokens("The Queen ran after the Hatter")
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens), atol=1e-3)
        True
    """
    if isinstance(parts, str) or not parts or not set(parts) <= set(get_args(Part)):
        raise InputError(f"parts {parts!r}: give a list of any of {', '.join(get_args(Part))}")
    terms = sorted({term for part in parts for term in OF_PART[part]})
    wrapped = wrap(open_model(model))
    selected = select_heads(wrapped.model, heads=heads)
    row, captures = one_prompt(wrapped, from_prompt), list[LayerCapture]()
    means = given_reference(wrapped.model, reference, list(selected))
    places = [(layer, head) for layer, some in selected.items() for head in some]
    run_capture(wrapped, row[None], captures.append, heads=places)
    others = {capture.layer: sum_of(capture, means, terms) for capture in captures}

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        if capture.length != len(row):
            raise InputError(f"patch_parts: {capture.length} tokens run, and from_prompt has {len(row)}; give as many")
        geometry = capture.geometry
        own = geometry.scale * capture.rotated_q @ capture.rotated_k.mT
        kept = [selected[capture.layer].index(head) for head in capture.heads]
        change = others[capture.layer][kept].to(own.device) - sum_of(capture, means, terms)
        return finished(own + change.to(own), capture)

    return replace_scores(wrapped.model, scores_of, heads=places)


def sum_of(capture: LayerCapture, reference: Reference, terms: Sequence[str]) -> Float[Tensor, "head query key"]:
    """Return the sum of some terms of a captured layer's scores, without a mask.

    Position and interaction are zero where nothing rotates, as in `split`.
    """
    found = terms_of(capture, reference)
    kept = [term for term in terms if capture.geometry.rope.rotary_dim or term not in ("position", "interaction")]
    return sum((getattr(found, term) for term in kept), torch.zeros_like(found.position))
