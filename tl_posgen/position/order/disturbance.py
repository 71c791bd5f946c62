"""Disturbed order of a prompt: in the text, in the position index, or in the features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.order.hooks import jitter_distances, permute_position_part, permute_positions
from tl_posgen.position.order.numbers.swaps import Reach, jittered_distances, swap_tokens, swap_words

Condition = Literal["tokens", "words", "positions", "key_positions", "jitter", "position_part"]

CONDITIONS: tuple[str, ...] = get_args(Condition)
OF_TEXT = ("tokens", "words")
REACHES: tuple[Reach, ...] = get_args(Reach)


@dataclass(frozen=True)
class Disturbance:
    """A draw of disturbed order, which `disturb` applies.

    Attributes:
        permutation: new order of the places.
        distances: the distance of each pair under a jitter; else None.
        moved: places whose token or position is swapped (none for a jitter, which moves pairs).
        ratio: share of tokens (of pairs, for a jitter) that is actually moved.
    """

    permutation: Int[Tensor, " pos"]
    distances: Int[Tensor, "query key"] | None
    moved: Bool[Tensor, " pos"]
    ratio: float


def conditions_for(
    model: Model, conditions: Sequence[str] | None, layers: Layers = None, heads: Heads = None
) -> list[str]:
    """Return the given conditions, or all that the model allows; refuse the others before work starts.

    Swapped text reaches all layers and heads: where some are chosen it is left out, or refused if it was asked for.
    """
    everywhere = layers is None and heads is None
    of_text = [one for one in OF_TEXT if everywhere and (one == "tokens" or model.tokenizer is not None)]
    of_positions = [one for one in CONDITIONS if one not in OF_TEXT]
    wanted = [*of_text, *of_positions] if conditions is None else list(conditions)
    if not everywhere and (swapped := [one for one in wanted if one in OF_TEXT]):
        raise InputError(
            f"condition {swapped[0]!r}: swapped text reaches every layer and head; leave layers and heads out, "
            f"or choose from {', '.join(of_positions)}"
        )
    if "words" in wanted:
        require_tokenizer(model)
    if set(wanted) <= set(OF_TEXT):
        return wanted
    try:
        permute_positions(model, torch.arange(2), layers=layers, heads=heads)  # refused where scores know no distance
    except UnsupportedModelError:
        if conditions is not None or not of_text:
            raise
        return of_text
    return wanted


def draw(
    model: Model,
    tokens: Int[Tensor, " pos"],
    condition: str,
    reach: Reach | str,
    ratio: int | float,
    *,
    seed: int,
    window: int,
    protected: Sequence[int],
) -> Disturbance:
    """Return the disturbance of one seed; protected places keep their order among themselves."""
    n = len(tokens)
    if condition == "jitter":
        places, nowhere = torch.arange(n), torch.zeros(n, dtype=torch.bool)
        width = {"adjacent": 1, "window": window, "uniform": n}[reach]
        true = (places[:, None] - places).clamp(min=0)
        kept = torch.isin(places, torch.tensor(protected))
        distances = torch.where(kept[:, None] & kept, true, jittered_distances(n, ratio, width, seed=seed))
        share = float((distances != true).sum() / (n * (n + 1) / 2))
        return Disturbance(places, distances, nowhere, share)
    options: dict[str, Any] = {"seed": seed, "window": window, "protected": protected}
    if condition == "words":
        swaps = swap_words(n, words_of(model, tokens), ratio, reach, **options)
    else:
        swaps = swap_tokens(n, ratio, reach, **options)
    return Disturbance(swaps.permutation, None, swaps.moved, swaps.ratio)


def disturb(
    model: Model,
    tokens: Int[Tensor, "*row pos"],
    condition: str,
    disturbance: Disturbance,
    layers: Layers = None,
    heads: Heads = None,
) -> tuple[Int[Tensor, "*row pos"], HookList]:
    """Return the tokens that the model reads, and the hooks that disturb its attention.

    The disturbance may be that of a longer prompt whose further tokens are in order.
    """
    n = tokens.shape[-1]
    permutation = disturbance.permutation[:n]
    where: dict[str, Any] = {"layers": layers, "heads": heads}
    if condition in OF_TEXT:
        return tokens[..., permutation], []
    if condition == "jitter":
        assert disturbance.distances is not None
        return tokens, jitter_distances(model, disturbance.distances[:n, :n], **where)
    if condition == "position_part":
        return tokens, permute_position_part(model, permutation, **where)
    return tokens, permute_positions(model, permutation, keys_only=condition == "key_positions", **where)


def require_tokenizer(model: Model) -> None:
    if model.tokenizer is None:
        raise InputError("condition 'words': no tokenizer here, so words are not known; choose other conditions")


def words_of(model: Model, tokens: Int[Tensor, " pos"]) -> list[tuple[int, int]]:
    """Return the token ranges of words.

    A word begins at a token with leading white space; a token without a letter or digit ends it and belongs to no word.
    """
    require_tokenizer(model)
    words: list[tuple[int, int]] = []
    after_word = False
    for place, text in enumerate(token_strings(model, tokens)):
        is_word = any(letter.isalnum() for letter in text)
        if is_word and after_word and not text[0].isspace():
            words[-1] = (words[-1][0], place + 1)
        elif is_word:
            words.append((place, place + 1))
        after_word = is_word
    return words
