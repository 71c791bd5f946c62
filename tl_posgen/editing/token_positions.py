"""Tokens of a prompt at other positions than 0, 1, 2, ..: far distances without long prompts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import OWN_SCORES
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of

MOST = 10**9  # tokens; angles of float64 are off by 1e-7 there


@contextmanager
def tokens_at(model: Model | Session, positions: Int[Tensor, " pos"]) -> Iterator[None]:
    """While the block runs, token t of every prompt stands at positions[t], as if the model was given `position_ids`.

    Scores are those at the distances between these positions, and keys further away than a layer's window are hidden
    (transformers, given `position_ids`, counts windows in tokens); learned positions are those of the table. Layers
    without positions do not change. Hooks that make scores of `LayerCapture.positions`, as those of this package that
    change distances, frequencies or planes do, find the tokens there too: give them to passes inside the block.

    Args:
        positions: rising, as many as the prompts have tokens, or more.

    Raises:
        InputError: positions that do not rise from 0 or more, above 10^9, or outside the table of learned ones; later,
            in a pass: longer prompts, a KV cache.
        UnsupportedModelError: a layer whose scores cannot be recomputed; learned positions that no table gives.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> with tokens_at(model, torch.arange(12) + 100):  # only distances count
        ...     same = model(tokens)
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    session = session_of(model)
    is_row = isinstance(positions, Tensor) and positions.ndim == 1 and not positions.is_floating_point()
    if not is_row or not (positions.diff(prepend=positions.new_tensor([-1])) > 0).all():
        described = f"{positions.tolist()[:6]}.." if isinstance(positions, Tensor) else repr(positions)
        raise InputError(f"positions {described}: give a tensor [pos] of whole numbers that rise from 0 or more")
    if len(positions) and positions[-1] > MOST:
        raise InputError(f"position {int(positions[-1])}: too far for exact angles; give {MOST:,} at most")
    encodings = {geometry.layer: geometry.encoding for geometry in geometry_of(session)}
    hooks = _learned_positions(session, positions) if "absolute" in encodings.values() else []
    if moved := [layer for layer, encoding in encodings.items() if encoding in ("rotary", "alibi")]:
        hooks += replace_scores(session, OWN_SCORES, moved)
    with session.placing(positions), session.under(hooks):
        yield


def _learned_positions(session: Session, positions: Int[Tensor, " pos"]) -> HookList:
    """Return the hook that gives each token the row of its position in the model's table."""
    table, n_ctx = next(iter(session.backend.model.pos_embed.parameters())).detach(), int(session.model.cfg.n_ctx)
    if len(positions) and int(positions[-1]) >= n_ctx:
        raise InputError(
            f"position {int(positions[-1])}: this model's table has {n_ctx} learned positions; give smaller ones"
        )

    def moved(embedded: Tensor, hook: object) -> Tensor:
        n, before = embedded.shape[-2], len(table) - n_ctx  # rows that stand for no position, as in OPT
        if n > len(positions) or not torch.equal(embedded[..., 0, :], table[before].expand_as(embedded[..., 0, :])):
            raise UnsupportedModelError("the positions of this model are not the rows of its table, or fewer are given")
        return table[before + positions[:n].to(table.device)].to(embedded).expand_as(embedded)

    return [("hook_pos_embed", moved)]
