"""Splits of one prompt: every score as position, content and interaction, and hooks that put in those of another."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double, full_precision
from tl_posgen.core.options import fits
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.cache import captures_from_cache
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.geometry.proof import allowed_error
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loading.load import AnyModel, open_session
from tl_posgen.models.selection import Heads, one_head, select_heads
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.prompt.numbers import TERMS, split_terms
from tl_posgen.residual.reference import Reference, given_reference

DIMS = ("head", "query", "key")
_DESCRIPTIONS = {
    "score": "the model's own, scaled, before the mask: the sum of all parts",
    "position": "q conj(kbar) u(d): the query and the distance, whatever the key",
    "key_part": "qbar conj(k - kbar) ubar: the key's own part of content",
    "query_key": "(q - qbar) conj(k - kbar) ubar: this query with this key",
    "content": "key_part + query_key",
    "interaction": "q conj(k - kbar) (u(d) - ubar): neither of the two",
    "row": "s <q, kbar>, one number a row, which softmax sees through a soft cap only: nothing rotates here",
    "alibi": "slope (j - i)",
    "capped": "the score after the layer's soft cap, of all parts but `alibi`, which is added behind it: what softmax "
    "is given; the parts add up to `score`, before the cap",
}


@full_precision()
def split(
    model: AnyModel, prompt: Any, layer: int | None = None, heads: Heads = None, reference: Any = None
) -> xr.Dataset:
    r"""W_ij = position + content + interaction, content = key_part + query_key, for every pair of one prompt.

    Args:
        model: a model, or its name or directory.
        prompt: one text, or token ids.
        layer: which; may be left out where `heads` names heads of one layer.
        heads: "L3H1", "3.1" or (3, 1), or several of one layer in a list; all of the layer if left out.
        reference: where the mean query, the mean key and the distances come from: a text, what `reference_of` returned,
            or None for the bundled book. Never the prompt itself, whose means would hold what is to be explained.

    Returns:
        [head, query, key], NaN where a key is invisible. `score` is the model's own, before a soft cap (`capped` is
        after it); ALiBi is a part of its own, `alibi`, added behind the cap. Where nothing rotates, position and
        interaction are zero and `row` is what is left of them, one number a query. The attributes name the reference
        and how far the sum of the parts is from the pass's scores.

    Raises:
        InputError: no prompt, or several; heads of several layers; a reference of another model.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> parts = split("mini", "Down, down, down. Would the fall never end?", heads="3.1")
        >>> total = parts.position + parts.content + parts.interaction
        >>> bool((abs(total - parts.score) < 1e-4).sum() == parts.score.notnull().sum())
        True
    """
    session = open_session(model)
    selected = select_heads(session, None if layer is None else [layer], heads)
    if len(selected) != 1:
        raise InputError(f'layers {list(selected)}: one layer is split; give layer=, or a head by name, heads="L3H1"')
    ((index, picked),) = selected.items()
    tokens = one_prompt(session, prompt)
    session.layer(index)  # refused before the reference is read
    means, captures = given_reference(session, reference, [index]), []
    run_capture(session, tokens[None], captures.append, {"attn_scores"}, heads=[(index, head) for head in picked])
    return _split_of_capture(session, captures[0], means)


def position_part(
    cache: Any,
    layer: int | None = None,
    head: Any = None,
    *,
    model: AnyModel,
    reference: Any = None,
    tokens: Any = None,
) -> xr.DataArray:
    """q_i conj(kbar) u(i - j): the position part of one head's scores, [query, key], from an ActivationCache.

    Args:
        cache: of `model.run_with_cache` on one prompt; it needs the names of `tl_posgen.models.needed_names`.
        layer, head: one head; head="3.1" alone names it too.
        model: the model that was run, under the same hooks: the mean key is read by it as it is now.
        reference: as in `split`. tokens: the ids that were run, if known.

    Raises:
        InputError: the cache holds several prompts, or lacks q or k.

    Example:
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> _, cache = model.run_with_cache("Down, down, down.")
        >>> position_part(cache, 3, 1, model=model).dims
        ('query', 'key')
    """
    session = open_session(model)
    layer, head = one_head(session, layer, head)
    captures = list(captures_from_cache(cache, session, heads=(layer, head), tokens=tokens))
    if len(captures) != 1:
        raise InputError(f"{len(captures)} prompts: give the cache of one prompt")
    parts = _split_of_capture(session, captures[0], given_reference(session, reference, [layer]))
    return parts["position"][0].assign_attrs({**parts["position"].attrs, **parts.attrs})


def one_prompt(session: Session, prompt: Any) -> Int[Tensor, " pos"]:
    """Return the token ids of one prompt; InputError for several."""
    rows = to_prompts(session, prompt)
    if len(rows) != 1:
        raise InputError(
            f"{len(rows)} prompts: give one text, or the token ids of one prompt; docs/how_to/one_prompt.md averages "
            "over several"
        )
    return rows[0]


def _split_of_capture(session: Session, capture: LayerCapture, reference: Reference) -> xr.Dataset:
    """Return the split of a captured layer's heads, NaN at invisible pairs; UnsupportedModelError where its parts do
    not add up to the scores of the pass."""
    geometry, parts = capture.geometry, _terms_of(capture, reference)  # an edited capture refuses here
    products = torch.stack(list(parts.values())).sum(0)
    away = (capture.positions[:, None] - capture.positions).to(products.dtype)
    bias = geometry.distance_bias(away, capture.heads)
    if bias is not None:
        parts["alibi"] = bias.to(products)
    used = capture.scores() if capture.attn_scores is None else capture.attn_scores
    visible = geometry.visible(capture.length, products.device)
    gap = (geometry.finish(products, away, capture.heads) - used).abs().masked_fill(~visible, 0)
    allowed = allowed_error(capture.rotated_q, capture.rotated_k, geometry, session.dtype)
    largest_difference = proved(gap, allowed, f"layer {capture.layer}")
    total = products + parts["alibi"] if "alibi" in parts else products
    parts = {"score": total if geometry.has_cap else used, **parts}
    parts["content"] = parts["key_part"] + parts["query_key"]
    if geometry.has_cap:
        parts["capped"] = used
    labelled = ((name, part, {"description": _DESCRIPTIONS[name]}) for name, part in parts.items())
    data = {
        name: (DIMS, double(part).masked_fill(~visible, torch.nan).cpu().numpy(), {"units": "logits", **attributes})
        for name, part, attributes in labelled
    }
    coordinates: dict[str, Any] = {"head": list(capture.heads)}
    coordinates |= {dim: range(capture.length) for dim in ("query", "key")}
    if capture.tokens is not None:
        strings = np.array(token_strings(session, capture.tokens), dtype=object)  # whose NULs numpy's strings lose
        coordinates |= {"query_token": ("query", strings), "key_token": ("key", strings)}
    attrs = {"model": session.label, "layer": geometry.layer, "reference": reference.label}
    attrs |= {"largest_difference": largest_difference, "note": note_of(capture)}
    return xr.Dataset(data, coordinates, attrs)


def _terms_of(capture: LayerCapture, reference: Reference) -> dict[str, Float[Tensor, "head query key"]]:
    """Return the terms of a captured layer's scores, without a mask; where nothing rotates, position and interaction as
    zero, and `row`, what is left of them."""
    geometry, means, k = capture.geometry, reference.of_layer(capture.layer), capture.k
    of_heads = (means.mean_query, means.mean_key, means.mean_turn)
    mean_query, mean_key, turn = (x[list(capture.heads)].to(k.device) for x in of_heads)
    terms = split_terms(capture.q, k, mean_query, mean_key, turn, geometry.rope, geometry.scale)
    if geometry.rope.rotary_dim:
        return terms
    zero = torch.zeros_like(terms["position"])
    return terms | {"row": terms["position"], "position": zero, "interaction": zero}


def proved(gap: Float[Tensor, "*place"], allowed: Float[Tensor, "*place"], where: str) -> float:
    """Return the largest gap between a sum of terms and the pass's own scores; UnsupportedModelError where rounding
    does not allow it."""
    largest = float(gap.max())
    if not bool((gap <= allowed).all()):
        raise UnsupportedModelError(
            f"the terms of {where} add up to other scores than the pass used, off by {largest:.2g}; load the model in "
            "float32 if it is in half precision"
        )
    return largest


def note_of(capture: LayerCapture) -> str:
    """Say what is not as in a layer with RoPE alone; "" where nothing is."""
    geometry, notes = capture.geometry, []
    biased = geometry.distance_bias(0) is not None
    if not geometry.rope.rotary_dim:
        notes.append(
            "nothing rotates in this layer, so position and interaction are zero; what remains is content"
            + ("" if biased else ", which holds what the residual stream knows of positions")
        )
    if biased:
        notes.append("ALiBi is a part of its own, with no bias at distance 0")
    if geometry.has_cap:
        notes.append("the split is of the scores before the soft cap")
    if geometry.window is not None:
        notes.append(f"keys {geometry.window} and more tokens back are invisible")
    return "; ".join(notes)


# Path patching


Part = Literal["position", "key_part", "query_key", "content", "interaction"]
_OF_PART = {"content": ("key_part", "query_key")} | {term: (term,) for term in TERMS}


@printing_call
def patch_parts(
    model: AnyModel,
    from_prompt: Any,
    parts: Sequence[Part | str] = ("position",),
    heads: Heads = None,
    reference: Any = None,
) -> HookList:
    """W_ij <- W_ij - sum of parts_ij of the prompt that runs + those of another prompt, in chosen heads.

    Parts are those of `split`. With all of them the head attends as it does on the other prompt; where nothing rotates
    and there is a soft cap, `row` goes with query_key.

    Args:
        from_prompt: a text or token ids, whose parts are put in; the prompts that run have as many tokens.
        parts: any of "position", "key_part", "query_key", "content" (key_part + query_key), "interaction".
        heads: "L3H1", "3.1" or (3, 1), several in a list, or a frame; all if left out.
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
    if (
        isinstance(parts, str)
        or not fits(parts, Sequence[str])
        or not 0 < len(parts) == len({*parts} & {*get_args(Part)})
    ):
        raise InputError(f"parts {parts!r}: give a list of any of {', '.join(get_args(Part))}, each once")
    terms = sorted({term for part in parts for term in _OF_PART[part]})
    session = open_session(model)
    selected = select_heads(session, heads=heads)
    row, captures = one_prompt(session, from_prompt), list[LayerCapture]()
    means = given_reference(session, reference, list(selected))
    places = [(layer, head) for layer, picked in selected.items() for head in picked]
    run_capture(session, row[None], captures.append, heads=places)

    def part_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        by_term = _terms_of(capture, means)
        if "row" in by_term and capture.geometry.has_cap:  # which lets softmax see one number a row
            by_term["query_key"] = by_term["query_key"] + by_term["row"]
        return sum((by_term[term] for term in terms), torch.zeros_like(by_term["position"]))

    other_parts = {capture.layer: part_of(capture) for capture in captures}

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        if capture.length != len(row):
            raise InputError(f"patch_parts: {capture.length} tokens run, and from_prompt has {len(row)}; give as many")
        geometry = capture.geometry
        own_scores = geometry.scale * capture.rotated_q @ capture.rotated_k.mT
        indices = [selected[capture.layer].index(head) for head in capture.heads]
        change = other_parts[capture.layer][indices].to(own_scores.device) - part_of(capture)
        return finished(own_scores + change.to(own_scores), capture)

    return replace_scores(session, scores_of, heads=places)
