"""What a fit leaves of a head's scores: how much, at which distances, and in which planes."""

from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.rope.bilinear_sums import sums_along_diagonals
from tl_posgen.rope.rotation import Rope, complex_planes


def residual_energies(
    e: Float[Tensor, "head query key"], mask: Bool[Tensor, "query key"]
) -> dict[str, Float[Tensor, "head *distance"]]:
    """Sum of e^2 and number of pairs of each head; the same, and the sum of |e|, at each distance. float64; they add.

    e must be 0 where the mask is not; its last row and last key are one token.

    Example:
        >>> import torch
        >>> found = residual_energies(torch.tensor([[[1.0, 0.0], [-3.0, 2.0]]]), torch.ones(2, 2).tril().bool())
        >>> {name: value[0].tolist() for name, value in found.items() if name.endswith("_at")}
        {'energy_at': [5.0, 9.0], 'abs_at': [3.0, 3.0], 'pairs_at': [2.0, 1.0]}
    """
    squares, sizes = (sums_along_diagonals(x) for x in (e.double().square(), e.double().abs()))
    pairs = sums_along_diagonals(mask[None].double()).expand_as(squares)
    totals = {"energy": squares.sum(-1), "pairs": pairs.sum(-1)}
    return totals | {"energy_at": squares, "abs_at": sizes, "pairs_at": pairs}


def plane_products(
    e: Float[Tensor, "head query key"],
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
) -> Float[Tensor, "head plane_and_rest"]:
    r"""<W_m, e>: the sum of W_m e over pairs, W_m the part of the score in plane m (remainder as in `complex_planes`).

    Over <e, e> they add up to 1 when e is what a least-squares fit leaves of W = sum_m W_m. The fit is linear, so
    e = sum_m e_m with e_m what it leaves of plane m alone, and <e_m, e> = <W_m, e> because e is at right angles to
    every fit: the planes' shares need no fit a plane. Negative: the plane works against e.

    Args:
        e: 0 at the pairs that do not count.
        rotated_q, rotated_k: after RoPE.
    """
    e = e.double()
    zq, zk = complex_planes(rotated_q.double(), rope), complex_planes(rotated_k.double(), rope)
    return scale * (zq.real * (e @ zk.real) + zq.imag * (e @ zk.imag)).sum(1)
