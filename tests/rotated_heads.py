"""Queries and keys of a head, turned one distance at a time: what closed forms over RoPE are held against."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from captures import run
from drawn import normal

from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.rope.scores_at import scores_at_positions

ROPES = {  # of heads of 8
    "half": Rope(inverse_frequencies(8, 100.0)),
    "adjacent": Rope(inverse_frequencies(8, 100.0), pairing="adjacent"),
    "partial, scaled": Rope(inverse_frequencies(4, 100.0), scaling=1.3),
    "none": Rope(),
}
ROTATING = {name: rope for name, rope in ROPES.items() if name != "none"}


def random_head(seed: int = 0, heads: int = 2, n: int = 12, d_head: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = normal(2, heads, n, d_head, seed=seed)
    return q + 0.5, k - 0.2


def scores_at_every(
    distances: Iterable[float], q: torch.Tensor, k: torch.Tensor, rope: Rope, scale: float = 1.0
) -> torch.Tensor:
    """scale <R_d q_i, R_0 k_j> [head, query, key, distance], one rotation at a time."""
    here = rotate(k, torch.zeros(k.shape[1]), rope)
    turned = [rotate(q, torch.full((q.shape[1],), float(d)), rope) for d in distances]
    return scale * torch.stack([x @ here.mT for x in turned], -1)


def true_distances(n: int) -> torch.Tensor:
    return (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)


def captures_of(model, prompts: Iterable[torch.Tensor], *needs: str, **where) -> list[LayerCapture]:
    """Layer by layer, prompt after prompt."""
    return [one for prompt in prompts for one in run(model, prompt[None], frozenset(needs), **where)]


def attention_of(page: str) -> dict:
    """What a circuitsvis page of attention maps is given."""
    return json.loads(re.findall(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S)[0])


@dataclass(frozen=True)
class AdditiveFit:
    """table_dj ~ mean + rows_d + columns_j; r its correlation with the table, interaction_share = 1 - r^2."""

    mean: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    r: torch.Tensor
    interaction_share: torch.Tensor


def additive_fit(table: torch.Tensor) -> AdditiveFit:
    table = table.double()
    mean = table.mean((-2, -1))
    rows, columns = table.mean(-1) - mean[..., None], table.mean(-2) - mean[..., None]
    centred = table - mean[..., None, None]
    left = centred - rows[..., :, None] - columns[..., None, :]
    share = left.square().mean((-2, -1)) / centred.square().mean((-2, -1))
    return AdditiveFit(mean, rows, columns, (1 - share).clamp(min=0).sqrt(), share)


def distance_table(q, k, rope, scale, distances):
    """M_dj = scale <R_d q, R_0 k_j> [head, distance, key]: one query per head with every key at every distance."""
    every = q[:, None].expand(-1, len(distances), -1)
    return scores_at_positions(every, k, rope, scale, distances, torch.zeros(k.shape[1]))
