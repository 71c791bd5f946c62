"""Ablations of queries, keys and RoPE: bands dropped, frozen or kept alone, rank one, means, no rotation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope, from_planes, rotate_by, to_planes, turns_at
from tl_posgen.rope.spectra import rank_one

Ablation = Literal["none", "drop", "freeze", "keep", "rank_one", "no_rope", "means", "means_no_rope"]
OF_THE_PROMPT = ("rank_one", "means", "means_no_rope")  # need all tokens of the prompt, later ones too


def drop(x: Float[Tensor, "*batch d_head"], rope: Rope, band: Bool[Tensor, " plane"]) -> Float[Tensor, "*batch d_head"]:
    """Set the planes of the band to zero; other planes and the unrotated remainder stay. Before RoPE."""
    return from_planes(to_planes(x, rope) * ~band.to(x.device), x[..., rope.rotary_dim :], rope)


def keep(x: Float[Tensor, "*batch d_head"], rope: Rope, band: Bool[Tensor, " plane"]) -> Float[Tensor, "*batch d_head"]:
    """Keep only the planes of the band; other planes and the unrotated remainder become zero. Before RoPE."""
    return from_planes(to_planes(x, rope) * band.to(x.device), torch.zeros_like(x[..., rope.rotary_dim :]), rope)


def without_rotation(rope: Rope, band: Bool[Tensor, " plane"]) -> Rope:
    """theta = 0 in the band: its planes keep their content and do not rotate with the position."""
    return replace(rope, inv_freq=rope.inv_freq * ~band.to(rope.inv_freq.device))


def ablate(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    kind: Ablation | str,
    band: Bool[Tensor, " plane"] | None = None,
    tops: Sequence[Float[Tensor, "head d_head"]] | None = None,
) -> tuple[Float[Tensor, "head query d_head"], Float[Tensor, "head key d_head"]]:
    """Return the rotated q and k after an ablation, of which the softmax is to be taken anew.

    Args:
        q, k: before RoPE; fewer queries than keys are the last ones.
        kind: "drop" the band, "freeze" it (theta = 0) or "keep" only it; "rank_one" truncates Q and K and keeps RoPE;
            "no_rope" keeps Q and K without rotation, so a slash made by position alone vanishes; "means" replaces q and
            k by their means over positions; "means_no_rope" also leaves out the rotation, which gives uniform
            attention. "none" changes nothing. The choice of ablations is ours.
        band: planes, for the first three.
        tops: the top right-singular vectors of Q and K, for "rank_one", where they are known.

    Raises:
        InputError: an unknown kind, or no band where one is needed.
    """
    if not isinstance(kind, str) or kind not in get_args(Ablation):
        raise InputError(f"ablation {kind!r}: choose one of {', '.join(get_args(Ablation))}")
    if kind not in ("drop", "freeze", "keep"):
        band = torch.ones_like(rope.inv_freq, dtype=torch.bool)
    elif band is None or band.shape != rope.inv_freq.shape:
        raise InputError(f"ablation {kind!r} needs a band: a boolean for each of the {len(rope.inv_freq)} planes")
    turning = without_rotation(rope, band) if kind in ("freeze", "no_rope", "means_no_rope") else rope
    if kind in ("drop", "keep"):
        q, k = ((drop if kind == "drop" else keep)(x, rope, band) for x in (q, k))
    elif kind == "rank_one":
        q, k = (rank_one(x, top) for x, top in zip((q, k), tops or (None, None), strict=True))
    elif kind in ("means", "means_no_rope"):
        q, k = (x.mean(-2, keepdim=True).expand_as(x) for x in (q, k))
    turns = turns_at(torch.arange(k.shape[1], device=k.device), turning)
    return rotate_by(q, turns[-q.shape[1] :], turning), rotate_by(k, turns, turning)
