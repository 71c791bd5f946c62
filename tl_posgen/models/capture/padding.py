"""Telling text from padding: by the attention mask that a pass used, by one that is given, or by the padding token."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.geometry.proof import plain_scores
from tl_posgen.models.layers.fused import Mask
from tl_posgen.models.layers.geometry import LayerGeometry

WITHOUT_CACHE = "generate with use_past_kv_cache=False"
REMEDY = (
    "give an attention_mask, 1 for text and 0 for padding (analyze takes what the tokenizer returns, with input_ids "
    "and attention_mask), or run prompts one at a time, or give analyze the texts themselves"
)


PadToken: TypeAlias = tuple[int | None, bool]
NO_PADDING: PadToken = (None, False)


def pad_token(tokenizer: Any) -> PadToken:
    """Return the id of the token that a tokenizer pads with, None where there is none, and whether it is also the token
    that begins or ends a text, so that only a mask can tell."""
    index = getattr(tokenizer, "pad_token_id", None)
    special_ids = () if index is None else (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    return index, index in special_ids


def texts_of(rows: Sequence[Sequence[int]], pad: PadToken) -> list[slice]:
    """Find the text in the ids of every prompt of one batch, by the padding token alone. One at the same end of all of
    them is the token that begins or ends texts, as padding leaves the longest as it is.

    Raises:
        InputError: a prompt without tokens; the padding token also begins or ends texts, and stands at an end of some
            of them only, or twice.
    """
    if empty := [prompt for prompt, ids in enumerate(rows) if not len(ids)]:
        raise InputError(f"prompt {empty[0]} has no tokens")
    token, is_text = pad
    if token is None:
        return [slice(0, len(row)) for row in rows]
    begun, ended = (is_text and all(row[end] == token for row in rows) for end in (0, -1))
    spans = []
    for prompt, ids in enumerate(rows):
        text = [at for at, index in enumerate(ids) if index != token]
        if not text and len(ids) > begun + ended:
            raise InputError(f"prompt {prompt}: nothing but the padding token {token}")
        first, last = (text[0], text[-1]) if text else (begun, len(ids) - 1 - ended)
        left, right = first - begun, len(ids) - 1 - last - ended
        if (left or right) and (is_text or len(text) <= last - first):
            also = "also begins or ends texts" if is_text else "also stands inside it"
            n, where = max((left, "start"), (right, "end"))
            raise InputError(
                f"prompt {prompt} of {len(rows)}: {n} tokens at its {where} are {token}, which pads and {also}, so "
                f"padding cannot be told from text; {REMEDY}"
            )
        spans.append(slice(left, len(ids) - right))
    return spans


def spans_of_mask(attention_mask: Bool[Tensor, "batch pos"]) -> list[slice]:
    """Find the text of every prompt by a mask; InputError for an empty prompt, or gaps in one."""
    spans = []
    for prompt, seen in enumerate(attention_mask):
        places = seen.nonzero()[:, 0].tolist()
        span = slice(places[0], places[-1] + 1) if places else slice(0, 0)
        if not places or not seen[span].all():
            raise InputError(
                f"prompt {prompt}: "
                + ("all its tokens are masked" if not places else "tokens between others are masked for every query")
                + "; mask padding alone, before or behind the text"
            )
        spans.append(span)
    return spans


def require_whole(layer: int, n_queries: int, n_keys: int) -> None:
    """Refuse a pass whose keys stand in a KV cache in part."""
    if n_queries != n_keys:
        raise InputError(
            f"layer {layer}: {n_queries} queries see {n_keys} keys, so a KV cache is in use, and only passes over "
            f"whole prompts can be captured; {WITHOUT_CACHE}"
        )


def require_places(layer: int, n_tokens: int) -> None:
    """Refuse a pass of one token under hooks that find tokens by their place: it may be a step with a KV cache, whose
    queries, values and outputs do not show how many tokens stand before it."""
    if n_tokens == 1:
        raise InputError(
            f"layer {layer}: a pass of one token may be a step with a KV cache, and these hooks find tokens by their "
            f"place in the prompt; {WITHOUT_CACHE}"
        )


def text_of_pass(
    mask: Any, batch: int, length: int, tokens: Int[Tensor, "batch pos"] | None, pad: PadToken
) -> list[slice]:
    """Return the text of every prompt: by the mask, else by the padding token, where the ids are known.

    Padding behind the text changes nothing before it. Before the text it changes everything, so it is refused.

    Args:
        mask: an attention module's argument `attention_mask`: [batch, pos], what transformers makes of it, [batch, 1,
            query, key], the `Mask` of a streamed pass, or None for all.
    """
    text_mask = mask.padding if isinstance(mask, Mask) else mask
    if text_mask is not None:
        if text_mask.ndim == 4:
            text_mask = text_mask if text_mask.dtype == torch.bool else text_mask > torch.finfo(text_mask.dtype).min / 2
            # MPT marks what is hidden, as future keys are
            text_mask = (text_mask ^ text_mask[:1, :1, :1, -1:] if length > 1 else text_mask)[:, 0].any(1)
        if (spans := spans_of_mask(text_mask[:, :length].bool().expand(batch, -1))) != [slice(0, length)] * batch:
            return spans
    spans = spans_of_tokens(batch, length, tokens, pad)
    if before := next(((prompt, span.start) for prompt, span in enumerate(spans) if span.start), None):
        raise InputError(
            f"prompt {before[0]}: it begins with {before[1]} padding tokens that the model was not told to mask, so "
            f"its numbers are not those of the text; {REMEDY}"
        )
    return spans


def spans_of_scores(
    geometry: LayerGeometry, attn_scores: Float[Tensor, "batch head query key"], dtype: torch.dtype
) -> list[slice]:
    """Find the text of every prompt by the keys that queries of head 0 see, as all heads have one mask."""
    scores = plain_scores(attn_scores[:, 0], dtype)
    require_whole(geometry.layer, *scores.shape[1:])
    if scores.isnan().any():
        raise InputError(
            f"layer {geometry.layer}: scores are NaN before this edit; look for NaN in what hooks of earlier layers "
            "give, in the weights, and in padding that this model does not mask cleanly (run prompts one at a time)"
        )
    visible = scores != -torch.inf
    if (visible > geometry.visible(scores.shape[2], visible.device)).any():
        raise UnsupportedModelError(
            f"layer {geometry.layer}: queries see keys that the causal mask, or the window that was probed "
            f"(window {geometry.window}), should hide from them"
        )
    return spans_of_mask(visible.any(1))


def spans_of_tokens(batch: int, length: int, tokens: Int[Tensor, "batch pos"] | None, pad: PadToken) -> list[slice]:
    """Find the text of every prompt by the padding token; several prompts without ids are refused."""
    token, _ = pad
    if tokens is None and batch > 1 and token is not None:
        raise InputError(
            f"{batch} prompts in one pass, no mask and no token ids: padding cannot be told from text; give tokens=, "
            "or one prompt at a time"
        )
    return [slice(0, length)] * batch if tokens is None else texts_of(tokens.tolist(), pad)


def as_ids(ids: Any, wrong: str) -> Int[Tensor, "batch pos"]:
    """Return the token ids of one prompt or of several; InputError for what is none, `wrong` where it is no tensor."""
    try:
        token_ids = torch.atleast_2d(torch.as_tensor(ids))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(wrong) from error
    if token_ids.ndim != 2 or token_ids.numel() == 0:
        raise InputError(f"token ids must be [pos] or [batch, pos] and not empty; these are {list(token_ids.shape)}")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise InputError(f"token ids must be integers, not {token_ids.dtype}")
    if token_ids.is_meta:
        raise InputError("token ids are on the device meta, which holds no numbers; give those that were read")
    return token_ids


def ids_and_mask(prompts: Any) -> tuple[Any, Bool[Tensor, "batch pos"] | None]:
    """Return token ids, and the mask where there is one: of what a Hugging Face tokenizer returns, or of ids alone.

    Prompts of different lengths, each with a mask of its own, come back as lists of ids without what these hide.
    """
    if not isinstance(prompts, Mapping):
        return prompts, None
    if "input_ids" not in prompts:
        keys = ", ".join(map(str, prompts))
        raise InputError(f"prompts: a mapping with {keys}; it needs input_ids, as tokenizers return")
    ids, mask = prompts["input_ids"], prompts.get("attention_mask")
    if mask is None:
        return ids, None
    try:
        ids, mask = [torch.as_tensor(row) for row in ids], [torch.as_tensor(row) for row in mask]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError("input_ids and attention_mask must be [batch, pos], or a list for each prompt") from error
    if ids and not ids[0].ndim:  # one prompt
        ids, mask = [torch.stack(ids)], [torch.stack(mask)]
    if [row.shape for row in ids] != [row.shape for row in mask]:
        shapes = [list(row.shape) for row in (*mask[:1], *ids[:1])]
        raise InputError(f"attention_mask {shapes[0]}: the input_ids are {shapes[-1]}; give a mask of their shape")
    if any(((row != 0) & (row != 1)).any() for row in mask):
        raise InputError("attention_mask: give 1 for text and 0 for padding")
    if len({len(row) for row in ids}) > 1:
        spans = [spans_of_mask(row[None].bool())[0] for row in mask]
        return [row[span].tolist() for row, span in zip(ids, spans, strict=True)], None
    return torch.stack(ids), torch.stack(mask).bool()
