"""Disturbed order: hooks on positions of queries, keys, pairs and the position part alone, and draws for them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.arithmetic import is_real_tensor
from tl_posgen.core.options import require
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import at_positions, finished
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.distance.hooks import scores_at_distance
from tl_posgen.position.order.numbers import (
    Disturbance,
    Reach,
    jittered_distances,
    swap_tokens,
    swap_words,
    true_distances,
)
from tl_posgen.rope.scores_at import scores_at_positions

Condition = Literal["tokens", "words", "positions", "key_positions", "jitter", "position_part"]
CONDITIONS: tuple[str, ...] = get_args(Condition)
_OF_TEXT = ("tokens", "words")


@printing_call
def permute_positions(
    model: Model | Session,
    positions: Real[Tensor, "*prompt pos"],
    *,
    keys_only: bool = False,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """P: score_ij <- scale <R_{p_i} q_i, R_{p_j} k_j>; tokens, causal mask and targets are unchanged.

    Args:
        positions: p, one per token: usually a permutation of 0 .. n - 1, see `swap_tokens`. Or a row of them for each
            prompt of a pass.
        keys_only: queries keep their own positions: R_j k_j <- R_{p_j - j} R_j k_j, each rotated key moved alone (F).

    Only prompts of exactly this length can be run. Ours: the paper's definition of the perturbation is not known.

    Raises:
        InputError: in the forward pass, for prompts of another length.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions, which are not in the scores.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> shifted = permute_positions(model, torch.arange(12) + 100)  # only distances count
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=shifted), model(tokens), atol=1e-4)
        True
    """
    require("keys_only", keys_only, bool)

    def scores_of(capture: LayerCapture, there: Tensor) -> Float[Tensor, "head query key"]:
        return at_positions(capture, capture.positions if keys_only else there, there)

    return _of_one_length(model, positions, scores_of, layers, heads)


@printing_call
def jitter_distances(
    model: Model | Session, distances: Int[Tensor, "*prompt query key"], *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """F, per pair: score_ij <- the score at distances_ij = i - j + u_ij, see `jittered_distances`."""
    scores_of = partial(scores_at_distance, beyond=None)
    return _of_one_length(model, distances, scores_of, layers, heads, n_axes=2)


@printing_call
def permute_position_part(
    model: Model | Session, positions: Real[Tensor, "*prompt pos"], *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """F': W_ij <- W_ij + f(q_i, i - p_j) - f(q_i, i - j), with f(q_i, d) = scale <R_d q_i, R_0 kbar>.

    Only the position part has key j at p_j; the content part and the residual are unchanged. kbar is the mean key of
    the prompt, so no distance distribution enters. Soft caps and ALiBi are applied afterwards, at the true distances.
    """

    def scores_of(capture: LayerCapture, there: Tensor) -> Float[Tensor, "head query key"]:
        q, k, geometry, here = capture.q, capture.k, capture.geometry, capture.positions
        mean, there = k.mean(1, keepdim=True).expand_as(k), there.to(q.device)
        # <q_i, k_j> at the true distance, and kbar moved from j to p_j
        moved = scores_at_positions(q, mean, geometry.rope, geometry.scale, here, there)
        stayed = scores_at_positions(q, k - mean, geometry.rope, geometry.scale, here, here)
        return finished(moved + stayed, capture)

    return _of_one_length(model, positions, scores_of, layers, heads)


def _of_one_length(
    model: Model | Session,
    moved_to: Tensor,
    scores_of: Callable[[LayerCapture, Tensor], Float[Tensor, "head query key"]],
    layers: Layers,
    heads: Heads,
    n_axes: int = 1,
) -> HookList:
    """Return `replace_scores` for prompts of the length of the given positions or distances."""
    if not is_real_tensor(moved_to, n_axes) and not is_real_tensor(moved_to, n_axes + 1):
        what = (
            "positions: give a tensor of real numbers, one a token" if n_axes == 1 else "distances: give [query, key]"
        )
        raise InputError(f"{what}, not {list(moved_to.shape) if isinstance(moved_to, Tensor) else repr(moved_to)}")

    def checked(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        n, rows = capture.q.shape[1], moved_to.reshape(-1, *moved_to.shape[-n_axes:])
        place = capture.prompt if len(rows) > 1 else 0
        if place >= len(rows) or any(size != n for size in rows.shape[1:]):
            raise InputError(f"positions or distances {list(moved_to.shape)} were given; prompt {place} has {n} tokens")
        return scores_of(capture, rows[place])

    return replace_scores(model, checked, layers, heads, needs_positions=True)


def conditions_for(
    session: Session, conditions: Sequence[str] | None, layers: Layers = None, heads: Heads = None
) -> list[str]:
    """Return the given conditions, or all that the model allows; refuse the others before work starts.

    Swapped text reaches all layers and heads: where some are chosen it is left out, or refused if it was asked for.
    """
    everywhere = layers is None and heads is None
    of_text = [name for name in _OF_TEXT if everywhere and (name == "tokens" or session.model.tokenizer is not None)]
    of_positions = [name for name in CONDITIONS if name not in _OF_TEXT]
    wanted = [*of_text, *of_positions] if conditions is None else list(conditions)
    if not everywhere and (swapped := [name for name in wanted if name in _OF_TEXT]):
        raise InputError(
            f"condition {swapped[0]!r}: swapped text reaches every layer and head; leave layers and heads out, "
            f"or choose from {', '.join(of_positions)}"
        )
    if "words" in wanted:
        _require_tokenizer(session)
    if set(wanted) <= set(_OF_TEXT):
        return wanted
    try:
        permute_positions(session, torch.arange(2), layers=layers, heads=heads)  # refused where scores know no distance
    except UnsupportedModelError:
        if conditions is not None or not of_text:
            raise
        return of_text
    return wanted


def draw(
    session: Session,
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
        places, width = torch.arange(n), {"adjacent": 1, "window": window, "uniform": n}[reach]
        is_fixed = torch.isin(places, torch.tensor(protected))
        moved = jittered_distances(n, ratio, width, seed=seed)
        distances = torch.where(is_fixed[:, None] & is_fixed, true_distances(n), moved)
        return Disturbance(places, torch.zeros(n, dtype=torch.bool), places.new_zeros(0, 2), distances)
    options: dict[str, Any] = {"seed": seed, "window": window, "protected": protected}
    if condition == "words":
        return swap_words(n, words_of(session, tokens), ratio, reach, **options)
    return swap_tokens(n, ratio, reach, **options)


def disturb(
    session: Session,
    tokens: Int[Tensor, "row pos"],
    condition: str,
    drawn: Sequence[Disturbance],
    layers: Layers = None,
    heads: Heads = None,
) -> tuple[Int[Tensor, "row pos"], HookList]:
    """Return the tokens that the model reads, and the hooks that disturb its attention in a pass of these rows.

    The disturbance of a row may be that of a longer prompt whose further tokens are in order.
    """
    n = tokens.shape[-1]
    permutations = torch.stack([disturbance.permutation[:n] for disturbance in drawn])
    where: dict[str, Any] = {"layers": layers, "heads": heads}
    if condition in _OF_TEXT:
        return tokens.gather(-1, permutations), []
    if condition == "jitter":
        distances = [disturbance.distances[:n, :n] for disturbance in drawn if disturbance.distances is not None]
        return tokens, jitter_distances(session, distances[0] if len(tokens) == 1 else torch.stack(distances), **where)
    if condition == "position_part":
        return tokens, permute_position_part(session, permutations, **where)
    return tokens, permute_positions(session, permutations, keys_only=condition == "key_positions", **where)


def _require_tokenizer(session: Session) -> None:
    if session.model.tokenizer is None:
        raise InputError("condition 'words': no tokenizer here, so words are not known; choose other conditions")


def words_of(session: Session, tokens: Int[Tensor, " pos"]) -> list[tuple[int, int]]:
    """Return the token ranges of words.

    A word begins at a token with leading white space; a token without a letter or digit ends it and belongs to no word.
    """
    _require_tokenizer(session)
    words: list[tuple[int, int]] = []
    after_word = False
    for place, text in enumerate(token_strings(session, tokens)):
        is_word = any(letter.isalnum() for letter in text)
        if is_word and after_word and not text[0].isspace():
            words[-1] = (words[-1][0], place + 1)
        elif is_word:
            words.append((place, place + 1))
        after_word = is_word
    return words
