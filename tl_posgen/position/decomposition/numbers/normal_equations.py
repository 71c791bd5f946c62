"""Normal equations of three additive axes, solved for all heads at once in a few steps."""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs

MAX_ITERATIONS = 10_000
SPREAD = 8.0  # largest estimated ratio of eigenvalues: about 25 steps
BANDS = (64, 128, 256, 512, 1024)
LOOK_AFTER = 16  # steps between two looks at the residual on an accelerator, where a look makes the host wait
BAND_ENTRIES = 2**22  # largest tokens times band: 192 MiB of factors


def solve(
    pairs: CausalPairs,
    counts: Float[Tensor, "axis=3 1 size"],
    right: Float[Tensor, "axis=3 head size"],
    ridge: float,
    tolerance: float,
    rounding: Float[Tensor, "axis=3 head size"],
) -> tuple[Float[Tensor, "axis=3 head size"], int]:
    r"""theta = (X'WX + ridge)^-1 right, up to the rounding of the right side; returns (theta, number of steps).

    The block of the distances is diagonal, so they are eliminated exactly: a_d is the mean over the pairs at d of what
    b and c leave. The system for b and c is solved by conjugate gradients. On a full triangle without weights its
    diagonal is a sufficient preconditioner: averaging over the pairs of an index maps a polynomial of degree p to one
    of degree p, so the preconditioned matrix has the eigenvalues 1 + m - 2 m^2 and 1 - m, m = (-1)^p / (p + 1), of
    which three are zero and the others lie between 5/8 and 3/2 at any length. Without a ridge it is then known
    beforehand how many steps are enough (`sufficient_steps`); on an accelerator so many are made, without a look at the
    residual.

    A window, or weights on near distances, couple distant tokens weakly: waves along the text have small eigenvalues,
    and the diagonal would need about 4 n / width steps. Then the preconditioner is the matrix of b and c up to some
    distance (a band, factored once into blocks of as many tokens and cached for all heads, layers and prompts of this
    length); pairs beyond it enter by the diagonal alone, which describes them well as they couple all tokens evenly.

    Args:
        counts: `pairs.counts()`.
        right: right side, projected by `CausalPairs.consistent`; 0 at distances beyond the window.
        tolerance: of the residual in the norm of the preconditioner, relative to the right side.
        rounding: error of the right side, entry by entry.

    Raises:
        InputError: the tolerance is not reached in MAX_ITERATIONS.
    """
    weights, diagonal = pairs.weights(right.device), counts[1] + ridge
    at_distance = (1 / (counts[0] + ridge)).masked_fill(counts[0] == 0, 0)
    eliminated = weights.square() * at_distance
    precondition = _preconditioner(pairs, ridge, right.device)

    image = partial(_image, pairs, eliminated, diagonal)
    left = right[1:] - sum_over_pairs(weights * at_distance * right[0])
    errors = right.abs().mul_(4 * torch.finfo(right.dtype).eps) + rounding  # the difference above may cancel
    rounded = errors[1:] + sum_over_pairs(weights * at_distance * errors[0])
    known = None if right.device.type == "cpu" else sufficient_steps(pairs, ridge, tolerance)
    x, steps = _conjugate_gradients(pairs, image, precondition, left, tolerance, rounded.square() / diagonal, known)
    a = at_distance * (right[0] - weights * sum_over_pairs(x.sum(0)))
    return torch.cat([a[None], x]), steps


def sum_over_pairs(x: Tensor) -> Tensor:
    """Return the sum of one axis over the pairs of each index of another axis."""
    return x.cumsum(-1).flip(-1)


def _image(pairs: CausalPairs, eliminated: Tensor, diagonal: Tensor, x: Tensor) -> Tensor:
    """Return the matrix of b and c times x."""
    others = pairs.over_band(x).flip(0, -1)
    return others.sub_(sum_over_pairs(eliminated * sum_over_pairs(x.sum(0)))).addcmul_(diagonal, x)


Operator = Callable[[Float[Tensor, "axis=2 head size"]], Float[Tensor, "axis=2 head size"]]


def _conjugate_gradients(
    pairs: CausalPairs,
    image: Operator,
    precondition: Operator,
    right: Tensor,
    tolerance: float,
    rounding: Tensor,
    known: int | None,
) -> tuple[Tensor, int]:
    """Return the solution and the number of steps: `known`, or as many as the residual needs."""
    x, residual = torch.zeros_like(right), right.clone()
    look_after = 1 if right.device.type == "cpu" else LOOK_AFTER
    direction = precondition(residual)
    size = (residual * direction).sum((0, 2))
    enough = (tolerance**2 * size).maximum(rounding.sum((0, 2)))
    steps = 0
    while True:
        unfinished = size > enough
        if steps == known or (known is None and steps % look_after == 0 and not unfinished.any()):
            return x, steps
        if steps == MAX_ITERATIONS:
            cause = f"a window of {pairs.width} ties" if pairs.unweighted else "these weights by distance tie"
            raise InputError(
                f"no fit within {steps} steps: {cause} {pairs.size} tokens too loosely together; give a ridge, or a "
                "shorter text"
            )
        steps += 1
        moved = image(direction)
        length = torch.where(unfinished, size / (direction * moved).sum((0, 2)), 0)[:, None]
        x.addcmul_(length, direction)
        residual.addcmul_(length, moved, value=-1)
        preconditioned = precondition(residual)
        size, before = (residual * preconditioned).sum((0, 2)), size
        direction = direction.mul_(torch.where(before > 0, size / before, 0)[:, None]).add_(preconditioned)


def sufficient_steps(pairs: CausalPairs, ridge: float, tolerance: float) -> int | None:
    """log(2 sqrt(c) / tolerance) / log((sqrt(c) + 1) / (sqrt(c) - 1)), c = 12/5 the ratio of the extreme eigenvalues
    of a full triangle without weights and without a ridge, see `solve`; None where that is not known."""
    if ridge or not pairs.unweighted or pairs.width < pairs.size:
        return None
    root = math.sqrt((3 / 2) / (5 / 8))
    return math.ceil(math.log(2 * root / tolerance) / math.log((root + 1) / (root - 1)))


def _preconditioner(pairs: CausalPairs, ridge: float, device: torch.device) -> Operator:
    if band := preconditioner_band(pairs):
        banded = partial(_band_solve, *band_factors(pairs, ridge, band, device))
        whole = band >= pairs.size and ridge == 0
        return (lambda x: without_free_constant(banded(without_free_constant(x)))) if whole else banded
    inverse = 1 / (pairs.counts(device)[1] + ridge)
    return lambda x: inverse * x


def without_free_constant(x: Float[Tensor, "axis=2 head size"]) -> Float[Tensor, "axis=2 head size"]:
    """Remove a constant that b gains and c loses: a band with every distance would amplify its rounding error."""
    apart = (x[0] - x[1]).mean(-1, keepdim=True) / 2
    return torch.stack([x[0] - apart, x[1] + apart])


@lru_cache(maxsize=256)
def preconditioner_band(pairs: CausalPairs) -> int:
    r"""Return the least number of distances that a preconditioner must hold; 0 if its diagonal is enough, or it would
    be too large.

    Away from the ends of the text, waves e^{i theta t} along b and c have the eigenvalue D - |sum_d w_d e^{i theta d}|,
    D = sum_d w_d; in the preconditioner the sum has only the distances below the band. The largest ratio of the two is
    kept below SPREAD.
    """
    n = pairs.size
    weights = pairs.counts()[0, 0] / n
    octaves, distances = (torch.arange(stop, dtype=DOUBLE, device="cpu") for stop in (n.bit_length(), n))
    angles = math.pi / n * 2 ** octaves[:, None] * distances
    turned = torch.polar(weights.expand_as(angles), angles).cumsum(-1).abs()
    total = weights.sum()
    cost = (total - turned[:, -1]).clamp(min=1e-12 * total)
    if n == 1 or (total / cost).max() <= SPREAD:
        return 0
    for band in BANDS:
        if band * n > BAND_ENTRIES:
            break
        if ((total - turned[:, min(band, n) - 1]) / cost).max() <= SPREAD:
            return min(band, n)
    return 0


@lru_cache(maxsize=2)
def band_factors(pairs: CausalPairs, ridge: float, band: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the block Cholesky factors of the band: inverses of the pivots, and their rows for the block before."""
    size, n_blocks = pairs.size, -(-pairs.size // band)
    at_keys = pairs.counts(device)[2, 0] + ridge
    filled = (0, n_blocks * band - size)
    diagonal = torch.stack([pad(x, filled, value=1.0) for x in (at_keys.flip(0), at_keys)])  # queries from the first
    diagonal = diagonal.unflatten(1, (n_blocks, band)).mul_(1 + 1e-9)  # for free directions
    index = torch.arange(band, device=device)
    distance = index[:, None] - index
    weights = pad(pairs.weights(device), (0, 2 * band))
    inside = weights[distance.clamp(min=0)].masked_fill(distance < 0, 0)
    before = weights[(distance + band).clamp(max=band)].masked_fill(distance >= 0, 0)
    inverses, ties = [], []
    for block in range(n_blocks):
        left = min(band, size - block * band)
        kept = (index < left)[:, None]
        corner = inside * kept * kept.T
        queries = diagonal[0, block].diag()
        if block:
            tie = before * kept
            ties.append(tie @ inverses[-1][band:])
            queries = queries - ties[-1][:, band:] @ tie.T
        pivot = torch.cat([torch.cat([queries, corner], 1), torch.cat([corner.T, diagonal[1, block].diag()], 1)])
        inverses.append(torch.cholesky_inverse(torch.linalg.cholesky(pivot)))
    return torch.stack(inverses), torch.stack(ties) if ties else inverses[0].new_zeros(0, band, 2 * band)


def _band_solve(
    inverses: Tensor, ties: Tensor, right: Float[Tensor, "axis=2 head size"]
) -> Float[Tensor, "axis=2 head size"]:
    """[D_b T; T' D_c]^-1 right by block Cholesky, T the weights below the band, in blocks of as many tokens."""
    size, n_blocks, band = right.shape[-1], len(inverses), inverses.shape[-1] // 2
    x = torch.stack([right[0].flip(-1), right[1]])
    x = pad(x, (0, n_blocks * band - size)).unflatten(-1, (n_blocks, band))
    x = x.permute(2, 0, 3, 1).flatten(1, 2).contiguous()  # [block, query or key, head]
    for block, tie in enumerate(ties, start=1):
        x[block, :band] -= tie @ x[block - 1]
    x = inverses @ x
    for block in range(len(ties) - 1, -1, -1):
        x[block] -= ties[block].T @ x[block + 1, :band]
    x = x.unflatten(1, (2, band)).permute(1, 3, 0, 2).flatten(2)[..., :size]
    return torch.stack([x[0].flip(-1), x[1]])
